"""Does the runs of recipes: those that are missing, one record each, whatever stops in between.

A finished run is its record under ``out``. One that was begun has a run folder under ``work``, and
goes on from its last checkpoint. So the same call again, after whatever end, does what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbam.experiments.pairing import check_pairs
from dpbam.experiments.pool import FinishedRun, PlannedRun, Watcher, run_all
from dpbam.experiments.recipes import Recipe, RecipeRun
from dpbam.experiments.records import Record, find_record, write_record


@dataclass(frozen=True)
class Job:
    """One run of a recipe that is still to be done."""

    recipe: Recipe
    run: RecipeRun
    folder: Path

    def planned(self, work: Path) -> PlannedRun:
        """For the pool; another configuration has another run folder."""
        digest = hashlib.sha256(self.run.config.to_toml().encode()).hexdigest()[:8]
        out = work / self.recipe.scale / self.recipe.records / f"{self.run.name}-{digest}"
        return PlannedRun(self.run.name, self.run.seed, self.run.config, out)


def records_folder(recipe: Recipe, out: Path) -> Path:
    """Where a recipe's records are kept."""
    return out / recipe.scale / recipe.records


def done(recipe: Recipe, out: Path, seeds: int | None = None) -> list[Record]:
    """The finished runs of a recipe, in its order, paired as they should be.

    Raises:
        ConfigError: if a record does not fit the recipe, or runs of one seed are no pair.
    """
    folder = records_folder(recipe, out)
    found = [find_record(folder, run) for run in recipe.runs(seeds)]
    records = [record for record in found if record is not None]
    for cell in recipe.cells():
        check_pairs([record for record in records if record.cell == cell])
    return records


def missing(recipes: Sequence[Recipe], out: Path, seeds: int | None = None) -> list[Job]:
    """What is still to be done, each run once, recipe by recipe."""
    jobs: dict[tuple[Path, str], Job] = {}
    for recipe in recipes:
        folder = records_folder(recipe, out)
        for run in recipe.runs(seeds):
            if find_record(folder, run) is None:
                jobs.setdefault((folder, run.name), Job(recipe, run, folder))
    return list(jobs.values())


def carry_out(
    jobs: Sequence[Job], work: Path, *, processes: int = 1, watcher: Watcher | None = None
) -> None:
    """Do them; each one's record is written as soon as it is finished.

    Raises:
        Stopped: after Ctrl-C, when what was running has saved.
    """
    if jobs:
        planned = [job.planned(work) for job in jobs]
        run_all(planned, processes, _Recording(jobs, planned, watcher))


class _Recording:
    """Writes the record of each finished run, then passes the word on."""

    def __init__(
        self, jobs: Sequence[Job], planned: Sequence[PlannedRun], watcher: Watcher | None
    ) -> None:
        self._jobs, self._planned, self._watcher = jobs, planned, watcher

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""
        if self._watcher:
            self._watcher.progress(index, step, steps)

    def finished(self, index: int, run: FinishedRun) -> None:
        """Run ``index`` is done."""
        job, out = self._jobs[index], self._planned[index].out
        write_record(job.folder, job.run, out, flatness=job.recipe.flatness)
        if self._watcher:
            self._watcher.finished(index, run)
