"""The page in a real browser: Debian's Chromium, headless, driven by selenium, off the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import Driver, chromium, needs_chromium, requests, waited
from dpbam.app.report import draw, write_report
from tests.app.report.synthetic import CLASSES, write_run

pytest.importorskip("selenium", reason="selenium is in the dev extra")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = needs_chromium
NASTY = '</script><img src=x onerror="window.pwned=1">'


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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.downloads = tmp_path_factory.mktemp("downloads")
        place = {"behavior": "allow", "downloadPath": str(driver.downloads)}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", place)
        yield driver


@pytest.fixture
def opened(browser: Driver, page: Path) -> Driver:
    """The page, drawn anew for one test."""
    browser.switch_to.window(browser.window_handles[0])
    return drawn(browser, page)


@pytest.fixture(scope="module")
def first(browser: Driver, page: Path) -> tuple[str, list[Any], list[str]]:
    """A tab with the page, what it logged, and what it asked for, as it was drawn."""
    browser.switch_to.new_window("tab")
    drawn(browser, page)
    return browser.current_window_handle, browser.get_log("browser"), requests(browser)


@pytest.fixture
def shared(browser: Driver, first: tuple[str, list[Any], list[str]]) -> Driver:
    """The page for tests that leave it as it was, or change what no other test looks at."""
    browser.switch_to.window(first[0])
    browser.get_log("browser")
    return browser


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
    first: tuple[str, list[Any], list[str]], shared: Driver, page: Path
) -> None:
    _, errors, asked = first
    assert errors == []
    assert shared.execute_script("return window.pwned") is None
    assert page.as_uri() in asked
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [page.as_uri()]


def with_child(driver: Driver, element: str) -> None:
    """Append the element, see the page's policy refuse it, and take it away again."""
    driver.execute_script(f"document.body.append({element})")
    errors = waited(lambda: driver.get_log("browser"))
    assert "Content Security Policy" in errors[0]["message"]
    driver.execute_script("document.body.lastChild.remove()")


def test_a_request_would_be_seen_and_is_refused(shared: Driver) -> None:
    """The control of the test above, and what the page's own policy is for."""
    with_child(shared, "Object.assign(new Image(), {src: 'http://a.test/'})")


def test_a_script_from_elsewhere_is_refused(shared: Driver) -> None:
    """The policy knows the page's script by its hash: an injected one does not run."""
    text = "{textContent: 'window.pwned = 1'}"
    with_child(shared, f"Object.assign(document.createElement('script'), {text})")
    assert shared.execute_script("return window.pwned") is None


def test_every_figure_is_drawn_and_described(shared: Driver) -> None:
    drawn = shared.execute_script(
        "return [...document.querySelectorAll('[data-figure]')].map(f => [f.dataset.figure,"
        " f.querySelectorAll('.canvas svg path').length,"
        " f.querySelector('[role=graphics-document]').ariaLabel])"
    )
    assert {"accuracy", "bias", "decomposition", "norms", "confusion"} <= {n for n, _, _ in drawn}
    assert all(marks > 3 for _, marks, _ in drawn)
    assert all(label for _, _, label in drawn)
    bad = "return document.documentElement.innerHTML.match(/NaN|undefined|Infinity/g)"
    assert shared.execute_script(bad.replace("documentElement", "querySelector('main')")) is None


def test_names_from_outside_are_text(shared: Driver) -> None:
    assert shared.find_elements(By.TAG_NAME, "img") == []
    text = shared.execute_script(
        "return document.querySelector('[data-figure=classes] .canvas').textContent"
    )
    assert "onerror" in text


def test_a_click_in_the_legend_fades_the_other_groups(shared: Driver) -> None:
    name = part(shared, "bias", ".role-legend-label text")
    curves = (
        "return [...document.querySelectorAll('[data-figure=bias] .mark-line path')]"
        ".map(path => path.getAttribute('opacity'))"
    )
    before = shared.execute_script(curves)
    name.click()
    after = waited(lambda: (found := shared.execute_script(curves)) != before and found)
    assert "0.1" not in before
    assert after.count("0.1") == 2  # the other group's mean, in both panels


def test_pointing_at_a_curve_shows_its_values(shared: Driver) -> None:
    circle = part(shared, "accuracy", ".mark-symbol.role-mark path:nth-child(3)")
    ActionChains(shared).move_to_element(circle).perform()
    tip = waited(lambda: shared.find_element(By.ID, "vg-tooltip-element").text)
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


def test_the_slider_moves_the_clipping_norm(shared: Driver) -> None:
    slider = part(shared, "clipping", "input[type=range]")
    facts = "return document.querySelector('[data-figure=clipping] svg').textContent"
    assert "|bias| 0.67" in shared.execute_script(facts)
    slider.send_keys(Keys.END)
    waited(lambda: "|bias| 0.00" in shared.execute_script(facts))  # nothing is clipped


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
    shared.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_figures_export(shared: Driver) -> None:
    part(shared, "bias", ".canvas summary").click()
    for k, kind in ((1, "svg"), (2, "png")):
        link = part(shared, "bias", f".vega-actions a:nth-child({k})")
        ActionChains(shared).click_and_hold(link).perform()
        waited(lambda link=link: link.get_attribute("href").startswith(("data:", "blob:")))
        ActionChains(shared).release().perform()
        saved = downloaded(shared, f"bias.{kind}")
        assert saved.startswith(b"<svg" if kind == "svg" else b"\x89PNG")
    svg = downloaded(shared, "bias.svg").decode()
    assert "not protected by privacy: do not share" in svg
    assert "var(--" not in svg  # it stands alone
    part(shared, "bias", "figcaption a").click()
    mark = b"# not protected by privacy: do not share\n"
    assert downloaded(shared, "bias.csv").startswith(mark + b"panel,series")


def test_the_pages_csv_is_the_files(shared: Driver, page: Path) -> None:
    """With five digits: vectors, and nothing that is drawn for the slider or twice."""
    part(shared, "clipping", "figcaption a").click()
    saved = downloaded(shared, "clipping.csv").decode().splitlines()
    written = draw("clipping", [], page.parent / "clipping.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in saved] == [line.split(",")[:2] for line in written]


def test_a_phone_needs_no_sideways_scrolling(browser: Driver, page: Path) -> None:
    browser.switch_to.window(browser.window_handles[0])
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    drawn(browser, page)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert browser.get_log("browser") == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
