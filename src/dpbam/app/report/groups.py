"""Runs side by side: grouped by what they do, labelled by what differs, drawn and put in words.

Curves are means over the runs of a setting, which differ in their seed alone. Each figure has a
sentence per setting on what it means, with means and 95% t intervals: understandable without the
paper, words for letters, degrees for cosines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dpbam.app.report.charts import Numbers, Series
from dpbam.app.report.figure import mean
from dpbam.app.report.records import Row, Run
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.settings import policies
from dpbam.estimates import estimate
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_text

_POLICIES = policies(RunConfig)
PALETTE_SIZE = 8

#: Settings that are not the method's: runs that differ in nothing else are one group.
NOT_COMPARED = frozenset(name for name, one in _POLICIES.items() if not one.distinguishes)
# paths are shown by the name of the data set; what a rule chose from is told by what it chose
_NOT_IN_LABELS = NOT_COMPARED | {"data", "auto_facts", "auto_settings"}
Runs = Sequence[Run]
_MOST = 8  # settings that have a sentence


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, drawn in one colour."""

    label: str
    colour: int
    runs: tuple[Run, ...]


def groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    """Runs grouped by what they do, in the order given; labels name what differs.

    Example:
        >>> runs = [Run(str(k), {"method": "bam", "lam": lam, "seed": k})
        ...         for k, lam in enumerate((0.02, 0.02, 0.005))]
        >>> [(group.label, len(group.runs)) for group in groups(runs)]
        [('BAM, λ 0.02', 2), ('BAM, λ 0.005', 1)]
    """
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        key = {k: v for k, v in run.config.items() if k not in NOT_COMPARED} | {"data": run.data}
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
    """One curve per group: its run's, or the mean of its runs with each of them faintly behind."""
    series: list[Series] = []
    for g in all_groups:
        named_curves = [(run.name, *points(run)) for run in g.runs]
        named_curves = [f for f in named_curves if f[1]]
        if len(named_curves) > 1:
            series += [
                Series(name, g.colour, x, y, style="seed", group=g.label)
                for name, x, y in named_curves
            ]
        if named_curves:
            x, y = _mean_curve([(x, y) for _, x, y in named_curves])
            style = "points" if len(x) == 1 else "line"  # a line through one point is not drawn
            series.append(Series(g.label, g.colour, x, y, style=style))
    return tuple(series)


def numbers(rows: Iterable[Row], *path: str) -> Numbers:
    """One number per row, found along ``path``; NaN where there is none.

    Example:
        >>> numbers([{"a": {"b": 1}}, {"a": None}], "a", "b")
        (1.0, nan)
    """
    return tuple(_number(row, path) for row in rows)


def _number(row: Row, path: Sequence[str]) -> float:
    value: object = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else float("nan")


def _mean_curve(xy: list[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    """The mean where all curves have a point."""
    if len(xy) == 1:
        return xy[0]
    at = [dict(zip((round(v, 6) for v in x), y, strict=True)) for x, y in xy]
    common = sorted(set.intersection(*(set(a) for a in at)))
    return tuple(common), tuple(sum(a[x] for a in at) / len(at) for x in common)


def _labels(runs: list[Run]) -> list[str]:
    """The method, the data if it differs, and up to three settings that tell runs of it apart."""
    labels = []
    for run in runs:
        same = [other for other in runs if other.method == run.method]
        differing = sorted(
            key
            for key in set().union(*(other.config for other in same)) - _NOT_IN_LABELS
            if len({str(other.config.get(key)) for other in same}) > 1
        )
        parts = [f"{_symbol(k)} {_short(k, run.config.get(k))}" for k in differing[:3]]
        if len({other.data for other in runs}) > 1:
            parts.insert(0, f"data {_short('data', run.data)}")
        # a reference without privacy wins: no reader may take it for a method to choose
        reference = [] if run.private else ["no privacy"]
        labels.append(", ".join([run.method, *reference, *parts]))
    return [
        label if labels.count(label) == 1 else f"{label}, {run.name}"
        for label, run in zip(labels, runs, strict=True)
    ]


def _symbol(name: str) -> str:
    symbol = _POLICIES[name].symbol if name in _POLICIES else ""
    return symbol or name.replace("_", " ")


def _short(name: str, value: object) -> str:
    text = "unset" if value is None else str(value)
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {option}" for key, option in value.items()) or "unset"
    if isinstance(value, float):
        text = up(value) if name == "epsilon" else f"{value:g}"
    return text if len(text) <= 24 else f"{text[:23]}…"


def meaning(sentence: Callable[[Runs], str], groups: Sequence[Group]) -> tuple[str, ...]:
    """Return what a figure shows, a sentence per group; none if nothing is known.

    Args:
        sentence: computes it from the runs of a group, without its full stop.
        groups: the runs.
    """
    texts = {g.label: text for g in groups if (text := sentence(g.runs))}
    if len(groups) == 1:
        return tuple(f"{text}." for text in texts.values())
    return tuple(f"{label}: {text}." for label, text in texts.items())[:_MOST]


def mean_text(
    values: Sequence[float], text: Callable[[float], str], *, below_zero: bool = False
) -> str:
    """Format a mean over seeds with its 95% t interval; the number alone if all of it reads so.

    Example:
        >>> mean_text([0.90, 0.92, 0.94], "{:.2f}".format), mean_text([0.9], "{:.2f}".format)
        ('0.92 [0.87, 0.97]', '0.90')
        >>> mean_text([0.6, 0.9], "{:.0%}".format)
        '75% [0%, 100%]'
    """
    spread = estimate(values)
    # a t interval of few seeds reaches beyond what a share or a loss can be
    least = -math.inf if below_zero or min(values) < 0 else 0.0
    most = 1.0 if text(1.0).startswith("100") else math.inf
    mean, low, high = text(spread.mean), text(max(least, spread.low)), text(min(most, spread.high))
    return mean if spread.count == 1 or low == mean == high else f"{mean} [{low}, {high}]"


def mean_score(
    values: Sequence[float], metric: str, text: Callable[[float], str] | None = None
) -> str:
    """Format the mean of a metric with its interval: R2 alone may lie below 0."""
    return mean_text(values, text or partial(metric_text, metric), below_zero=metric == "r2")


def mean_of(values: Iterable[float], form: str) -> str:
    """Their mean with its interval; empty without values."""
    listed = list(values)
    return mean_text(listed, form.format) if listed else ""


def values_of(shares: object) -> dict[str, float]:
    items = shares.items() if isinstance(shares, Mapping) else ()
    values = {k: v.get("value") if isinstance(v, Mapping) else v for k, v in items}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float) and v == v}


def gather_by_name(values_of_runs: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    by_name: dict[str, list[float]] = {}
    for values in values_of_runs:
        for name, value in values.items():
            by_name.setdefault(name, []).append(value)
    return by_name


def name_extremes(what: str, by_name: dict[str, list[float]], metric: str) -> str:
    """The worst and the best by their means over the runs."""
    if len(by_name) < 2:
        return ""
    means = {name: mean(values) for name, values in by_name.items()}
    if min(means.values()) == max(means.values()):
        return f"every {what} has {metric_text(metric, min(means.values()))}"
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    lowest, highest = (mean_score(by_name[name], metric) for name in (low, high))
    return f"{what} {low} does worst, {lowest}, and {high} best, {highest}"


def present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
