"""Tables of the report: the runs beside one another, and what they were asked to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpbam.app.report.bias_figures import OWN, PLAIN, last_mean
from dpbam.app.report.groups import Group
from dpbam.app.report.records import Run
from dpbam.privacy.rounding import up


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


def results(groups: Sequence[Group]) -> Table:
    """One row a setting: accuracy and, where measured, bias and cosine, mean ± SD over its runs."""
    heads = [Head("setting"), Head("runs", True)]
    columns: list[tuple[Head, Callable[[Run], float | None], str]] = [
        (Head("final accuracy", True), _accuracy, ".1%"),
        (Head("bias at the end", True, True), lambda run: _reading(run, "bias"), ".2f"),
        (Head("cosine with ĝ", True, True), lambda run: _reading(run, "cosine"), ".3f"),
    ]
    runs = [run for group in groups for run in group.runs]
    shown_columns = [c for c in columns if any(c[1](run) is not None for run in runs)]
    rows = []
    for g in groups:
        cells = [Cell(g.label, colour=g.colour), Cell(str(len(g.runs)), len(g.runs))]
        cells += [_spread([of(run) for run in g.runs], form) for _, of, form in shown_columns]
        rows.append(Row(tuple(cells)))
    return Table((*heads, *(c[0] for c in shown_columns)), tuple(rows), sortable=True)


def side_by_side(groups: Sequence[Group], facts: Callable[[Run], dict[str, Any]]) -> Table:
    """One row a fact, a column a group; facts that differ between groups first, and marked."""
    names = dict.fromkeys(key for g in groups for run in g.runs for key in facts(run))
    rows = []
    for name in names:
        texts = []
        for g in groups:
            values = dict.fromkeys(_fact(name, facts(run).get(name)) for run in g.runs)
            texts.append(", ".join(values))  # seeds, say
        rows.append(Row((Cell(name), *map(Cell, texts)), changed=len(set(texts)) > 1))
    rows.sort(key=lambda row: not row.changed)
    return Table((Head("setting"), *(Head(g.label) for g in groups)), tuple(rows))


def _fact(name: str, value: Any) -> str:
    """A setting as people read it; an epsilon rounded up."""
    return up(value) if name == "epsilon" and isinstance(value, float) else shown(value)


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
        return f"{value:.6g}".replace("e-0", "e-")
    if isinstance(value, dict):
        return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(v) for v in value)
    return str(value)


def _accuracy(run: Run) -> float | None:
    accuracies = [float(m["accuracy"]) for m in run.metrics if m.get("accuracy") is not None]
    return accuracies[-1] if accuracies else None


def _reading(run: Run, key: str) -> float | None:
    for reading in (PLAIN, OWN):
        value = last_mean(run, reading, key)
        if value is not None:
            return value
    return None


def _spread(values: Sequence[float | None], form: str) -> Cell:
    """Mean ± sample standard deviation, sorted by the mean."""
    found = [v for v in values if v is not None]
    if not found:
        return Cell("–")
    mean = statistics.fmean(found)
    spread = f" ± {statistics.stdev(found):{form}}" if len(found) > 1 else ""
    return Cell(f"{mean:{form}}{spread}", mean)
