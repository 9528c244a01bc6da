"""Tables of the report: the runs beside one another, and what they were asked to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpbam.report.bias_figures import OWN, PLAIN, last_mean
from dpbam.report.records import Group, Run

#: What may be in a report that is published: settings of the method. Paths say where data live, and
#: a seed lets anyone compute the noise and take it away.
PUBLIC_SETTINGS = frozenset(
    "model model_options method epsilon noise_multiplier delta lam gradient clip_norm clipping "
    "batch_size epochs optimizer lr momentum weight_decay schedule augment_multiplicity shift flip "
    "augment_probability ema swa freeze head_only unit max_records accountant".split()
)


@dataclass(frozen=True)
class Head:
    """A column's head; ``mark`` where its numbers are not private."""

    text: str
    number: bool = False
    mark: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell: what is shown, what it is sorted by, and a run's colour."""

    text: str
    value: float | None = None
    colour: int | None = None


@dataclass(frozen=True)
class Row:
    """A row of cells; ``changed`` where runs differ."""

    cells: tuple[Cell, ...]
    changed: bool = False


@dataclass(frozen=True)
class Table:
    """A table for the page."""

    heads: tuple[Head, ...]
    rows: tuple[Row, ...]
    sortable: bool = False


def summary(groups: Sequence[Group], *, publishable: bool) -> Table:
    """One row a run: method, budget, accuracy; for the operator bias and direction too."""
    heads = [Head("run"), Head("method"), Head("λ", True), Head("ε spent", True),
             Head("accuracy", True), Head("best accuracy", True)]  # fmt: skip
    if not publishable:
        heads += [Head("bias at the end", True, True), Head("cosine", True, True)]
    rows = []
    for group in groups:
        for run in group.runs:
            cells = [Cell(run.name, colour=group.colour), Cell(group.label), *_numbers(run)]
            if not publishable:
                cells += [_digits(_reading(run, key)) for key in ("bias", "cosine")]
            rows.append(Row(tuple(cells)))
    return Table(tuple(heads), tuple(rows), sortable=True)


def configuration(runs: Sequence[Run], *, publishable: bool) -> Table:
    """One row a setting, those that differ first."""
    names = list(dict.fromkeys(key for run in runs for key in run.config))
    if publishable:
        names = [name for name in names if name in PUBLIC_SETTINGS]
    rows = []
    for name in names:
        texts = [shown(run.config.get(name)) for run in runs]
        rows.append(Row((Cell(name), *map(Cell, texts)), changed=len(set(texts)) > 1))
    rows.sort(key=lambda row: not row.changed)
    heads = (Head("setting"), *(Head(run.name) for run in runs))
    return Table(heads, tuple(rows))


def facts_table(runs: Sequence[Run], facts: Sequence[dict[str, Any]]) -> Table:
    """One row a fact, a column a run; those that differ first."""
    names = list(dict.fromkeys(key for values in facts for key in values))
    rows = []
    for name in names:
        texts = [shown(values.get(name)) for values in facts]
        rows.append(Row((Cell(name.replace("_", " ")), *map(Cell, texts)), len(set(texts)) > 1))
    rows.sort(key=lambda row: not row.changed)
    return Table((Head(""), *(Head(run.name) for run in runs)), tuple(rows))


def shown(value: Any) -> str:
    """A value as people read it.

    Example:
        >>> shown(0.02), shown(True), shown(None), shown({"width": 0.25}), shown([])
        ('0.02', 'yes', '–', 'width 0.25', '–')
    """
    if value is None or value in ("", [], {}, ()):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(v) for v in value)
    return str(value)


def _numbers(run: Run) -> tuple[Cell, ...]:
    accuracies = [float(m["accuracy"]) for m in run.metrics if m.get("accuracy") is not None]
    lam = run.config.get("lam") if run.method in ("BAM", "DP-SAT", "SAM") else None
    epsilon = run.statement.get("epsilon")
    return (
        _digits(lam),
        Cell("none", math.inf) if epsilon in (None, "infinite") else _digits(float(epsilon)),
        _share(accuracies[-1] if accuracies else None),
        _share(max(accuracies, default=None)),
    )


def _reading(run: Run, key: str) -> float | None:
    for reading in (PLAIN, OWN):
        value = last_mean(run, reading, key)
        if value is not None:
            return value
    return None


def _digits(value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(f"{value:.3g}", value)


def _share(value: float | None) -> Cell:
    return Cell("–") if value is None else Cell(f"{value:.1%}", value)
