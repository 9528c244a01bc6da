"""A real browser for tests: Debian's Chromium, headless, driven by selenium, off the network."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is in the dev extra")
from selenium import webdriver

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium or no chromedriver: make test-deps"
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1280,900", "--force-prefers-reduced-motion",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
Driver = Any
_FOREVER = 900  # seconds; a loaded machine is slow, and no test waits for it to pass


@contextmanager
def chromium(profile: Path) -> Iterator[Driver]:
    """A browser that keeps what it logs and what it asks for."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(_FOREVER)
    try:
        yield driver
    finally:
        driver.quit()


def reset(driver: Driver, downloads: Path) -> None:
    """Undo what a test may have left but its page: what is emulated, where the pointer is.

    What is downloaded from now on goes to ``downloads``.
    """
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 0, "y": 0})
    place = {"behavior": "allow", "downloadPath": str(downloads)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", place)
    driver.downloads = downloads


def blemishes(driver: Driver) -> list[str]:
    """What a page shows that is no value: NaN and its kind in texts and attributes.

    Not in addresses: the picture that a figure exports is a link of 75 thousand letters, in which
    "NaN" turns up by chance.
    """
    return driver.execute_script(_BLEMISHES)


_BLEMISHES = """
const bad = /NaN|undefined|Infinity/, seen = [];
for (const element of document.querySelectorAll("body, body :not(script, style)")) {
  for (const { name, value } of element.attributes)
    if (name !== "href" && bad.test(value)) seen.push(`${element.tagName} ${name}=${value}`);
  for (const child of element.childNodes)
    if (child.nodeType === Node.TEXT_NODE && bad.test(child.data)) seen.push(child.data);
}
return seen;
"""


def waited(find: Callable[[], Any]) -> Any:
    """Wait until ``find()`` has found something, however slow the machine; never for ever."""
    end = time.monotonic() + _FOREVER
    while not (found := find()):
        assert time.monotonic() < end, f"that did not happen in {_FOREVER} s"
        time.sleep(0.05)
    return found


def requests(driver: Driver) -> list[str]:
    """What the pages asked for since last time."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
