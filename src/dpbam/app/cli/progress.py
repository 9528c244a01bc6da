"""What an operator sees while a run trains: a live line, or JSON lines for scripts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dpbam.app.cli.output import console, number, percent, print_json
from dpbam.privacy.rounding import up
from dpbam.training.events import EvaluationReport, Reporter, StartReport, StepReport


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

    def on_evaluation(self, report: EvaluationReport) -> None:
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

    def on_evaluation(self, report: EvaluationReport) -> None:
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
