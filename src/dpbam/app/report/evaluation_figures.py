"""Figures of the finished model on held-out data: by class, by sub-group, confusion.

They come from the records without noise, and held-out records may be as private as the others: all
of them are for the operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group
from dpbam.app.report.panels import Dots, DotSeries, Matrix
from dpbam.app.report.records import ReportError, Run

MOST_CATEGORIES = 30
NOT_EVALUATED = "There is no evaluation by class. Run dpbam evaluate RUN --save to make one."

Shares = dict[str, dict[str, Any]]


def classes(groups: Sequence[Group]) -> Figure:
    """Share of each class that is recognised."""
    found = {run.name: _classes(run) for g in groups for run in g.runs[:1]}
    return Figure(
        "classes",
        "Accuracy by class",
        "Share of each class's test records that is recognised, with 95% intervals; "
        f"the hardest classes first, {MOST_CATEGORIES} at most.",
        about="test",
        panels=_dots("", groups, found),
        missing=NOT_EVALUATED,
    )


def subgroups(groups: Sequence[Group]) -> Figure:
    """Accuracy of each sub-group, a panel a column."""
    columns: list[str] = []
    for group in groups:
        columns += [
            c for c in (group.runs[0].evaluation or {}).get("groups", {}) if c not in columns
        ]
    panels = []
    for column in columns:
        found = {run.name: _subgroups(run, column) for g in groups for run in g.runs[:1]}
        panels += _dots(column, groups, found)
    return Figure(
        "groups",
        "Accuracy by sub-group",
        "Private training can cost small groups more than large ones. Accuracy of each group with "
        "95% intervals, the worst first.",
        about="test",
        panels=panels,
        missing="No sub-groups were evaluated. Name columns of the data with "
        "dpbam evaluate RUN --by COLUMN --save.",
    )


def confusion(groups: Sequence[Group]) -> Figure:
    """Confusion matrices, a panel a group (its first run)."""
    panels = [_matrix(g) for g in groups if (g.runs[0].evaluation or {}).get("confusion")]
    return Figure(
        "confusion",
        "Confusion",
        "Counts of test records: rows are what they are, columns what the model says. Shading is "
        "the share of the row.",
        about="test",
        panels=panels,
        missing=NOT_EVALUATED,
        wide=len(panels) > 1 or any(len(panel.row_names) > 20 for panel in panels),
    )


def _matrix(group: Group) -> Matrix:
    evaluation = group.runs[0].evaluation or {}
    names = tuple(evaluation["classes"])
    values = tuple(tuple(float(v) for v in row) for row in evaluation["confusion"])
    if [len(row) for row in values] != [len(names)] * len(names):
        raise ReportError(
            f"the confusion matrix of {group.runs[0].name} is not of its {len(names)} classes: run "
            "dpbam evaluate RUN --save again"
        )
    shares = [[v / (sum(row) or 1) for v in row] for row in values]
    full = max((share for row in shares for share in row), default=1.0) or 1.0
    shades = tuple(tuple(share / full for share in row) for row in shares)
    return Matrix(
        group.label, "true class", "predicted class", names, names, values, shades, " records"
    )


def _classes(run: Run) -> Shares:
    return dict((run.evaluation or {}).get("classes", {}))


def _subgroups(run: Run, column: str) -> Shares:
    found = (run.evaluation or {}).get("groups", {}).get(column, {}).get("groups", {})
    return {name: scores["accuracy"] for name, scores in found.items()}


def _dots(title: str, groups: Sequence[Group], found: dict[str, Shares]) -> list[Dots]:
    """One panel, categories sorted by the first run's value; none where nothing was found."""
    shown = [(g, found[g.runs[0].name]) for g in groups if found[g.runs[0].name]]
    if not shown:
        return []
    first = shown[0][1]
    order = sorted(first, key=lambda name: _value(first, name, "value"))[:MOST_CATEGORIES]
    series = tuple(
        DotSeries(
            g.label, g.colour,
            tuple(_value(shares, name, "value") for name in order),
            tuple(_value(shares, name, "interval", 0) for name in order),
            tuple(_value(shares, name, "interval", 1) for name in order),
        )
        for g, shares in shown
    )  # fmt: skip
    counted = tuple(f"{name} ({first[name].get('count', 0):,})" for name in order)
    return [Dots(title, "accuracy", counted, series)]


def _value(shares: Shares, name: str, key: str, place: int | None = None) -> float:
    value = shares.get(name, {}).get(key)
    if place is not None and isinstance(value, list):
        value = value[place]
    return float(value) if isinstance(value, int | float) else math.nan
