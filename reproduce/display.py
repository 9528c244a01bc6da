"""What ``python -m reproduce`` prints: tables, lines, and a bar over the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dpbam.app.runs import RunResult
    from reproduce.records import Job

_COST = {"bam": 2.2, "sam": 2.0}  # of a step, relative to DP-SGD's


def say(line: str) -> None:
    print(line, flush=True)


def show(header: Sequence[str], rows: Iterable[Sequence[object]], *, title: str, left: int) -> None:
    """Print a table; the first ``left`` columns hold text, the others numbers."""
    grid = Table(title=Text(title, style="table.title"), title_justify="left", header_style="bold")
    for k, name in enumerate(header):
        grid.add_column(Text(name), justify="left" if k < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    Console(highlight=False).print(grid)


def relative_cost(job: Job) -> float:
    """Return the cost of a run in pixels seen by DP-SGD."""
    recipe, run = job
    views = run.config.epochs * max(1, run.config.augment_multiplicity)
    pixels = views * recipe.images * math.prod(recipe.shape[1:])
    return pixels * _COST.get(run.config.method, 1.0)


class RunsBar:
    """A bar over many runs, by what each costs, and a line per finished run, on stderr."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._names, self._costs = [run.name for _, run in jobs], list(map(relative_cost, jobs))
        self._done, self._finished = [0.0] * len(jobs), 0
        screen = Console(stderr=True, highlight=False)
        self._bar = Progress(console=screen, transient=True, disable=not screen.is_interactive)
        self._task = self._bar.add_task("runs", total=sum(self._costs))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(self, index: int, step: int, steps: int) -> None:
        self._done[index] = max(self._done[index], self._costs[index] * step / steps)
        self._bar.update(self._task, completed=sum(self._done))

    def finished(self, index: int, result: RunResult) -> None:
        self._finished += 1
        self.progress(index, 1, 1)
        line = f"{self._finished}/{len(self._names)} {self._names[index]}: {result.score:.1%}"
        self._bar.console.print(f"{line} in {result.seconds:.0f} s", markup=False, soft_wrap=True)
