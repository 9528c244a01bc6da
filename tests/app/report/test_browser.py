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
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(page.as_uri())
    drawn = "return [...document.querySelectorAll('.canvas')].every(c => c.querySelector('svg'))"
    waited(lambda: browser.execute_script(drawn))
    return browser


def downloaded(driver: Driver, name: str) -> bytes:
    path = driver.downloads / name
    return waited(lambda: path.read_bytes() if path.exists() else b"")


def part(driver: Driver, figure: str, selector: str) -> Any:
    """The first such element of a figure, scrolled into view."""
    found = driver.find_element(By.CSS_SELECTOR, f"[data-figure={figure}] {selector}")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def test_no_error_and_no_request_leaves_the_file(opened: Driver, page: Path) -> None:
    assert opened.get_log("browser") == []
    assert opened.execute_script("return window.pwned") is None
    asked = requests(opened)
    assert page.as_uri() in asked
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [page.as_uri()]


def test_a_request_would_be_seen_and_is_refused(opened: Driver) -> None:
    """The control of the test above, and what the page's own policy is for."""
    opened.execute_script(
        "document.body.append(Object.assign(new Image(), {src: 'http://a.test/'}))"
    )
    errors = waited(lambda: opened.get_log("browser"))
    assert "Content Security Policy" in errors[0]["message"]


def test_a_script_from_elsewhere_is_refused(opened: Driver) -> None:
    """The policy knows the page's script by its hash: an injected one does not run."""
    opened.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.pwned = 1';"
        "document.body.append(s)"
    )
    assert opened.execute_script("return window.pwned") is None
    assert "Content Security Policy" in waited(lambda: opened.get_log("browser"))[0]["message"]


def test_every_figure_is_drawn_and_described(opened: Driver) -> None:
    drawn = opened.execute_script(
        "return [...document.querySelectorAll('[data-figure]')].map(f => [f.dataset.figure,"
        " f.querySelectorAll('.canvas svg path').length,"
        " f.querySelector('[role=graphics-document]').ariaLabel])"
    )
    assert {"accuracy", "bias", "decomposition", "norms", "confusion"} <= {n for n, _, _ in drawn}
    assert all(marks > 3 for _, marks, _ in drawn)
    assert all(label for _, _, label in drawn)
    bad = "return document.documentElement.innerHTML.match(/NaN|undefined|Infinity/g)"
    assert opened.execute_script(bad.replace("documentElement", "querySelector('main')")) is None


def test_names_from_outside_are_text(opened: Driver) -> None:
    assert opened.find_elements(By.TAG_NAME, "img") == []
    text = opened.execute_script(
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


def test_the_slider_moves_the_clipping_norm(opened: Driver) -> None:
    slider = part(opened, "clipping", "input[type=range]")
    facts = "return document.querySelector('[data-figure=clipping] svg').textContent"
    assert "|bias| 0.67" in opened.execute_script(facts)
    slider.send_keys(Keys.END)
    waited(lambda: "|bias| 0.00" in opened.execute_script(facts))  # nothing is clipped


def test_the_system_can_ask_for_dark(opened: Driver) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return getComputedStyle(document.querySelector('[data-figure=accuracy] svg text')).fill"
    light = opened.execute_script(paper), opened.execute_script(ink)
    wish = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})
    assert opened.execute_script(paper) != light[0]
    assert opened.execute_script(ink) != light[1]  # figures follow
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": wish})
    assert opened.execute_script(paper) == "rgb(255, 255, 255)"  # paper is white
    assert opened.execute_script(ink) == light[1]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


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
    assert "not private: operator only" in svg
    assert "var(--" not in svg  # it stands alone
    part(opened, "bias", "figcaption a").click()
    assert downloaded(opened, "bias.csv").startswith(b"# not private: operator only\npanel,series")


def test_the_pages_csv_is_the_files(opened: Driver, page: Path) -> None:
    """With five digits: vectors, and nothing that is drawn for the slider or twice."""
    part(opened, "clipping", "figcaption a").click()
    saved = downloaded(opened, "clipping.csv").decode().splitlines()
    written = draw("clipping", [], page.parent / "clipping.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in saved] == [line.split(",")[:2] for line in written]


def test_a_phone_needs_no_sideways_scrolling(opened: Driver, page: Path) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened.get(page.as_uri())
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 390
    assert opened.get_log("browser") == []
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
