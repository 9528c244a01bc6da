"""The page of a real run of each task, in a real browser, on a wide screen and on a phone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from browsing import chromium, needs_chromium, waited
from dpbam.app.cli import main

pytestmark = needs_chromium
N = 80
QUICK = ["--method", "dp-sgd", "--noise-multiplier", "1", "--accountant", "rdp", "--batch-size",
         "16", "--epochs", "1", "--measure-bias", "every=1", "--quiet"]  # fmt: skip
DRAWN = "return [...document.querySelectorAll('.canvas')].every(c => c.querySelector('svg'))"
TOO_WIDE = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
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


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("single-label", "accuracy, 95% interval"),
        pytest.param("multi-label", "AUC, 95% interval", marks=pytest.mark.slow),
        pytest.param("regression", "R2, 95% interval", marks=pytest.mark.slow),
        pytest.param("segmentation", "Dice, 95% interval", marks=pytest.mark.slow),
    ],
)
def test_the_page_of_a_task(task: str, metric: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays(task))
    model = ["unet", "--model-option", "width=4"] if task == "segmentation" else ["mlp"]
    run = str(tmp_path / "run")
    data = ["--data", str(tmp_path / "x.npz"), "--task", task, "--model", *model]
    more = ["--target-range", "0:1"] if task == "regression" else []
    assert main(["train", *data, *QUICK, *more, "--out", run]) == 0
    assert main(["evaluate", run, "--save"]) == 0
    page = tmp_path / "report.html"
    assert main(["report", run, "--out", str(page)]) == 0
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 400):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 400}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(page.as_uri())
            waited(lambda: browser.execute_script(DRAWN))
            assert browser.get_log("browser") == []
            shown = browser.execute_script("return document.getElementById('summary').textContent")
            assert metric in shown
            wide = (
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert browser.execute_script(wide) <= 0
            for labels in browser.execute_script(TICKS):
                named = [label for label in labels if label]  # a logarithmic axis leaves some out
                assert len(set(named)) == len(named), labels
