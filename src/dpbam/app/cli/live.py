"""The live table of a comparison: a row a seed, a column a contender."""

from __future__ import annotations

from collections.abc import Sequence

from rich.live import Live
from rich.table import Table

from dpbam.app.cli.output import console, percent, table
from dpbam.app.compare.pool import FinishedRun, PlannedRun


class LiveComparison:
    """Shows how far each run is, and its accuracy when it is done.

    Where stderr is not a terminal, finished runs are lines of their own.
    """

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self._runs = list(runs)
        self._cells = ["" for _ in runs]
        self._console = console(stderr=True)
        self._live = Live(
            self._table(), console=self._console, transient=True, refresh_per_second=2
        )

    def __enter__(self) -> LiveComparison:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def progress(self, index: int, step: int, steps: int) -> None:
        """Show the steps done."""
        if not self._cells[index].endswith("%"):
            self._cells[index] = f"{step}/{steps}"
            self._live.update(self._table())

    def finished(self, index: int, run: FinishedRun) -> None:
        """Show the accuracy."""
        self._cells[index] = percent(run.accuracy)
        self._live.update(self._table())
        if not self._console.is_terminal:
            line = f"{run.name} seed {run.seed}: accuracy {percent(run.accuracy)}"
            self._console.print(line, markup=False)

    def _table(self) -> Table:
        names = list(dict.fromkeys(run.name for run in self._runs))
        seeds = list(dict.fromkeys(run.seed for run in self._runs))
        cells = {
            (run.seed, run.name): cell for run, cell in zip(self._runs, self._cells, strict=True)
        }
        rows = [(seed, *(cells[seed, name] for name in names)) for seed in seeds]
        return table(("seed", *names), rows, title="steps done, or test accuracy")
