"""What an operator sees while a run trains: a live line, or JSON lines for scripts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dpbam.app.cli.output import console, number, percent, print_json
from dpbam.app.runs import RunResult, RunSpec
from dpbam.privacy.rounding import up
from dpbam.training.events import Evaluation, Reporter, StartReport, StepReport


class LiveReporter(Reporter):
    """A progress bar on stderr: epoch, step, time left, epsilon, and the loss, marked non-private.

    Evaluations are lines of their own, so that a log keeps them.
    """

    def __init__(self) -> None:
        self._console = console(stderr=True)
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(),
            TextColumn("epsilon {task.fields[epsilon]}"),
            TextColumn("[dim]{task.fields[loss]}[/dim]"),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._epsilon = math.inf
        self._epochs = 0.0

    def __enter__(self) -> LiveReporter:
        return self  # the bar appears when there is something to show

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def on_start(self, report: StartReport) -> None:
        """Say what runs, and show the bar."""
        plan = report.plan
        self._epsilon, self._epochs = report.epsilon, plan.epochs
        self._say(
            f"{report.method} on {report.model}: {report.parameters:,} parameters, "
            f"{plan.steps} steps of {plan.batch_size} of {plan.n} {plan.unit}s, "
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
        """Move the bar."""
        if self._task is None:
            return
        loss = report.non_private_loss
        self._bar.update(
            self._task,
            completed=report.step,
            epoch=f"{report.epoch:.1f}/{self._epochs:.0f}",
            epsilon=_spent(report.epsilon, self._epsilon),
            loss="" if loss is None else f"loss {loss:.3f} (non-private)",
        )

    def on_evaluation(self, report: Evaluation) -> None:
        """A line."""
        self._say(
            f"epoch {report.epoch:5.1f}  accuracy {percent(report.accuracy)}  "
            f"epsilon {up(report.epsilon)}"
        )

    def on_message(self, message: str) -> None:
        """A line."""
        self._say(message)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


class RunsProgress:
    """One bar over several runs: how many are finished, the time left, and what runs now.

    Its unit is the cost of a run, so that longer runs do not mislead the time left. Where stderr is
    not a terminal, each finished run is a line.

    Args:
        runs: the runs.
        costs: of each, in any unit; None: all the same.
    """

    def __init__(self, runs: Sequence[RunSpec], costs: Sequence[float] | None = None) -> None:
        self._names = [run.name for run in runs]
        self._costs = list(costs or [1.0] * len(runs))
        self._done = [0.0] * len(runs)
        self._finished = 0
        self._console = console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[count]} runs"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[now]}[/dim]"),
            console=self._console,
            transient=True,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("", total=sum(self._costs), count="", now="")

    def __enter__(self) -> RunsProgress:
        self._update("")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, index: int, step: int, steps: int) -> None:
        """Move the bar; a late message does not move it back."""
        self._done[index] = max(self._done[index], self._costs[index] * step / steps)
        self._update(f"{self._names[index]} {step}/{steps}")

    def finished(self, index: int, result: RunResult) -> None:
        """Count the run."""
        self._done[index] = self._costs[index]
        self._finished += 1
        self._update("")
        if not self._console.is_terminal:
            found = f"accuracy {percent(result.accuracy)} in {result.seconds:.0f} s"
            self._console.print(f"{self._count()} {self._names[index]}: {found}", markup=False)

    def _update(self, now: str) -> None:
        self._bar.update(self._task, completed=sum(self._done), count=self._count(), now=now)

    def _count(self) -> str:
        return f"{self._finished}/{len(self._names)}"


class JsonLinesReporter(Reporter):
    """One JSON object a line on stdout, each with its ``event``.

    Schedulers keep what a job prints, so nothing non-private is printed: no loss, no batch size,
    and no times, which tell the batch size.
    """

    def on_start(self, report: StartReport) -> None:
        """``start``, with the whole plan."""
        _event("start", report)

    def on_step(self, report: StepReport) -> None:
        """``step``."""
        _event("step", report)

    def on_evaluation(self, report: Evaluation) -> None:
        """``evaluation``."""
        _event("evaluation", report)

    def on_checkpoint(self, path: Path, step: int) -> None:
        """``checkpoint``."""
        print_json({"event": "checkpoint", "path": str(path), "step": step})

    def on_message(self, message: str) -> None:
        """``message``."""
        print_json({"event": "message", "message": message})


def _event(name: str, report: Any) -> None:
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in dataclasses.asdict(report).items()
        if not key.startswith(("non_private", "seconds"))
    }
    print_json({"event": name, **values})


def _spent(spent: float, budget: float) -> str:
    return "none: not private" if math.isinf(spent) else f"{up(spent)} of {up(budget)}"
