"""``dpbam evaluate``: its tables on a narrow terminal."""

from __future__ import annotations

import numpy as np
import pytest

from dpbam.app.cli.evaluate import show
from dpbam.data import from_arrays
from dpbam.tasks import base
from dpbam.tasks.base import make_task

FINDINGS = ("Atelectasis", "Cardiomegaly", "Pleural_Thickening")


@pytest.mark.parametrize("thresholds", [{}, {"Cardiomegaly": 0.3}])
def test_findings_are_readable_at_80_columns(
    thresholds: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(base, "_RESAMPLES", 2)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (40, 3))
    data = from_arrays(np.zeros((40, 8, 8), np.uint8), labels, class_names=FINDINGS)
    sexes = {"sex": np.array(["f", "m"] * 20)}
    task = make_task("multi-label", FINDINGS)
    result = task.evaluate(rng.normal(size=(40, 3)), labels, sexes, thresholds)
    show(data, result, task.words)
    shown = capsys.readouterr().out
    for word in (*FINDINGS, "sensitivity", "specificity", "precision", "records"):
        assert f" {word} " in shown
    said = (
        "Atelectasis 0.500, Cardiomegaly 0.300" if thresholds else "threshold                0.500"
    )
    assert said in shown
    assert max(map(len, shown.split("These figures")[0].splitlines())) <= 80
