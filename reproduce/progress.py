"""Progress over many runs: a bar, how many are done, the time left, and what runs now."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpbam.app.cli.output import console, percent
from dpbam.app.compare.pool import FinishedRun
from reproduce.jobs import Job

_COST = {"bam": 2.2, "sam": 2.0}  # of a DP-SGD step


class Overall:
    """One bar over all runs, weighted by what each costs.

    Its unit is what a run costs, so that the time left is not misled by longer runs. Where stderr
    is not a terminal, finished runs are lines of their own.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._names = [job.run.name for job in jobs]
        self._weights = [weight(job) for job in jobs]
        self._done = [0.0 for _ in jobs]
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
        self._task = self._bar.add_task("", total=sum(self._weights), count="", now="")

    def __enter__(self) -> Overall:
        self._update("")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, index: int, step: int, steps: int) -> None:
        """A part of run ``index`` is done."""
        self._done[index] = max(self._done[index], self._weights[index] * step / steps)
        self._update(f"{self._names[index]} {step}/{steps}")

    def finished(self, index: int, run: FinishedRun) -> None:
        """Run ``index`` is done."""
        self._done[index] = self._weights[index]
        self._finished += 1
        self._update("")
        if not self._console.is_terminal:
            count = f"{self._finished}/{len(self._names)}"
            said = f"{percent(run.accuracy)} in {run.seconds:.0f} s"
            self._console.print(f"{count} {self._names[index]}: {said}", markup=False)

    def _update(self, now: str) -> None:
        count = f"{self._finished}/{len(self._names)}"
        self._bar.update(self._task, completed=sum(self._done), count=count, now=now)


def weight(job: Job) -> float:
    """Pixels that a run sees, times what its method takes of a DP-SGD step: 2.2 for BAM."""
    config, recipe = job.run.config, job.recipe
    views = config.epochs * recipe.images * max(1, config.augment_multiplicity)
    return views * math.prod(recipe.shape[1:]) * _COST.get(config.method, 1.0)
