"""The site in a real browser, from disk and off the network, as wide as a desk and as a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browsing import Driver, chromium, needs_chromium, requests, waited

pytest.importorskip("selenium", reason="selenium is in the dev extra")
from selenium.webdriver.common.by import By

pytestmark = [needs_chromium, pytest.mark.slow]  # the site takes long to build
PAGES = ("index", "mechanism", "training", "engine", "reference/oracle", "reference/command-line")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.get("about:blank")
        driver.get_log("performance")
        yield driver


def resized(driver: Driver, width: int) -> None:
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_ask_nothing_of_a_network(browser: Driver, site: Path, width: int) -> None:
    resized(browser, width)
    for page in PAGES:
        file = site / f"{page}.html"
        assert file.exists()  # a browser shows an error page, which fits
        browser.get(file.as_uri())
        wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{page} is {wide} pixels too wide at {width}"
        broken = browser.execute_script(
            "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        assert not broken
    asked = requests(browser)
    assert any(url.endswith("index.html") for url in asked)
    outside = [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]
    assert not outside
    assert not [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def test_search_works_from_disk(browser: Driver, site: Path) -> None:
    resized(browser, 1280)
    browser.get((site / "index.html").as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys("Kernels and host reads")  # a heading of that page
    found = waited(lambda: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
    assert any("engine.html" in link.get_attribute("href") for link in found)


def test_a_formula_has_a_size(browser: Driver, site: Path) -> None:
    """MathML is laid out: a fraction is taller than a line."""
    resized(browser, 1280)
    browser.get((site / "bias.html").as_uri())
    heights = browser.execute_script(
        "return [...document.querySelectorAll('.formula math')]"
        ".map(formula => formula.getBoundingClientRect().height)"
    )
    assert len(heights) >= 5
    assert max(heights) > 30
