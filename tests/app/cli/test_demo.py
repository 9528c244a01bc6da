"""``dpbam demo``: the accuracy at its epsilon first, and a sentence on the bias."""

from __future__ import annotations

import json

import pytest

from dpbam.app.cli import demo


@pytest.fixture
def small(monkeypatch):
    """The demo's settings, of a size for a test."""
    quick = {"model": "mlp", "epochs": 1.0, "batch_size": 128, "measure_bias": 4,
             "accountant": "rdp", "model_options": {"hidden": [8]}}  # fmt: skip
    monkeypatch.setattr(demo, "SETTINGS", {**demo.SETTINGS, **quick})


def test_the_accuracy_comes_first_and_the_bias_is_measured(small, dpbam, tmp_path):
    out = tmp_path / "demo"
    ended = dpbam("demo", "--seeds", 2, "--jobs", 1, "--out", out)
    assert ended.code == 0, ended.err
    said = ended.out.splitlines()
    assert said[0].startswith("Test accuracy at epsilon 2.99") or said[0].startswith(
        "Test accuracy at epsilon 3, "
    )
    result = json.loads((out / "comparison.json").read_text())
    best = result["contenders"]["bam-0.02"]["accuracy"]["mean"]
    assert f"{100 * best:.1f}% with bam-0.02" in said[0]
    sentence = next(line for line in said if line.startswith("Bias: "))
    assert "of 2 seeds" in sentence
    assert "not for publication" in sentence
    assert "The bias was not measured" not in (out / "report.html").read_text()
