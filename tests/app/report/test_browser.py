"""The page in a real browser: Debian's Chromium, headless, driven by selenium, off the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import Driver, chromium, needs_chromium, requests
from dpbam.app.report import write_report
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
    return browser


def fact(driver: Driver, name: str) -> str:
    return str(driver.find_element(By.CSS_SELECTOR, f"[data-widget] [data-fact={name}]").text)


def downloaded(driver: Driver, name: str) -> bytes:
    path = driver.downloads / name
    return waited(lambda: path.read_bytes() if path.exists() else b"")


def waited(find: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
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


def test_every_figure_is_drawn(opened: Driver) -> None:
    drawn = opened.execute_script(
        "return [...document.querySelectorAll('[data-figure]')].map(f => [f.dataset.figure,"
        " f.querySelectorAll('.canvas svg path, .canvas svg rect, .canvas svg line').length])"
    )
    assert {"accuracy", "bias", "decomposition", "norms", "confusion"} <= {n for n, _ in drawn}
    assert all(marks > 3 for _, marks in drawn)
    bad = "return document.documentElement.innerHTML.match(/NaN|undefined|Infinity/g)"
    assert opened.execute_script(bad.replace("documentElement", "querySelector('main')")) is None


def test_tables_sort_both_ways(opened: Driver) -> None:
    table = opened.find_element(By.CSS_SELECTOR, "#results table")
    button = table.find_elements(By.CSS_SELECTOR, "th button")[3]  # the bias

    def values() -> list[float]:
        cells = table.find_elements(By.CSS_SELECTOR, "tbody tr td:nth-child(4)")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    button.click()
    assert values() == sorted(values())
    assert len(set(values())) == 2
    button.click()
    assert values() == sorted(values(), reverse=True)
    head = table.find_elements(By.CSS_SELECTOR, "thead th")[3]
    assert head.get_attribute("aria-sort") == "descending"


def test_the_widget_follows_drag_keys_and_slider(opened: Driver) -> None:
    grip = opened.find_element(By.CSS_SELECTOR, "[data-grip=g1]")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", grip)
    before = fact(opened, "bias")
    knob = grip.find_element(By.CSS_SELECTOR, ".knob")
    ActionChains(opened).click_and_hold(knob).move_by_offset(60, 40).release().perform()
    dragged = fact(opened, "bias")
    assert dragged != before
    moved = fact(opened, "g1")
    grip.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert fact(opened, "g1") != moved
    slider = opened.find_element(By.CSS_SELECTOR, "[data-widget] input[type=range]")
    slider.send_keys(Keys.END)
    assert fact(opened, "c") == "3.30"


@pytest.mark.parametrize(
    ("preset", "bias"), [("unclipped", 0.0), ("opposite", 0.0), ("shrunk", 0.5)]
)
def test_the_widget_computes_lemma_two(opened: Driver, preset: str, bias: float) -> None:
    button = opened.find_element(By.CSS_SELECTOR, f"[data-preset={preset}]")
    opened.execute_script("arguments[0].click()", button)
    assert float(fact(opened, "bias")) == bias
    assert float(fact(opened, "bias")) <= float(fact(opened, "bound"))


def test_the_theme_changes_colours(opened: Driver) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = opened.execute_script(paper)
    opened.find_element(By.ID, "theme").click()
    dark = opened.execute_script(paper)
    assert dark != light
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(paper) == light


def test_the_system_can_ask_for_dark(opened: Driver) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = opened.execute_script(paper)
    wish = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})
    assert opened.execute_script(paper) != light
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": wish})
    assert opened.execute_script(paper) == "rgb(255, 255, 255)"  # paper is white
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def press(driver: Driver, figure: str, what: str) -> None:
    button = driver.find_element(By.CSS_SELECTOR, f"[data-figure={figure}] [data-do={what}]")
    driver.execute_script("arguments[0].click()", button)


def test_figures_export(opened: Driver) -> None:
    press(opened, "bias", "svg")
    svg = downloaded(opened, "bias.svg").decode()
    assert svg.startswith("<svg")
    assert "not private: operator only" in svg
    assert "var(--" not in svg  # it stands alone
    press(opened, "bias", "png")
    assert downloaded(opened, "bias.png").startswith(b"\x89PNG")
    press(opened, "bias", "csv")
    assert downloaded(opened, "bias.csv").startswith(b"# not private: operator only\npanel,series")


def test_figures_zoom_and_enlarge(opened: Driver) -> None:
    box = opened.find_element(By.CSS_SELECTOR, "[data-figure=accuracy] .catch")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    ticks = "return document.querySelector('[data-figure=accuracy] svg').textContent"
    before = opened.execute_script(ticks)
    ActionChains(opened).move_to_element_with_offset(box, -60, 0).click_and_hold().move_by_offset(
        80, 0
    ).release().perform()
    assert opened.execute_script(ticks) != before
    press(opened, "accuracy", "resetZoom")
    assert opened.execute_script(ticks) == before
    press(opened, "accuracy", "enlarge")
    dialog = opened.find_element(By.ID, "enlarged")
    assert dialog.get_attribute("open") is not None
    wide = opened.execute_script("return document.querySelector('#enlarged svg').clientWidth")
    assert wide > 900
    box = dialog.find_element(By.CSS_SELECTOR, ".catch")
    ActionChains(opened).move_to_element(box).perform()
    assert "epoch" in dialog.find_element(By.ID, "tip").text  # not behind the dialog
    dialog.find_element(By.CSS_SELECTOR, "button").click()


def test_a_phone_needs_no_sideways_scrolling(opened: Driver, page: Path) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened.get(page.as_uri())
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 390
    assert opened.get_log("browser") == []
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
