"""Does the runs of recipes: those that are missing, one record each, whatever stops in between.

A finished run is its record under ``out``. One that was begun has a run folder under ``work``, and
goes on from its last checkpoint. So the same call again, after whatever end, does what is missing.
Machines that share a database share the runs: see :mod:`reproduce.sharing`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dpbam.app.compare.pairing import check_pairs
from dpbam.app.compare.pool import FinishedRun, PlannedRun, Stopped, Watcher, run_all
from dpbam.app.runs.config import ConfigError
from reproduce.recipes import Recipe, RecipeRun
from reproduce.records import (
    Record,
    comparable,
    find_record,
    keep_record,
    record_path,
    write_record,
)
from reproduce.sharing import SharedRuns

_POLL = 5.0  # seconds between two looks at what other machines have done


@dataclass(frozen=True)
class Job:
    """One run of a recipe that is still to be done."""

    recipe: Recipe
    run: RecipeRun
    folder: Path

    @property
    def key(self) -> str:
        """The same on all machines, and another for other settings."""
        settings = json.dumps(comparable(self.run.config), sort_keys=True, default=str)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
        return f"{self.recipe.scale}/{self.recipe.records}/{self.run.name} {digest}"

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
    recipes: Sequence[Recipe], out: Path, seeds: int | None = None, only: Sequence[str] = ()
) -> list[Job]:
    """Return the runs without a record, each once, recipe by recipe.

    Args:
        recipes: what was asked for.
        out: the folder of the records.
        seeds: in place of the recipes'.
        only: shell patterns, one of which a run's name has to match; all runs without any.

    Raises:
        ConfigError: if a pattern matches no run of the recipes, finished or not.
    """
    jobs: dict[tuple[Path, str], Job] = {}
    for recipe in recipes:
        folder = records_folder(recipe, out)
        for run in recipe.runs(seeds):
            jobs.setdefault((folder, run.name), Job(recipe, run, folder))
    wanted = _matching(list(jobs.values()), only)
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
    jobs: Sequence[Job],
    work: Path,
    *,
    processes: int = 1,
    watcher: JobWatcher | None = None,
    shared: SharedRuns | None = None,
) -> None:
    """Do them; each one's record is written as soon as it is finished.

    With ``shared``, together with all machines that share them: this one does those that nobody
    else does, and ends when all are done.

    Raises:
        Stopped: after Ctrl-C, when what was running has saved.
    """
    if not jobs:
        return
    recording = _Recording(jobs, work, watcher, shared)
    if shared is None:
        run_all(recording.planned, processes, recording)
        return
    try:
        with shared.alive():
            while left := recording.copied_from_elsewhere():
                if not run_all(recording.planned, processes, recording, recording.claim):
                    if watcher:
                        watcher.waiting(left)
                    time.sleep(_POLL)
    except KeyboardInterrupt:
        raise Stopped from None


class JobWatcher(Watcher, Protocol):
    """Hears how the runs get on, here and on other machines."""

    def elsewhere(self, index: int, record: Record) -> None:
        """Run ``index`` was done by another machine."""

    def waiting(self, left: int) -> None:
        """Other machines do all of the ``left`` runs that are left."""


class _Recording:
    """Writes the record of each finished run, then passes the word on."""

    def __init__(
        self,
        jobs: Sequence[Job],
        work: Path,
        watcher: JobWatcher | None,
        shared: SharedRuns | None,
    ) -> None:
        self._jobs, self._watcher, self._shared = jobs, watcher, shared
        self.planned = [job.planned(work) for job in jobs]
        self._left = set(range(len(jobs)))

    def progress(self, index: int, step: int, steps: int) -> None:
        """Run ``index`` has done ``step`` of ``steps``."""
        if self._watcher:
            self._watcher.progress(index, step, steps)

    def finished(self, index: int, run: FinishedRun) -> None:
        """Run ``index`` is done."""
        job, out = self._jobs[index], self.planned[index].out
        write_record(job.folder, job.run, out, flatness=job.recipe.flatness)
        self._left.discard(index)
        if self._shared:
            text = record_path(job.folder, job.run).read_text(encoding="utf-8")
            keep_record(job.folder, job.run, self._shared.finish(job.key, text))
        if self._watcher:
            self._watcher.finished(index, run)

    def claim(self, index: int) -> bool:
        """Whether this machine is to do run ``index``."""
        assert self._shared is not None
        return index in self._left and self._shared.claim(self._jobs[index].key)

    def copied_from_elsewhere(self) -> int:
        """Keep what other machines have done; how many runs are left."""
        assert self._shared is not None
        done = self._shared.finished()
        for index in sorted(self._left):
            job = self._jobs[index]
            text = self._shared.record(job.key) if job.key in done else None
            if text is not None:
                record = keep_record(job.folder, job.run, text)
                self._left.discard(index)
                if self._watcher:
                    self._watcher.elsewhere(index, record)
        return len(self._left)


def offer(recipes: Sequence[Recipe], out: Path, seeds: int | None, shared: SharedRuns) -> None:
    """Show the other machines the records that are here already."""
    known = shared.finished()
    for recipe in recipes:
        folder = records_folder(recipe, out)
        for run in recipe.runs(seeds):
            job, path = Job(recipe, run, folder), record_path(folder, run)
            if job.key not in known and find_record(folder, run) is not None:
                first = shared.finish(job.key, path.read_text(encoding="utf-8"))
                keep_record(folder, run, first)
