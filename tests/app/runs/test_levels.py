"""What to expect and what gains most, by records of settings like the user's."""

from __future__ import annotations

import pytest

from dpbam.app.runs import automatic
from dpbam.app.runs.automatic import Level, best_change, expectation
from dpbam.app.runs.config import RunConfig

ROWS = tuple(
    Level(source, features, n, 10, epsilon, 40 + 2 * k + 5 * (epsilon == 3.0) + gain, 10.0)
    for k, source in enumerate(("cups", "birds", "ships"))
    for n in (500, 2000)
    for epsilon in (1.0, 3.0)
    for features, gain in (("scattering", 0.0), ("mobilenet", 20.0))
)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(automatic, "recorded_levels", lambda: ROWS)


def config(**changes):
    values = {"model": "scattering", "epsilon": 1.0, "auto_facts": {"n": 500}, **changes}
    return RunConfig(**values)


def test_like_settings_give_a_range_and_name_their_record():
    said = expectation(config(), 700, 10, "single-label")
    assert said.startswith("accuracy 40 to 44% on birds, cups, ships with 500 to 2000 units")
    assert "in the study of defaults" in said


@pytest.mark.parametrize(
    ("changes", "n", "classes", "task", "reason"),
    [
        ({}, 100_000, 10, "single-label", "no data like 100000 units in 10 classes at epsilon 1"),
        ({"epsilon": 30.0}, 500, 10, "single-label", "500 units in 10 classes at epsilon 30"),
        ({}, 500, 2, "single-label", "500 units in 2 classes at epsilon 1"),
        ({}, 500, 10, "multi-label", "no multi-label data"),
        ({"auto_facts": {}}, 500, 10, "single-label", "the settings of --model auto alone"),
    ],
)
def test_without_a_like_record_nothing_is_promised(changes, n, classes, task, reason):
    sentence = expectation(config(**changes), n, classes, task)
    assert sentence.startswith("unknown: the study of defaults ")
    assert sentence.endswith(reason)


def test_the_change_that_gained_most_is_named():
    assert best_change(config(), 500, 10).startswith("a public encoder (--encoder): +20 points")
    named = config(model="onnx:net.onnx")
    assert best_change(named, 500, 10).startswith("more epsilon (about three times): +5 points")
    assert best_change(RunConfig(epsilon=1.0, model="mlp"), 500, 10) == ""
