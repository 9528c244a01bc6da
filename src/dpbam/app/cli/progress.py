"""What an operator sees during a run: bars on stderr, or JSON lines for scripts.

Bars are transient; what a log should keep (evaluations, finished runs) is a line of its own. Where
there is no terminal, a plain line once a minute takes the bar's place.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dpbam.app.cli.boundary import INTERRUPTED
from dpbam.app.cli.output import console, note, number, print_json, printable, say, warn
from dpbam.app.runs import RunConfig, RunResult
from dpbam.app.runs.escaping import visible
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.pool import StoppedError
from dpbam.app.runs.statement_text import unit_noun
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text
from dpbam.training.events import EvaluationReport, Reporter, StartReport, StepReport

if TYPE_CHECKING:
    from dpbam.privacy.plan import PrivacyPlan

_MINUTE = 60.0  # seconds
_COST = {"bam": 2.2, "sam": 2.0}  # of a step, relative to DP-SGD's


class LoggedProgress(Progress):
    """Prints a line about each task once a minute: the stand-in of a bar in a log."""

    def __init__(self, line: Callable[[Task], str], *columns: ProgressColumn, **settings: Any):
        super().__init__(*columns, disable=True, **settings)
        self._line, self._ended = line, Event()
        self._thread = Thread(target=self._print, daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _print(self) -> None:
        while not self._ended.wait(_MINUTE):
            for line in [self._line(task) for task in self.tasks] or ["preparing"]:
                say(line, screen=self.console)


def _counted(task: Task) -> str:
    of = "" if task.total is None else f" of {task.total:.0f}"
    return f"{task.description}: {task.completed:.0f}{of}"


def bar(
    *columns: ProgressColumn,
    line: Callable[[Task], str] = _counted,
    quiet: bool = False,
    **settings: Any,
) -> Progress:
    """Return a bar on stderr that disappears when it is done; in a log, ``line`` once a minute."""
    screen = console(stderr=True)
    if screen.is_interactive or quiet:
        return Progress(*columns, console=screen, disable=quiet, transient=True, **settings)
    return LoggedProgress(line, *columns, console=screen, **settings)


@contextmanager
def counting(
    what: str, total: float | None, *columns: ProgressColumn, quiet: bool = False
) -> Iterator[Callable[[float, float | None], None]]:
    """Show a bar; the yielded function takes how much is done, and of how much."""
    with bar(*(columns or Progress.get_default_columns()), quiet=quiet) as progress:
        task = progress.add_task(what, total=total)

        def update(done: float, total: float | None = None) -> None:
            progress.update(task, completed=done, total=total)

        yield update


@contextmanager
def resumable(out: Path, what: str = "runs") -> Iterator[None]:
    """Exit with the code of Ctrl-C where runs were stopped, and say how to resume them."""
    try:
        yield
    except StoppedError:
        note(f"stopped, and saved in {out}: the same command resumes, and keeps finished {what}")
        raise typer.Exit(INTERRUPTED) from None


class RunsDisplay:
    """One bar over many runs, and a line per finished run.

    Its unit is what a run costs, so that the time left is right where some runs take longer.
    """

    def __init__(self, names: Sequence[str], costs: Sequence[float]) -> None:
        self._names, self._costs = names, costs
        self._done = [0.0 for _ in names]
        self._finished = 0
        self._bar = bar(
            TextColumn("{task.fields[count]} runs"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}", style="dim", markup=False),
            line=lambda task: f"{task.fields['count']} runs finished, now {task.fields['now']}",
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("", total=sum(costs), count="", now="")

    def __enter__(self) -> Self:
        self._update("")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""
        self._done[index] = max(self._done[index], self._costs[index] * step / steps)
        self._update(f"{self._names[index]} {step}/{steps}")

    def finished(self, index: int, result: RunResult) -> None:
        """Run ``index`` is done."""
        self._done[index] = self._costs[index]
        self._finished += 1
        self._update("")
        outcome = f"{metric_text(result.metric, result.score)} in {result.seconds:.0f} s"
        say(f"{self._count} {self._names[index]}: {outcome}", screen=self._bar.console)

    @property
    def _count(self) -> str:
        return f"{self._finished}/{len(self._names)}"

    def _update(self, now: str) -> None:
        shown = printable(now)
        self._bar.update(self._task, completed=sum(self._done), count=self._count, now=shown)


def cost(config: RunConfig) -> float:
    """Return the cost of a run per record of its data, relative to an epoch of DP-SGD."""
    views = config.epochs * max(1, config.augment_multiplicity)
    return views * _COST.get(config.method, 1.0)


class LiveReporter(Reporter):
    """One run's bar: epoch, step, time left, epsilon, and the loss, marked as not to be shared.

    Epsilon is what is spent at the step that it is shown with. It takes some 50 ms to compute, so
    the bar names the step, and computes it for at most a twentieth of the time; a line of a log,
    once a minute, computes it for its own step.
    """

    def __init__(self) -> None:
        self._bar = bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(),
            TextColumn("epsilon {task.fields[epsilon]}"),
            TextColumn("[dim]{task.fields[loss]}[/dim]"),
            line=self._line,
        )
        self._task: TaskID | None = None
        self._plan: PrivacyPlan | None = None
        self._latest: StepReport | None = None
        self._next_epsilon = 0.0  # the time from which the bar may compute it again
        self._epsilon = math.inf
        self._epochs = 0.0

    def __enter__(self) -> Self:
        if isinstance(self._bar, LoggedProgress):
            self._bar.start()
        return self  # the bar appears when there is something to show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_start(self, report: StartReport) -> None:
        plan = report.plan
        units = f"{visible(unit_noun(plan.unit))}s"
        self._epsilon, self._epochs, self._plan = report.epsilon, plan.epochs, plan
        self._say(
            f"{report.method} on {report.model}: {report.parameters:,} parameters, "
            f"{plan.steps} steps of {plan.batch_size} of {plan.n} {units}, "
            f"sigma {number(plan.noise_multiplier)}, C {number(plan.clip_norm)}, {report.device}"
        )
        if report.step:
            self._say(f"resumed at step {report.step}")
        if report.seeded and plan.private:
            self._say("seeded: reproducible, for research only, since the noise can be recomputed")
        self._task = self._bar.add_task(
            "", total=plan.steps, completed=report.step, epoch="0", epsilon="", loss=""
        )
        self._bar.start()

    def on_step(self, report: StepReport) -> None:
        if self._task is None:
            return
        self._latest, loss = report, report.non_private_loss
        began = time.monotonic()
        if not isinstance(self._bar, LoggedProgress) and began >= self._next_epsilon:
            spent = f"{self._spent_at(report)} at step {report.step}"
            self._bar.update(self._task, epsilon=spent)
            self._next_epsilon = began + max(1.0, 20 * (time.monotonic() - began))
        self._bar.update(
            self._task,
            completed=report.step,
            epoch=f"{report.epoch:.1f}/{self._epochs:.0f}",
            loss="" if loss is None else f"loss {loss:.3f} (do not share)",
        )

    def _line(self, task: Task) -> str:
        """Return a line about the latest step, without the loss, which privacy does not protect."""
        report = self._latest
        if report is None:
            return f"step {task.completed:.0f} of {task.total:.0f}"
        epoch, spent = f"{report.epoch:.1f}/{self._epochs:.0f}", self._spent_at(report)
        return f"step {report.step} of {report.steps}, epoch {epoch}, epsilon {spent}"

    def _spent_at(self, report: StepReport) -> str:
        """Return what is spent at this step, and the budget."""
        assert self._plan is not None  # known since the start, which comes before any step
        return _spent(self._plan.epsilon(report.step, report.charged - report.step), self._epsilon)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._say(
            f"epoch {report.epoch:5.1f}  {metric_label(report.metric)} "
            f"{metric_text(report.metric, report.score)}  "
            f"epsilon {up(report.epsilon)}"
        )

    def on_message(self, message: str) -> None:
        self._say(message)

    def on_non_private_note(self, note: str) -> None:
        self._say(note)

    def on_non_private_warning(self, warning: str) -> None:
        self._say(f"warning: {warning}")

    def _say(self, line: str) -> None:
        say(line, screen=self._bar.console)


class QuietReporter(Reporter):
    """Shows no progress, but what is wrong with the data, on stderr."""

    def on_non_private_warning(self, warning: str) -> None:
        warn(warning)


class JsonLinesReporter(Reporter):
    """One JSON object per line on stdout, each with its ``event``.

    Schedulers keep what a job prints, so nothing unprotected is printed: no loss, no batch size,
    no notes of the data, which count its files, and no times, which depend on the batch size.
    Warnings about the data are in a file of the run's non-private folder.
    """

    def on_start(self, report: StartReport) -> None:
        if report.out is not None:
            # always, since whether there are any is a fact about the data, too
            warnings = RunFolder(report.out).warnings
            self.on_message(f"warnings about the data, if there are any, are in {warnings}")
        _event("start", report)

    def on_step(self, report: StepReport) -> None:
        _event("step", report)

    def on_evaluation(self, report: EvaluationReport) -> None:
        print_json({"event": "evaluation", **report.to_dict()})

    def on_checkpoint(self, path: Path, step: int) -> None:
        print_json({"event": "checkpoint", "path": str(path), "step": step})

    def on_message(self, message: str) -> None:
        print_json({"event": "message", "message": message})


def _event(name: str, report: Any) -> None:
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in dataclasses.asdict(report).items()
        if not key.startswith(("non_private", "seconds"))
    }
    print_json({"event": name, **values})


def _spent(spent: float, budget: float) -> str:
    return "none: no privacy" if math.isinf(spent) else f"{up(spent)} of {up(budget)}"
