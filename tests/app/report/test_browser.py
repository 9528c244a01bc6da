"""The page in a real browser: Debian's Chromium, headless, driven by selenium, off the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from browsing import Driver, blemishes, chromium, needs_chromium, requests, reset, waited
from dpbam.app.cli import main
from dpbam.app.report import draw, write_report
from tests.app.report.synthetic import CLASSES, write_run

pytest.importorskip("selenium", reason="selenium is in the dev extra")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

pytestmark = needs_chromium
NASTY = '</script><img src=x onerror="window.pwned=1">'


#: What the tests that change the page need of it: four figures of fourteen are drawn sooner.
FEW = ("differences", "accuracy", "bias", "confusion")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(root / f"{method}-{seed}", method=method, seed=seed, classes=(NASTY, *CLASSES))
        for method in ("dp-sgd", "bam")
        for seed in (1, 2)
    ]
    return write_report(runs, root / "report.html")


@pytest.fixture(scope="module")
def short_page(page: Path) -> Path:
    """The page with the cards of FEW alone: its script draws the cards that there are."""
    others = rf'<figure [^>]*data-figure="(?!(?:{"|".join(FEW)})").*?</figure>'
    short = re.sub(others, "", page.read_text(encoding="utf-8"), flags=re.S)
    path = page.with_name("short.html")
    path.write_text(short, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def changed(browser: Driver, tmp_path: Path) -> Driver:
    """A tab for tests that change what they open: each opens a page anew."""
    browser.switch_to.window(browser.window_handles[0])
    reset(browser, tmp_path)
    return browser


@pytest.fixture
def opened(changed: Driver, short_page: Path) -> Driver:
    """A page of five figures, drawn for one test."""
    return drawn(changed, short_page)


class Untouched(NamedTuple):
    """The page as it was drawn, in a tab of its own, for tests that leave it so."""

    tab: str
    logged: list[Any]
    asked: list[str]
    content: list[int]


@pytest.fixture(scope="module")
def untouched(browser: Driver, page: Path) -> Untouched:
    browser.switch_to.new_window("tab")
    drawn(browser, page)
    logged, asked = browser.get_log("browser"), requests(browser)
    return Untouched(browser.current_window_handle, logged, asked, content(browser))


@pytest.fixture
def shared(browser: Driver, untouched: Untouched, tmp_path: Path) -> Iterator[Driver]:
    """The page for tests that leave it as it was: one that does not fails."""
    browser.switch_to.window(untouched.tab)
    reset(browser, tmp_path)
    browser.get_log("browser")
    yield browser
    assert content(browser) == untouched.content, "the test changed the page: it wants `opened`"


def content(driver: Driver) -> list[int]:
    """The sizes of all parts of the page: its text itself has two million letters."""
    return driver.execute_script(
        "return [...document.querySelectorAll('body, main, main > *, figure')]"
        ".map(part => part.outerHTML.length)"
    )


def drawn(driver: Driver, page: Path) -> Driver:
    """Open the page and wait for its figures."""
    driver.get_log("performance")
    driver.get_log("browser")
    driver.get(page.as_uri())
    every = "return [...document.querySelectorAll('.canvas')].every(c => c.querySelector('svg'))"
    waited(lambda: driver.execute_script(every))
    return driver


def downloaded(driver: Driver, name: str) -> bytes:
    path = driver.downloads / name
    return waited(lambda: path.read_bytes() if path.exists() else b"")


def part(driver: Driver, figure: str, selector: str) -> Any:
    """The first such element of a figure, scrolled into view."""
    found = driver.find_element(By.CSS_SELECTOR, f"[data-figure={figure}] {selector}")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def test_no_error_and_no_request_leaves_the_file(
    untouched: Untouched, shared: Driver, page: Path
) -> None:
    asked = untouched.asked
    assert untouched.logged == []
    assert shared.execute_script("return window.pwned") is None
    assert page.as_uri() in asked
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [page.as_uri()]


def refuse(driver: Driver, element: str) -> None:
    """Append the element, see the page's policy refuse it, and take it away again."""
    driver.execute_script(f"document.body.append({element})")
    errors = waited(lambda: driver.get_log("browser"))
    assert "Content Security Policy" in errors[0]["message"]
    driver.execute_script("document.body.lastChild.remove()")


def test_a_request_would_be_seen_and_is_refused(shared: Driver) -> None:
    """The control of the test above, and what the page's own policy is for."""
    refuse(shared, "Object.assign(new Image(), {src: 'http://a.test/'})")


def test_a_script_from_elsewhere_is_refused(shared: Driver) -> None:
    """The policy knows the page's script by its hash: an injected one does not run."""
    text = "{textContent: 'window.pwned = 1'}"
    refuse(shared, f"Object.assign(document.createElement('script'), {text})")
    assert shared.execute_script("return window.pwned") is None


def test_every_figure_is_drawn_and_described(shared: Driver) -> None:
    drawn = shared.execute_script(
        "return [...document.querySelectorAll('[data-figure]')].map(f => [f.dataset.figure,"
        " f.querySelectorAll('.canvas svg path').length,"
        " f.querySelector('[role=graphics-document]').ariaLabel])"
    )
    names = {name for name, _, _ in drawn}
    assert {"differences", "accuracy", "bias", "direction", "norms", "confusion"} <= names
    assert all(marks > 3 for _, marks, _ in drawn)
    assert all(label for _, _, label in drawn)
    assert blemishes(shared) == []


def test_names_from_outside_are_text(shared: Driver) -> None:
    assert shared.find_elements(By.TAG_NAME, "img") == []
    text = shared.execute_script(
        "return document.querySelector('[data-figure=classes] .canvas').textContent"
    )
    assert "onerror" in text


def test_a_click_in_the_legend_fades_the_other_groups(opened: Driver) -> None:
    name = part(opened, "bias", ".role-legend-label text")
    curves = (
        "return [...document.querySelectorAll('[data-figure=bias] .mark-line path')]"
        ".map(path => path.getAttribute('opacity'))"
    )
    before = opened.execute_script(curves)
    name.click()
    after = waited(lambda: (found := opened.execute_script(curves)) != before and found)
    assert "0.1" not in before
    assert after.count("0.1") == 2  # the other group's mean, in both panels


#: Points at every mark and legend, clicks on each n-th, returns the texts that it was shown.
EVERYWHERE = """
const [n, done] = arguments, shown = {};
const at = (mark, ...types) => {
  const { x, y, width, height } = mark.getBoundingClientRect();
  const where = { bubbles: true, clientX: x + width / 2, clientY: y + height / 2, view: window };
  for (const type of types)
    mark.dispatchEvent(new (type.startsWith("pointer") ? PointerEvent : MouseEvent)(type, where));
};
const settle = () => new Promise((end) => setTimeout(end, 0));
(async () => {
  for (const card of document.querySelectorAll("[data-figure]")) {
    const texts = (shown[card.dataset.figure] = new Set());
    const marks = card.querySelectorAll(":is(.role-mark, [class*=role-legend]) > :is(path, text)");
    for (const [k, mark] of marks.entries()) {
      at(mark, "pointerover", "mouseover", "pointermove", "mousemove");
      const tip = document.querySelector("#vg-tooltip-element.visible");
      if (mark.closest(".role-mark")) texts.add(tip?.textContent ?? "");
      if (k % n === 0) at(mark, "pointerdown", "mousedown", "pointerup", "mouseup", "click");
      at(mark, "pointerout", "mouseout");
    }
    await settle();
    shown[card.dataset.figure] = [...texts];
  }
  return shown;
})().then(done);
"""


def assert_values_everywhere(driver: Driver, n: int) -> None:
    shown = driver.execute_async_script(EVERYWHERE, n)
    assert blemishes(driver) == []
    assert driver.get_log("browser") == []
    for figure, texts in shown.items():
        assert any(texts), f"nothing in {figure} shows its values"
        assert not [text for text in texts if re.search("NaN|undefined|Infinity|null", text)]
    assert all(shown["confusion"]), "the number in a cell hides the cell's values"


def test_pointing_and_clicking_shows_values_alone(opened: Driver) -> None:
    assert_values_everywhere(opened, n=20)


@pytest.mark.slow
def test_no_place_of_the_full_page_shows_what_is_no_value(changed: Driver, page: Path) -> None:
    assert_values_everywhere(drawn(changed, page), n=1)


def test_a_blemish_would_be_seen_and_an_exported_picture_is_none(opened: Driver) -> None:
    """The control of the tests above: what an address says by chance is none."""
    link = part(opened, "bias", ".vega-actions a")
    opened.execute_script("arguments[0].href = 'data:image/png;base64,48aNaNGi'", link)
    assert blemishes(opened) == []
    mark = part(opened, "bias", ".mark-line path")
    opened.execute_script("arguments[0].setAttribute('d', 'M0,NaNL1,1')", mark)
    opened.execute_script("document.querySelector('h1').append('NaN%')")
    assert blemishes(opened) == ["NaN%", "path d=M0,NaNL1,1"]


def test_pointing_at_a_curve_shows_its_values(opened: Driver) -> None:
    circle = part(opened, "accuracy", ".mark-symbol.role-mark path:nth-child(3)")
    ActionChains(opened).move_to_element(circle).perform()
    tip = waited(lambda: opened.find_element(By.ID, "vg-tooltip-element").text)
    assert "epoch" in tip
    assert "accuracy" in tip


def turn_the_wheel(driver: Driver, figure: str, **modifiers: int) -> None:
    """Over the figure's first panel, wherever the page has scrolled to."""
    plot = part(driver, figure, ".canvas svg")
    box = driver.execute_script("return arguments[0].getBoundingClientRect().toJSON()", plot)
    at = {"x": box["x"] + box["width"] / 4, "y": box["y"] + box["height"] / 2}
    wheel = {"type": "mouseWheel", "deltaX": 0, "deltaY": -300, **at, **modifiers}
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)


def test_figures_zoom_with_ctrl_and_the_wheel(opened: Driver) -> None:
    ticks = "return document.querySelector('[data-figure=accuracy] svg').textContent"
    before = opened.execute_script(ticks)
    turn_the_wheel(opened, "accuracy")
    assert opened.execute_script(ticks) == before  # it scrolls the page

    def zoomed() -> bool:
        turn_the_wheel(opened, "accuracy", modifiers=2)
        return opened.execute_script(ticks) != before

    waited(zoomed)


def test_the_system_can_ask_for_dark(shared: Driver) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return getComputedStyle(document.querySelector('[data-figure=accuracy] svg text')).fill"
    light = shared.execute_script(paper), shared.execute_script(ink)
    wish = [{"name": "prefers-color-scheme", "value": "dark"}]
    shared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})
    assert shared.execute_script(paper) != light[0]
    assert shared.execute_script(ink) != light[1]  # figures follow
    shared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": wish})
    assert shared.execute_script(paper) == "rgb(255, 255, 255)"  # paper is white
    assert shared.execute_script(ink) == light[1]


def test_figures_export(opened: Driver) -> None:
    part(opened, "bias", ".canvas summary").click()
    for k, kind in ((1, "svg"), (2, "png")):
        link = part(opened, "bias", f".vega-actions a:nth-child({k})")
        ActionChains(opened).click_and_hold(link).perform()
        waited(lambda link=link: link.get_attribute("href").startswith(("data:", "blob:")))
        ActionChains(opened).release().perform()
        saved = downloaded(opened, f"bias.{kind}")
        assert saved.startswith(b"<svg" if kind == "svg" else b"\x89PNG")
    svg = downloaded(opened, "bias.svg").decode()
    assert "not protected by privacy: do not share" in svg
    assert "var(--" not in svg  # it stands alone
    part(opened, "bias", "figcaption a").click()
    mark = b"# not protected by privacy: do not share\n"
    assert downloaded(opened, "bias.csv").startswith(mark + b"panel,series")


def test_the_pages_csv_is_the_files(shared: Driver, page: Path) -> None:
    """With five digits, and the same rows."""
    part(shared, "layers", "figcaption a").click()
    saved = downloaded(shared, "layers.csv").decode().splitlines()
    runs = sorted((p for p in page.parent.iterdir() if p.is_dir()), reverse=True)
    written = draw("layers", runs, page.parent / "layers.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in saved] == [line.split(",")[:2] for line in written]


@pytest.mark.parametrize("name", ["short_page", pytest.param("page", marks=pytest.mark.slow)])
def test_a_phone_needs_no_sideways_scrolling(
    changed: Driver, name: str, request: pytest.FixtureRequest
) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    changed.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    drawn(changed, request.getfixturevalue(name))
    assert changed.execute_script("return document.documentElement.scrollWidth") <= 390
    assert changed.get_log("browser") == []


N = 80
QUICK = ["--method", "dp-sgd", "--noise-multiplier", "1", "--accountant", "rdp", "--batch-size",
         "16", "--epochs", "1", "--measure-bias", "every=1", "--quiet"]  # fmt: skip
FLAGS = {
    "single-label": ["--model", "mlp"],
    "multi-label": ["--model", "mlp"],
    "regression": ["--model", "mlp", "--target-range", "0:1"],
    "segmentation": ["--model", "unet", "--model-option", "width=4"],
}
DRAWN = "return [...document.querySelectorAll('.canvas')].every(c => c.querySelector('svg'))"
TOO_WIDE = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
SCALED = """
return Math.min(...[...document.querySelectorAll('.canvas svg')].map(svg =>
  svg.getBoundingClientRect().width / svg.viewBox.baseVal.width))
"""
TICKS = """
return [...document.querySelectorAll('.role-axis-label')].map(axis =>
  [...axis.querySelectorAll('text')].filter(t => t.getAttribute('opacity') !== '0')
    .map(t => t.textContent))
"""


def arrays(task: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (N, 16, 16), dtype=np.uint8)
    labels = {
        "single-label": {"labels": np.arange(N) % 3},
        "multi-label": {"labels": rng.integers(0, 2, (N, 3))},
        "regression": {"labels": images.mean(axis=(1, 2)) / 255},
        "segmentation": {"masks": (images > 128).astype(np.uint8)},
    }
    return {"images": images, **labels[task]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("single-label", "accuracy, 95% interval"),
        ("multi-label", "AUC, 95% interval"),
        ("regression", "R2, 95% interval"),
        ("segmentation", "Dice, 95% interval"),
    ],
)
def test_the_page_of_a_task(task: str, metric: str, tmp_path: Path) -> None:
    page = report_on(arrays(task), tmp_path, ["--task", task, *FLAGS[task]])
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 400):
            check_page(browser, page, width)
            shown = browser.execute_script("return document.getElementById('summary').textContent")
            assert metric in shown
            assert "The best constant answer would have" in shown


@pytest.mark.slow
def test_the_page_of_patients(tmp_path: Path) -> None:
    whose = {"patient": np.arange(N) // 2}
    page = report_on(
        arrays("single-label") | whose, tmp_path, ["--model", "mlp", "--unit", "patient"]
    )
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 400):
            check_page(browser, page, width)
            main = browser.execute_script("return document.querySelector('main').innerText")
            assert "16 patients per batch" in main
            assert "guesses whether one patient was used" in main
            assert "sample" not in main


def report_on(data: dict[str, np.ndarray], folder: Path, flags: list[str]) -> Path:
    """The report of a run on these arrays."""
    np.savez(folder / "x.npz", **data)
    run = str(folder / "run")
    assert main(["train", "--data", str(folder / "x.npz"), *flags, *QUICK, "--out", run]) == 0
    assert main(["evaluate", run, "--save"]) == 0
    assert main(["report", run, "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


def check_page(browser: Driver, page: Path, width: int) -> None:
    """Open the page, and check what holds of each: drawn, nothing too wide, labels to read."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 400}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    waited(lambda: browser.execute_script(DRAWN))
    assert browser.get_log("browser") == []
    assert browser.execute_script(TOO_WIDE) <= 0
    assert browser.execute_script(SCALED) > 0.7  # labels of 10 pixels have at least 7
    for labels in browser.execute_script(TICKS):
        named = [label for label in labels if label]  # a logarithmic axis leaves some out
        assert len(set(named)) == len(named), labels
