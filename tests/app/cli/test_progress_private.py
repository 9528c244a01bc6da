"""What a job prints for machines may be kept by a scheduler: nothing non-private is in it."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from dpbam.app.cli.progress import JsonLinesReporter
from dpbam.training.events import StepReport


def check_a_jobs_output(seconds: float = 2.0, rows: int = 97) -> None:
    """The same to the letter, however large the batch was, and however long it took."""
    printed = []
    other = {"seconds": seconds + 1, "seconds_left": 9.0, "non_private_batch_size": rows + 31}
    for changed in ({}, {**other, "non_private_loss": 0.1}):
        report = StepReport(**{
            "step": 3, "steps": 10, "epoch": 0.3, "epsilon": 1.0, "lr": 0.1, "seconds": seconds,
            "seconds_left": 5.0, "non_private_batch_size": rows, "non_private_loss": 2.5, **changed,
        })  # fmt: skip
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            JsonLinesReporter().on_step(report)
        printed.append(text.getvalue())
    assert printed[0] == printed[1]


def test_json_lines_tell_neither_batch_sizes_nor_times() -> None:
    check_a_jobs_output()


def test_json_lines_leave_out_what_is_not_private(capsys: pytest.CaptureFixture[str]) -> None:
    report = StepReport(
        step=3, steps=10, epoch=0.3, epsilon=1.0, lr=0.1, seconds=2.0, seconds_left=5.0,
        non_private_batch_size=97, non_private_loss=2.5,
    )  # fmt: skip
    JsonLinesReporter().on_step(report)
    line = json.loads(capsys.readouterr().out)
    assert line["step"] == 3
    assert not [key for key in line if key.startswith("non_private")]
    assert 97 not in line.values()
