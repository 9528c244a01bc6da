"""What a job prints for machines may be kept by a scheduler: nothing non-private is in it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import tempfile
from pathlib import Path
from threading import Event

import pytest
from torch import nn

from dpbam.app.cli import main
from dpbam.app.cli.progress import JsonLinesReporter, LiveReporter, LoggedProgress, bar
from dpbam.app.runs import RunConfig
from dpbam.app.runs.execution import _Session
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.preparation import Prepared
from dpbam.data import load
from dpbam.distributed import Ranks
from dpbam.engines.memory import Fit
from dpbam.privacy.rounding import up
from dpbam.training.events import EvaluationReport, Several, StartReport, StepReport
from planting import Mistake
from support import private_plan


def check_a_jobs_output(seconds: float = 2.0, rows: int = 97) -> None:
    """The same to the letter, however large the batch was, and however long it took."""
    printed = []
    other = {"seconds": seconds + 1, "seconds_left": 9.0, "non_private_batch_size": rows + 31}
    for changed in ({}, {**other, "non_private_loss": 0.1}):
        report = StepReport(**{
            "step": 3, "steps": 10, "epoch": 0.3, "charged": 3, "epsilon_at_most": 1.0, "lr": 0.1,
            "seconds": seconds, "seconds_left": 5.0, "non_private_batch_size": rows,
            "non_private_loss": 2.5, **changed,
        })  # fmt: skip
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            JsonLinesReporter().on_step(report)
        printed.append(text.getvalue())
    assert printed[0] == printed[1]


def check_a_jobs_output_has_no_notes_of_the_data() -> None:
    """The same to the letter with a file more that is no record: notes count those."""
    printed = []
    for notes in ((), ("ignored 1 hidden file", "312 DICOM files of 40 patients")):
        train = dataclasses.replace(load("digits"), notes=notes)
        plan = private_plan(n=len(train), delta=1e-5, accountant="rdp")
        prepared = Prepared(RunConfig(epsilon=3.0), train, train, plan, nn.Linear(2, 2), None)  # type: ignore[arg-type]
        text = io.StringIO()
        with contextlib.redirect_stdout(text), tempfile.TemporaryDirectory() as folder:
            session = _Session(RunFolder(folder), {}, prepared, JsonLinesReporter(), Ranks())
            session._announce(0, Fit(8, "fused", 0))
        printed.append(text.getvalue().replace(folder, ""))
    assert "start" in printed[0]
    assert printed[0] == printed[1]


def test_json_lines_have_no_notes_of_the_data() -> None:
    check_a_jobs_output_has_no_notes_of_the_data()


def test_the_operator_sees_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    Several(LiveReporter()).on_non_private_note("ignored 1 hidden file")
    assert "ignored 1 hidden file" in capsys.readouterr().err


def test_json_lines_tell_neither_batch_sizes_nor_times() -> None:
    check_a_jobs_output()


def test_json_lines_leave_out_what_is_not_private(capsys: pytest.CaptureFixture[str]) -> None:
    report = StepReport(
        step=3, steps=10, epoch=0.3, charged=3, epsilon_at_most=1.0, lr=0.1, seconds=2.0,
        seconds_left=5.0, non_private_batch_size=97, non_private_loss=2.5,
    )  # fmt: skip
    JsonLinesReporter().on_step(report)
    line = json.loads(capsys.readouterr().out)
    assert line["step"] == 3
    assert not [key for key in line if key.startswith("non_private")]
    assert 97 not in line.values()


def test_the_last_json_line_has_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "--model",
        "mlp",
        "--noise-multiplier",
        "4",
        "--batch-size",
        "180",
        "--epochs",
        "0.2",
    ]
    assert main(["train", "--data", "digits", *settings, "--out", str(tmp_path / "run"),
                 "--accountant", "rdp", "--json-lines"]) == 0  # fmt: skip
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["status"]) == ("end", "complete")
    assert not [key for key in last if "second" in key or "time" in key]


PLAN = private_plan(n=100, batch_size=10, steps=10, noise_multiplier=1.0, delta=1e-4)


def start() -> StartReport:
    return StartReport(
        plan=PLAN, step=0, epsilon=3.0, method="dp-sgd", model="mlp", parameters=9,
        physical_batch_size=8, engine="fused", device="cpu", seeded=False,
    )  # fmt: skip


def report(**changed: float) -> StepReport:
    return StepReport(**{
        "step": 3, "steps": 10, "epoch": 0.3, "charged": 3, "epsilon_at_most": 1.0, "lr": 0.1,
        "seconds": 2.0, "seconds_left": 5.0, "non_private_batch_size": 97, "non_private_loss": 2.5,
        **changed,
    })  # fmt: skip


class Minutes(Event):
    """Lets some minutes pass at once, then ends."""

    left = 2

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 60
        self.left -= 1
        return self.left < 0


def test_a_log_gets_a_plain_line_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    progress = bar()
    assert isinstance(progress, LoggedProgress)  # under pytest there is no terminal
    progress._ended = Minutes()
    task = progress.add_task("trials", total=8)
    progress.update(task, completed=3)
    progress._print()
    assert capsys.readouterr().err.splitlines() == ["trials: 3 of 8"] * 2


def test_a_log_does_not_contain_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveReporter()
    live._bar._ended = Minutes()
    live._bar._print()
    live.on_start(start())
    live.on_step(report(non_private_loss=2.5))
    capsys.readouterr()
    live._bar._ended = Minutes()
    live._bar._print()
    lines = capsys.readouterr().err.splitlines()
    spent = up(PLAN.epsilon(3))
    assert lines == [f"step 3 of 10, epoch 0.3/1, epsilon {spent} of 3"] * 2


def check_the_line_of_a_log(step: int) -> None:
    """Epsilon in a line of a log is what an evaluation at that step prints."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        live = LiveReporter()
        live.on_start(start())
        live.on_step(report(step=step, charged=step, epsilon_at_most=PLAN.epsilon()))
        assert isinstance(live._bar, LoggedProgress)
        live._bar._ended = Minutes()
        live._bar._print()
        live.on_evaluation(EvaluationReport(
            step=step, epoch=0.3, epsilon=PLAN.epsilon(step), scores={"accuracy": 0.5}, loss=1.0,
            records=10,
        ))  # fmt: skip
    line, evaluated = text.getvalue().splitlines()[-2:]
    spent = evaluated.partition("epsilon ")[2]
    assert f"step {step} of 10" in line
    assert line.endswith(f"epsilon {spent} of 3"), (line, evaluated)


@pytest.mark.parametrize("step", [1, 3, 10])
def test_a_log_shows_the_epsilon_of_its_step(step: int) -> None:
    check_the_line_of_a_log(step)


def test_the_epsilon_of_a_later_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    later = lambda live, report: f"{up(report.epsilon_at_most)} of 3"  # noqa: E731
    check = functools.partial(check_the_line_of_a_log, 3)
    Mistake(check, LiveReporter, "_spent_at", lambda real: later).catch(monkeypatch)


def test_steps_lost_in_a_crash_count_in_what_is_shown() -> None:
    live = LiveReporter()
    live.on_start(start())
    assert live._spent_at(report(step=3, charged=7)) == f"{up(PLAN.epsilon(3, 4))} of 3"
