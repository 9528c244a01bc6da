"""Reads run folders: what a report is made of.

=========================  ==============================================================
file                       what is taken from it
=========================  ==============================================================
privacy-statement.json     what was spent, and what may be published
config.toml                what was asked for
metrics.jsonl              accuracy on the test data over training
non-private/               for the operator only:
  training.jsonl           training loss
  bias.jsonl               measured steps of the bias lens
  evaluation-test.json     confusion, classes and sub-groups (``dpbam evaluate --save``)
=========================  ==============================================================

A file that is missing leaves its panels empty, with a sentence why; only the first two are needed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpbam.report.figure import Numbers, Series

METHODS = {"dp-sgd": "DP-SGD", "dp-sat": "DP-SAT", "bam": "BAM", "sgd": "SGD", "sam": "SAM"}
LETTERS = {"lam": "λ", "clip_norm": "C", "epsilon": "ε", "noise_multiplier": "σ", "delta": "δ"}

#: Settings that make no difference to the method: runs which differ in nothing else are one group.
NOT_COMPARED = frozenset(
    "seed noise_seed device engine physical_batch_size num_workers checkpoint_every eval_every "
    "data_root budget measure_bias".split()
)
PALETTE_SIZE = 8

Rows = tuple[dict[str, Any], ...]


class ReportError(ValueError):
    """A run that cannot be reported on: one sentence with the way out."""


@dataclass(frozen=True)
class Run:
    """What one run folder holds.

    Attributes:
        name: the folder's name.
        config: the configuration, as written.
        statement: the privacy statement.
        metrics: evaluations over training, in order.
        evaluation: by class and sub-group; None if there is none. Not private.
        steps: per-step rows. Not private.
        bias: measured steps. Not private.
    """

    name: str
    config: dict[str, Any]
    statement: dict[str, Any]
    metrics: Rows = ()
    evaluation: dict[str, Any] | None = None
    steps: Rows = ()
    bias: Rows = ()

    @property
    def method(self) -> str:
        """As people write it: DP-SGD, BAM."""
        name = str(self.config.get("method", "run"))
        return METHODS.get(name, name)

    def publishable(self) -> Run:
        """The same run without anything that is not private."""
        return Run(self.name, self.config, self.statement, self.metrics)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, drawn in one colour."""

    label: str
    colour: int
    runs: tuple[Run, ...] = field(default=())


def read_run(folder: str | Path) -> Run:
    """Everything a report needs from a run folder.

    Raises:
        ReportError: if the folder is no run, or a file in it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: name a run folder, as dpbam train --out made")
    statement, config = folder / "privacy-statement.json", folder / "config.toml"
    for path in (config, statement):
        if not path.exists():
            raise ReportError(
                f"{folder} has no {path.name}: it is not a run folder, or its training never began"
            )
    non_private = folder / "non-private"
    evaluation = non_private / "evaluation-test.json"
    return Run(
        name=folder.resolve().name,
        config=_parsed(config, tomllib.loads),
        statement=_parsed(statement, json.loads),
        metrics=_rows(folder / "metrics.jsonl"),
        evaluation=_parsed(evaluation, json.loads) if evaluation.exists() else None,
        steps=_rows(non_private / "training.jsonl"),
        bias=_rows(non_private / "bias.jsonl"),
    )


def groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    """Runs gathered by what they do, in the order given; labels name what tells groups apart.

    Example:
        >>> runs = [Run(str(k), {"method": "bam", "lam": lam, "seed": k}, {})
        ...         for k, lam in enumerate((0.02, 0.02, 0.005))]
        >>> [(group.label, len(group.runs)) for group in groups(runs)]
        [('BAM, λ 0.02', 2), ('BAM, λ 0.005', 1)]
    """
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        key = {k: v for k, v in run.config.items() if k not in NOT_COMPARED}
        gathered.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    members = list(gathered.values())
    labels = _labels([m[0] for m in members])
    return tuple(
        Group(label, k % PALETTE_SIZE, tuple(m))
        for k, (label, m) in enumerate(zip(labels, members, strict=True))
    )


def curves(
    all_groups: Iterable[Group], points: Callable[[Run], tuple[Numbers, Numbers]]
) -> tuple[Series, ...]:
    """One curve a group: its run's, or the mean of its runs with each of them faintly behind."""
    drawn: list[Series] = []
    for group in all_groups:
        found = [(run.name, *points(run)) for run in group.runs]
        found = [f for f in found if f[1]]
        if len(found) > 1:
            drawn += [Series(name, group.colour, x, y, style="faint") for name, x, y in found]
            x, y = _mean_curve([(x, y) for _, x, y in found])
            label = f"{group.label} (mean of {len(found)})"
            drawn.append(Series(label, group.colour, x, y))
        elif found:
            drawn.append(Series(group.label, group.colour, found[0][1], found[0][2]))
    return tuple(drawn)


def numbers(rows: Iterable[dict[str, Any]], *path: str) -> Numbers:
    """One number a row, found along ``path``; NaN where there is none.

    Example:
        >>> numbers([{"a": {"b": 1}}, {"a": None}], "a", "b")
        (1.0, nan)
    """
    return tuple(_number(row, path) for row in rows)


def _number(row: Any, path: Sequence[str]) -> float:
    for key in path:
        row = row.get(key) if isinstance(row, dict) else None
    return float(row) if isinstance(row, int | float) else float("nan")


def _mean_curve(found: list[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    """The mean where all curves have a point."""
    at = [dict(zip((round(v, 6) for v in x), y, strict=True)) for x, y in found]
    common = sorted(set.intersection(*(set(a) for a in at)))
    return tuple(common), tuple(sum(a[x] for a in at) / len(at) for x in common)


def _labels(runs: list[Run]) -> list[str]:
    """The method, and whatever else differs between runs of the same method."""
    labels = []
    for run in runs:
        same = [other for other in runs if other.method == run.method]
        differing = sorted(
            key
            for key in set().union(*(other.config for other in same)) - NOT_COMPARED
            if len({str(other.config.get(key)) for other in same}) > 1
        )
        parts = [f"{LETTERS.get(k, k.replace('_', ' '))} {_short(run.config.get(k))}" for k in differing[:3]]
        labels.append(", ".join([run.method, *parts]))
    return [
        label if labels.count(label) == 1 else f"{label}, {run.name}"
        for label, run in zip(labels, runs, strict=True)
    ]


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


def _rows(path: Path) -> Rows:
    """The lines of a JSON-lines file; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return ()
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    return tuple(_parsed_line(path, number, line) for number, line in enumerate(whole, 1))


def _parsed_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ReportError(f"{path} line {number} is not JSON ({error}): restore the file") from None
    if not isinstance(row, dict):
        raise ReportError(f"{path} line {number} is not an object: restore the file")
    return row


def _parsed(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} cannot be read ({error}): restore the file") from None
    if not isinstance(values, dict):
        raise ReportError(f"{path} does not hold names and values: restore the file")
    return values
