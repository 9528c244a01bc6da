"""Figures of the finished model on held-out data: by class, by sub-group, confusion, by task.

They come from the records without noise, and held-out records may be as confidential as the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from dpbam.app.report.charts import Series, confusion_matrix, dots, lines, scatter
from dpbam.app.report.figure import Figure, Panel, mean
from dpbam.app.report.groups import (
    PALETTE_SIZE,
    Group,
    Runs,
    gather_by_name,
    mean_of,
    mean_text,
    name_extremes,
    values_of,
)
from dpbam.app.report.records import ReportError, Row, Run
from dpbam.tasks.scores import metric_label

MOST_CATEGORIES = 30
NOT_EVALUATED = "There is no evaluation by class. Run dpbam evaluate RUN --save to make one."

_FALSE = 0.1  # false positive rate at which ROC curves are read
Shares = Mapping[str, Row]


def classes(groups: Sequence[Group]) -> Figure:
    """The main metric of each class: the share that is recognised, AUC or Dice."""
    metric = _metric(groups)
    what = {
        "AUC": "AUC of each finding, with the number of test records that have it",
        "Dice": "Dice of each class, with its number of pixels in the test masks",
    }.get(metric, "Share of each class's test records that is recognised, with 95% intervals")
    return Figure(
        "classes",
        f"{metric[:1].upper()}{metric[1:]} by {'finding' if metric == 'AUC' else 'class'}",
        f"{what}; the hardest first, {MOST_CATEGORIES} at most.",
        "test",
        _dots("", groups, lambda run: dict((run.evaluation or {}).get("classes", {}))),
        NOT_EVALUATED,
    )


def of_classes(runs: Runs) -> str:
    shares = [values_of((run.evaluation or {}).get("classes")) for run in runs]
    what = "finding" if runs[0].metric == "auc" else "class"
    return name_extremes(what, gather_by_name(shares), runs[0].metric)


def subgroups(groups: Sequence[Group]) -> Figure:
    """The main metric of each sub-group, a panel per column."""
    metric = _metric(groups)
    columns = dict.fromkeys(
        column for g in groups for column in (g.runs[0].evaluation or {}).get("groups", {})
    )
    panels = [
        panel for column in columns for panel in _dots(column, groups, partial(_subgroups, column))
    ]
    return Figure(
        "groups",
        f"{metric[:1].upper()}{metric[1:]} by sub-group",
        f"Private training can cost small groups more than large ones. {metric[:1].upper()}"
        f"{metric[1:]} of each group, the worst first; for an accuracy with 95% intervals.",
        "test",
        panels,
        "No sub-groups were evaluated. Name columns of the data with "
        "dpbam evaluate RUN --by COLUMN --save.",
    )


def of_subgroups(runs: Runs) -> str:
    by_column: dict[str, list[dict[str, float]]] = {}
    for run in runs:
        for column, subgroups in ((run.evaluation or {}).get("groups") or {}).items():
            scores = {
                name: group_scores.get(run.metric)
                for name, group_scores in subgroups["groups"].items()
            }
            by_column.setdefault(column, []).append(values_of(scores))
    texts = [
        name_extremes(column, gather_by_name(s), runs[0].metric) for column, s in by_column.items()
    ]
    return "; ".join(text for text in texts if text)


def confusion(groups: Sequence[Group]) -> Figure:
    """Confusion matrices, a panel per group (its first run)."""
    return Figure(
        "confusion",
        "Confusion",
        "Counts of test records (of pixels in a segmentation): rows are the true classes, columns "
        "the predicted ones. Shading is the share of the row.",
        "test",
        [
            _matrix(g, _title(g, groups))
            for g in groups
            if (g.runs[0].evaluation or {}).get("confusion")
        ],
        NOT_EVALUATED,
    )


def of_confusion(runs: Runs) -> str:
    evaluations = [run.evaluation or {} for run in runs]
    names = list(evaluations[0].get("classes") or ())
    matrices = [e["confusion"] for e in evaluations if e.get("confusion")]
    if not matrices:
        return ""
    total = np.sum(matrices, axis=0)
    wrong = [
        (int(n), i, j) for i, row in enumerate(total) for j, n in enumerate(row) if i != j and n
    ]
    if not wrong:
        return "no test record is taken for another class"
    n, i, j = max(wrong)
    of = f"{int(total[i].sum()):,} {'pixels' if runs[0].metric == 'dice' else 'records'}"
    all_runs = f", all {len(matrices)} runs together" if len(matrices) > 1 else ""
    return f"the most frequent mistake is {names[i]} taken for {names[j]}: {n:,} of {of}{all_runs}"


def roc(groups: Sequence[Group]) -> Figure:
    """ROC curves of findings, a panel per group (its first run)."""
    panels = [
        lines(
            _title(group, groups),
            "false positive rate",
            "true positive rate",
            curves,
            diagonal=True,
        )
        for group in groups
        if (curves := _roc_curves(group.runs[0].evaluation or {}))
    ]
    return Figure(
        "roc",
        "ROC curves",
        "Of each finding, the share of test records with it that are found, against the share of "
        "those without it that are reported as well: the nearer to the upper left corner, the "
        f"better. A coin follows the dashed diagonal. The {PALETTE_SIZE} hardest findings at most.",
        "test",
        panels,
        f"ROC curves are of findings. {NOT_EVALUATED}",
        expected=_has_metric(groups, "auc"),
    )


def of_roc(runs: Runs) -> str:
    rates = [
        {
            name: float(np.interp(_FALSE, [x for x, _ in points], [y for _, y in points]))
            for name, points in ((run.evaluation or {}).get("roc") or {}).items()
            if points
        }
        for run in runs
    ]
    by_name = gather_by_name(rates)
    if not by_name:
        return ""
    means = {name: mean(values) for name, values in by_name.items()}
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    lowest, highest = (mean_text(by_name[name], "{:.0%}".format) for name in (low, high))
    rest = f" and {highest} of those with {high}" if len(by_name) > 1 else ""
    return (
        f"where {_FALSE:.0%} of the records without a finding are reported as well, "
        f"{lowest} of those with {low}{rest} are found"
    )


def _roc_curves(evaluation: Row) -> list[Series]:
    """The curves of the findings with the lowest AUC, the hardest first."""
    shares, points_by_name = evaluation.get("classes", {}), evaluation.get("roc") or {}
    with_points = [name for name, points in points_by_name.items() if points]
    hardest = sorted(with_points, key=lambda name: _value(shares, name, "value"))[:PALETTE_SIZE]
    return [
        Series(
            name,
            k,
            tuple(x for x, _ in points_by_name[name]),
            tuple(y for _, y in points_by_name[name]),
        )
        for k, name in enumerate(hardest)
    ]


def _title(group: Group, groups: Sequence[Group]) -> str:
    """Return the panel's title: the group's label, or none for a single group."""
    return group.label if len(groups) > 1 else ""


def predicted(groups: Sequence[Group]) -> Figure:
    """Predicted against true values of a regression, a panel per group (its first run)."""
    panels = []
    for group in groups:
        evaluation = group.runs[0].evaluation or {}
        if points := evaluation.get("scatter"):
            name = evaluation.get("value", "value")
            x, y = zip(*points, strict=True)
            series = Series(group.label, group.colour, x, y)
            title = _title(group, groups)
            panels.append(scatter(title, f"true {name}", f"predicted {name}", series))
    return Figure(
        "predicted",
        "Predicted and true values",
        "One point per test record, 300 at most. On the dashed line the prediction is right.",
        "test",
        panels,
        f"Values are predicted by a regression. {NOT_EVALUATED}",
        expected=_has_metric(groups, "r2"),
    )


def of_predicted(runs: Runs) -> str:
    evaluations = [run.evaluation or {} for run in runs]
    errors = [(e.get("scores") or {}).get("mae") for e in evaluations]
    error = mean_of((e for e in errors if e is not None), "{:.3g}")
    name = evaluations[0].get("value", "value")
    return error and f"the predicted {name} is {error} away from the true one on average"


def _has_metric(groups: Sequence[Group], metric: str) -> bool:
    return any(run.metric == metric for group in groups for run in group.runs)


def _metric(groups: Sequence[Group]) -> str:
    """The main metric of the runs, as people write it; of several tasks the first one's."""
    runs = [run for group in groups for run in group.runs]
    return metric_label(runs[0].metric) if runs else "accuracy"


def _matrix(group: Group, title: str) -> Panel:
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
    return confusion_matrix(title, cells)


def _subgroups(column: str, run: Run) -> Shares:
    scores_by_group = (run.evaluation or {}).get("groups", {}).get(column, {}).get("groups", {})
    metric = (run.evaluation or {}).get("metric")
    return {
        name: {**scores, "value": scores.get(metric)} for name, scores in scores_by_group.items()
    }


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
    metric = _metric([group for group, _ in shown])
    return [dots(title, metric, series, percent=metric == "accuracy")]


def _value(shares: Shares, name: str, key: str, place: int | None = None) -> float:
    value = shares.get(name, {}).get(key)
    if place is not None and isinstance(value, list):
        value = value[place]
    return float(value) if isinstance(value, int | float) else math.nan
