"""Does the runs of recipes: those that are missing, one record each, whatever stops in between.

A finished run is its record under ``out``. One that was begun has a run folder under ``work``, and
goes on from its last checkpoint. So the same call again, after whatever end, does what is missing.
Of n machines, or n jobs of a scheduler, each does one share of the runs.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbam.app.compare.pairing import check_pairs
from dpbam.app.compare.pool import FinishedRun, PlannedRun, Watcher, run_all
from dpbam.app.runs.config import ConfigError
from reproduce.recipes import Recipe, RecipeRun
from reproduce.records import Record, find_record, write_record


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


def missing(
    recipes: Sequence[Recipe],
    out: Path,
    seeds: int | None = None,
    only: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
) -> list[Job]:
    """Return the runs without a record, each once, recipe by recipe.

    Args:
        recipes: what was asked for.
        out: the folder of the records.
        seeds: in place of the recipes'.
        only: shell patterns, one of which a run's name has to match; all runs without any.
        shard: (i, n): every n-th run, from the i-th on. It does not depend on what is done, so
            that n machines do every run once.

    Raises:
        ConfigError: if a pattern matches no run of the recipes, finished or not.
    """
    jobs: dict[tuple[Path, str], Job] = {}
    for recipe in recipes:
        folder = records_folder(recipe, out)
        for run in recipe.runs(seeds):
            jobs.setdefault((folder, run.name), Job(recipe, run, folder))
    first, machines = shard
    wanted = _matching(list(jobs.values()), only)[first - 1 :: machines]
    return [job for job in wanted if find_record(job.folder, job.run) is None]


def _matching(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    for pattern in patterns:
        if jobs and not fnmatch.filter((job.run.name for job in jobs), pattern):
            raise ConfigError(
                f"--only {pattern!r} matches no run: a name is such as {jobs[0].run.name}"
            )
    if not patterns:
        return list(jobs)
    return [job for job in jobs if any(fnmatch.fnmatchcase(job.run.name, p) for p in patterns)]


def carry_out(
    jobs: Sequence[Job], work: Path, *, processes: int = 1, watcher: Watcher | None = None
) -> None:
    """Do them; each one's record is written as soon as it is finished.

    Raises:
        StoppedError: after Ctrl-C, when what was running has saved.
    """
    if jobs:
        recording = _Recording(jobs, work, watcher)
        run_all(recording.planned, processes, recording)


class _Recording:
    """Writes the record of each finished run, then passes the word on."""

    def __init__(self, jobs: Sequence[Job], work: Path, watcher: Watcher | None) -> None:
        self._jobs, self._watcher = jobs, watcher
        self.planned = [job.planned(work) for job in jobs]

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""
        if self._watcher:
            self._watcher.progress(index, step, steps)

    def finished(self, index: int, run: FinishedRun) -> None:
        """Run ``index`` is done."""
        job, out = self._jobs[index], self.planned[index].out
        write_record(job.folder, job.run, out, flatness=job.recipe.flatness)
        if self._watcher:
            self._watcher.finished(index, run)
