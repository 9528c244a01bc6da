"""Trains what is missing of recipes, and appends one line per finished run to a file per study.

Each line of ``OUT/SCALE/RECIPE.jsonl`` is the name of a run and its
:class:`~dpbam.app.runs.RunRecord`: configuration, plan, accuracy, digests of what paired runs must
share, the machine, commit and version of the code, and the bias and flatness where measured. The
data of recipes are public: the measurements are without noise, and must not be made on private
data. An unfinished run has a run folder and resumes from its last checkpoint, so the same call
again, after any interruption, does what is missing. With n machines, each does one shard.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dpbam import __version__
from dpbam.app.compare.pairing import check_pairs
from dpbam.app.runs import (
    ConfigError,
    RunConfig,
    RunFolder,
    RunRecord,
    RunResult,
    RunSpec,
    load_run_model,
)
from dpbam.app.runs.bias import measure
from dpbam.app.runs.files import append_json_line, plain, read_json_lines
from dpbam.app.runs.pool import Watcher, train_all
from dpbam.app.runs.rows import TrainingRow, read_rows
from dpbam.data import load
from dpbam.training.evaluation import predict_logits
from dpbam.training.events import EvaluationReport
from reproduce.groups import accuracies, load_groups
from reproduce.recipes import WORK, Recipe

#: Fields that change neither what a run computes nor its privacy.
_FREE = (
    "data_root", "device", "engine", "physical_batch_size", "eval_every", "checkpoint_every",
    "num_workers", "tensorboard",
)  # fmt: skip
_UNSET = {"unit": "record"}  # what None stands for, in the data of recipes
#: Raised with every change after which a seeded run ends in another model. Records without it are
#: of version 1; in version 2 the standard noise is drawn by SFC64 with a key of 192 bits; in
#: version 3 the norm of an outer product is the product of two lengths, which differs in its last
#: bits; in version 4 gradients of small kernels and layers are materialised together, and LoRA
#: trains B alone; in version 5 the noise is drawn by pairs. Version 0 was trained before there were
#: recipes, on images halved as floats.
VERSION = 5
_PACKAGES = ("torch", "numpy", "dp-accounting", "safetensors")
Job = tuple[Recipe, RunSpec]


def records_file(recipe: Recipe, out: Path) -> Path:
    return out / recipe.scale / f"{recipe.records}.jsonl"


def read_records(path: Path) -> dict[str, RunRecord]:
    """Read the records of a study by the names of their runs; a missing file has none."""
    records: dict[str, RunRecord] = {}
    for number, row in enumerate(read_json_lines(path), 1):
        try:
            name = row.pop("run")
            record = RunRecord(**row)
            RunConfig.from_mapping(record.config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} line {number} is no record of a run ({error}): restore it"
            ) from None
        if name in records:  # two machines trained it, or a file was appended twice
            raise ConfigError(f"{path} has {name} twice, line {number} again: remove one of them")
        records[name] = record
    return records


def find_record(recipe: Recipe, run: RunSpec, out: Path) -> RunRecord | None:
    """Return the record of a run, None if it is still to be done."""
    path = records_file(recipe, out)
    return _checked(path, read_records(path), run)


def _checked(path: Path, records: Mapping[str, RunRecord], run: RunSpec) -> RunRecord | None:
    """Return the record of a run; refuse one of other settings than the recipe's."""
    record = records.get(run.name)
    if record is None:
        return None
    stored = RunConfig.from_mapping(record.config)
    for name in RunConfig.model_fields:
        before, now = (_value(config, name) for config in (stored, run.config))
        if name not in _FREE and before != now:
            raise ConfigError(
                f"{run.name} in {path} is of a run with {name} {before}, but the recipe says "
                f"{now}: move the line away, or choose another --out"
            )
    return record


def _value(config: RunConfig, name: str) -> Any:
    value = getattr(config, name)
    return _UNSET.get(name) if value is None else value


def finished(recipe: Recipe, out: Path, seeds: int | None = None) -> list[RunRecord]:
    """Return the records of a recipe, in its order: of each pair those of one version."""
    path = records_file(recipe, out)
    stored = read_records(path)
    by_run = [_checked(path, stored, run) for run in recipe.runs(seeds)]
    records = of_one_version([record for record in by_run if record is not None])
    for cell in recipe.cells():
        check_pairs([record for record in records if record.cell == cell])
    return records


def version_of(record: RunRecord) -> int:
    return int(record.machine.get("version", 1))


def of_one_version(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return, of each seed and place, the records of the version that has most of its arms.

    Where two versions have as many, the newer one counts: an arm that is trained today is compared
    once the others of its seed are trained anew.
    """
    pairs: dict[tuple[str, int], list[RunRecord]] = {}
    for record in records:
        pairs.setdefault((repr(sorted(record.cell.items())), record.seed), []).append(record)
    chosen = {}
    for key, paired in pairs.items():
        counts = Counter(version_of(record) for record in paired)
        chosen[key] = max(counts, key=lambda version: (counts[version], version))
    return [
        record
        for record in records
        if version_of(record) == chosen[repr(sorted(record.cell.items())), record.seed]
    ]


def missing(
    recipes: Sequence[Recipe],
    out: Path,
    seeds: int | None = None,
    only: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
    work: Path = WORK,
) -> list[Job]:
    """Return the runs without a record, each once, recipe by recipe.

    Args:
        recipes: what was asked for.
        out: the folder of the studies' records.
        seeds: in place of the recipes'.
        only: shell patterns, one of which a run's name must match; all runs without any.
        shard: (i, n): every n-th run, from the i-th on. It does not depend on what is finished, so
            that n machines do every run once.
        work: the folder of the run folders.
    """
    jobs: dict[tuple[Path, str], Job] = {}
    for recipe in recipes:
        for run in recipe.runs(seeds, work):
            jobs.setdefault((records_file(recipe, out), run.name), (recipe, run))
    _check_patterns(only, [run.name for _, run in jobs.values()])
    wanted = {
        (path, name): job
        for (path, name), job in jobs.items()
        if not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)
    }
    first, machines = shard
    mine = list(wanted.items())[first - 1 :: machines]
    stored = {path: read_records(path) for path in {path for (path, _), _ in mine}}
    return [job for (path, _), job in mine if _checked(path, stored[path], job[1]) is None]


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if names and not fnmatch.filter(names, pattern):
            raise ConfigError(f"--only {pattern!r} matches no run: a name is such as {names[0]}")


def carry_out(
    jobs: Sequence[Job], out: Path, *, processes: int = 1, watcher: Watcher | None = None
) -> None:
    """Train the runs; the record of each is appended under ``out`` as soon as it is finished."""
    if jobs:
        train_all([run for _, run in jobs], processes, _Recording(jobs, out, watcher))


class _Recording:
    """Writes the record of each finished run, and passes progress on."""

    def __init__(self, jobs: Sequence[Job], out: Path, watcher: Watcher | None) -> None:
        self._jobs, self._out, self._watcher = jobs, out, watcher

    def progress(self, index: int, step: int, steps: int) -> None:
        if self._watcher:
            self._watcher.progress(index, step, steps)

    def finished(self, index: int, result: RunResult) -> None:
        recipe, run = self._jobs[index]
        path = records_file(recipe, self._out)
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"run": run.name, **_rounded(plain(asdict(_record(run, recipe))))}
        append_json_line(path, row)
        if self._watcher:
            self._watcher.finished(index, result)


def _record(run: RunSpec, recipe: Recipe) -> RunRecord:
    """Collect what is kept of the finished run in a run folder."""
    folder = RunFolder(run.out)
    facts, evaluations = folder.read_facts(), read_rows(folder.metrics, EvaluationReport)
    plan = run.config.plan(facts.n, noise_multiplier=facts.noise_multiplier or None)
    assert run.seed is not None  # recipes are seeded
    last_of_lens = recipe.first_seed + recipe.lens
    return RunRecord(
        arm=run.arm,
        cell=dict(run.cell),
        seed=run.seed,
        config=run.config.to_mapping(),
        plan=asdict(plan),
        epsilon=evaluations[-1].epsilon,
        accuracy=evaluations[-1].scores["accuracy"],
        accuracy_curve=[[one.step, one.scores["accuracy"]] for one in evaluations],
        seconds=read_rows(folder.training_log, TrainingRow)[-1].seconds,
        pairing=folder.pairing(),
        machine=machine(facts.threads, facts.device),
        **_accuracies_of_readings(run.config, folder, recipe),
        non_private_bias=read_json_lines(folder.bias)
        or (bias_at_the_end(run.config, run.out) if run.seed < last_of_lens else []),
        non_private_flatness=_flatness(run) if recipe.flatness else None,
    )


def _accuracies_of_readings(config: RunConfig, folder: RunFolder, recipe: Recipe) -> dict[str, Any]:
    """Return the accuracy of the last weights, and in each of the recipe's groups.

    Where a run hands out the average of its weights, its last ones are in the last checkpoint.
    """
    if not config.averaged and recipe.groups is None:
        return {}
    model, test = load_run_model(folder.path).module, load(config.data, split="test")
    groups = {} if recipe.groups is None else load_groups(recipe.groups)
    by_reading: dict[str, dict[str, float]] = {}
    if config.averaged:
        if groups:
            by_reading["averaged"] = accuracies(*predict_logits(model, test), groups)
        stored = load_file(max(folder.checkpoints.glob("step-*.safetensors")))
        model.load_state_dict(
            {name.removeprefix("model."): t for name, t in stored.items() if name[:6] == "model."}
        )
    logits, labels = predict_logits(model, test)
    by_reading["last"] = accuracies(logits, labels, groups)
    last = float((logits.argmax(1) == labels).double().mean())
    return {
        "last_accuracy": last if config.averaged else None,
        "group_accuracy": by_reading if groups else None,
    }


def bias_at_the_end(config: RunConfig, run: Path) -> list[dict[str, Any]]:
    """Measure the bias of a trained model, as a run with ``measure_bias`` does along the way."""
    return [asdict(record) for record in measure(config, run=run, batches=2).records]


def _flatness(run: RunSpec) -> dict[str, Any]:
    flatness = measure(run.config, run=run.out, batches=1, flatness=True).flatness
    assert flatness is not None  # it was asked for
    return asdict(flatness)


def machine(threads: int, device: str) -> dict[str, Any]:
    """Describe what computed: processor, cores, threads, versions, and the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "dpbam": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "version": VERSION,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _rounded(value: Any) -> Any:
    """Round floats to six digits, because these files are committed; settings keep all digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: v if k == "config" else _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
