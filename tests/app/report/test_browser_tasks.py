"""The page of a real run of each task, in a real browser, on a wide screen and on a phone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from browsing import Driver, chromium, needs_chromium, waited
from dpbam.app.cli import main

pytestmark = needs_chromium
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
            opened(browser, page, width)
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
            opened(browser, page, width)
            main = browser.execute_script("return document.querySelector('main').innerText")
            assert "16 patients per batch" in main
            assert "whether one patient is among them" in main
            assert "sample" not in main


def report_on(data: dict[str, np.ndarray], folder: Path, flags: list[str]) -> Path:
    """The report of a run on these arrays."""
    np.savez(folder / "x.npz", **data)
    run = str(folder / "run")
    assert main(["train", "--data", str(folder / "x.npz"), *flags, *QUICK, "--out", run]) == 0
    assert main(["evaluate", run, "--save"]) == 0
    assert main(["report", run, "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


def opened(browser: Driver, page: Path, width: int) -> None:
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
