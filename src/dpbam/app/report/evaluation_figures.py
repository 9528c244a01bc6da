"""Figures of the finished model on held-out data: by class, by sub-group, confusion.

They come from the records without noise, and held-out records may be as private as the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dpbam.app.report.charts import Series, confusion_matrix, dots
from dpbam.app.report.figure import Figure, Panel
from dpbam.app.report.groups import Group
from dpbam.app.report.records import ReportError, Run

MOST_CATEGORIES = 30
NOT_EVALUATED = "There is no evaluation by class. Run dpbam evaluate RUN --save to make one."

Shares = dict[str, dict[str, Any]]


def classes(groups: Sequence[Group]) -> Figure:
    """Share of each class that is recognised."""
    return Figure(
        "classes",
        "Accuracy by class",
        "Share of each class's test records that is recognised, with 95% intervals; "
        f"the hardest classes first, {MOST_CATEGORIES} at most.",
        "test",
        _dots("", groups, _classes),
        NOT_EVALUATED,
    )


def subgroups(groups: Sequence[Group]) -> Figure:
    """Accuracy of each sub-group, a panel per column."""
    columns = dict.fromkeys(
        column for g in groups for column in (g.runs[0].evaluation or {}).get("groups", {})
    )
    panels = [
        panel for column in columns for panel in _dots(column, groups, partial(_subgroups, column))
    ]
    return Figure(
        "groups",
        "Accuracy by sub-group",
        "Private training can cost small groups more than large ones. Accuracy of each group with "
        "95% intervals, the worst first.",
        "test",
        panels,
        "No sub-groups were evaluated. Name columns of the data with "
        "dpbam evaluate RUN --by COLUMN --save.",
    )


def confusion(groups: Sequence[Group]) -> Figure:
    """Confusion matrices, a panel per group (its first run)."""
    return Figure(
        "confusion",
        "Confusion",
        "Counts of test records: rows are the true classes, columns the predicted ones. Shading is "
        "the share of the row.",
        "test",
        [_matrix(g) for g in groups if (g.runs[0].evaluation or {}).get("confusion")],
        NOT_EVALUATED,
    )


def _matrix(group: Group) -> Panel:
    evaluation = group.runs[0].evaluation or {}
    names, values = tuple(evaluation["classes"]), evaluation["confusion"]
    if [len(row) for row in values] != [len(names)] * len(names):
        raise ReportError(
            f"the confusion matrix of {group.runs[0].name} is not of its {len(names)} classes: run "
            "dpbam evaluate RUN --save again"
        )
    cells = [
        (true, predicted, float(values[i][j]))
        for i, true in enumerate(names)
        for j, predicted in enumerate(names)
    ]
    return confusion_matrix(group.label, cells)


def _classes(run: Run) -> Shares:
    return dict((run.evaluation or {}).get("classes", {}))


def _subgroups(column: str, run: Run) -> Shares:
    found = (run.evaluation or {}).get("groups", {}).get(column, {}).get("groups", {})
    return {name: scores["accuracy"] for name, scores in found.items()}


def _dots(title: str, groups: Sequence[Group], shares_of: Callable[[Run], Shares]) -> list[Panel]:
    """One panel, categories sorted by the first run's value; none where nothing was found."""
    shown = [(g, shares) for g in groups if (shares := shares_of(g.runs[0]))]
    if not shown:
        return []
    first = shown[0][1]
    order = sorted(first, key=lambda name: _value(first, name, "value"))[:MOST_CATEGORIES]
    counted = tuple(f"{name} ({first[name].get('count', 0):,})" for name in order)
    series = [
        Series(
            g.label, g.colour, counted,
            tuple(_value(shares, name, "value") for name in order),
            tuple(_value(shares, name, "interval", 0) for name in order),
            tuple(_value(shares, name, "interval", 1) for name in order),
        )
        for g, shares in shown
    ]  # fmt: skip
    return [dots(title, "accuracy", series)]


def _value(shares: Shares, name: str, key: str, place: int | None = None) -> float:
    value = shares.get(name, {}).get(key)
    if place is not None and isinstance(value, list):
        value = value[place]
    return float(value) if isinstance(value, int | float) else math.nan
