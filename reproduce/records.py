"""One small JSON file a finished run: what the tables and figures are made from, kept for good.

``RECORDS/NAME.json`` holds the configuration, the plan, the accuracy, digests of what paired runs
must share, the machine, and, where it was measured, the bias and the flatness. The data of recipes
are public: what is measured here is without noise, and may not be done with private data.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpbam.app.compare.pairing import fingerprints
from dpbam.app.runs.config import ConfigError, RunConfig
from dpbam.app.runs.files import plain, read_json_lines, write_atomic
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.formats import current_config
from dpbam.app.runs.resume import versions
from reproduce.recipes import RecipeRun

#: Fields that change neither what a run computes nor what it promises.
_FREE = (
    "data_root", "device", "engine", "physical_batch_size", "eval_every", "checkpoint_every",
    "num_workers", "tensorboard",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        arm: what is compared.
        cell: its place in the recipe's grid.
        seed: runs of one seed are paired.
        config: every field of :class:`~dpbam.app.runs.RunConfig`.
        plan: the privacy plan.
        epsilon: what was spent.
        accuracy: on the test set.
        accuracy_curve: (step, accuracy) over training.
        seconds: of training.
        pairing: see :mod:`dpbam.app.compare.pairing`.
        machine: processor, threads, versions, commit.
        note: what sets it apart from what the recipe says now; empty mostly.
        non_private_bias: measured steps, as in ``non-private/bias.jsonl``.
        non_private_flatness: of the trained model; None if not measured.
    """

    arm: str
    cell: Mapping[str, Any]
    seed: int
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    epsilon: float
    accuracy: float
    accuracy_curve: Sequence[Sequence[float]]
    seconds: float
    pairing: Mapping[str, str]
    machine: Mapping[str, Any]
    note: str = ""
    non_private_bias: Sequence[Mapping[str, Any]] = ()
    non_private_flatness: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The arm's."""
        return self.arm


def record_path(folder: Path, run: RecipeRun) -> Path:
    """Where the record of a run is kept."""
    return folder / f"{run.name}.json"


def find_record(folder: Path, run: RecipeRun) -> Record | None:
    """The record of a run, None if it is still to be done.

    Raises:
        ConfigError: if it was made with other settings, or cannot be read.
    """
    path = record_path(folder, run)
    if not path.exists():
        return None
    record = read_record(path)
    before = comparable(RunConfig.from_mapping(record.config))
    for field, now in comparable(run.config).items():
        if before[field] != now:
            raise ConfigError(
                f"{path} is of a run with {field} {before[field]}, but the recipe says {now}: move "
                "it away, or choose another --out"
            )
    return record


def comparable(config: RunConfig) -> dict[str, Any]:
    """The settings in which a record must agree with its recipe."""
    return {f: getattr(config, f) for f in RunConfig.model_fields if f not in _FREE}


def read_record(path: Path) -> Record:
    """The record in a file.

    Raises:
        ConfigError: if it is not one.
    """
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        return replace(record, config=current_config(record.config))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"the record {path} cannot be read ({error}): restore it") from None


def write_record(folder: Path, run: RecipeRun, out: Path, *, flatness: bool = False) -> Record:
    """Make the record of the finished run in the run folder ``out``; all or nothing."""
    record = Record(**json.loads(_text(_collected(run, out, flatness))))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(record_path(folder, run), _text(record))
    return record


def _collected(run: RecipeRun, out: Path, flatness: bool) -> Record:
    files = RunFolder(out)
    facts, metrics = files.read_facts(), read_json_lines(files.metrics)
    log = read_json_lines(files.training_log)
    return Record(
        arm=run.arm,
        cell=dict(run.cell),
        seed=run.seed,
        config=run.config.to_mapping(),
        plan=asdict(
            run.config.plan(facts["n"], noise_multiplier=facts["noise_multiplier"] or None)
        ),
        epsilon=metrics[-1]["epsilon"],
        accuracy=metrics[-1]["accuracy"],
        accuracy_curve=[[m["step"], m["accuracy"]] for m in metrics],
        seconds=log[-1]["seconds"],
        pairing=fingerprints(out),
        machine=machine(facts),
        non_private_bias=read_json_lines(files.non_private / "bias.jsonl"),
        non_private_flatness=_flatness(run.config, out) if flatness else None,
    )


def machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What computed: processor, cores, threads, versions, and the commit of the code."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": facts["threads"],
        "device": facts["device"],
        **versions(),
        "commit": commit(),
    }


def processor() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _flatness(config: RunConfig, out: Path) -> dict[str, Any]:
    from dpbam.app.runs.bias import measure

    found = measure(config, run=out, batches=1, flatness=True).flatness
    assert found is not None  # it was asked for
    return asdict(found)


def _text(record: Record) -> str:
    return json.dumps(_rounded(plain(asdict(record))), separators=(",", ":")) + "\n"


def _rounded(value: Any) -> Any:
    """Floats to six digits: these files are kept. Settings keep all of theirs."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: v if k == "config" else _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
