"""Runs side by side: grouped by what they do, labelled by what differs, drawn as curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dpbam.app.report.charts import Numbers, Series
from dpbam.app.report.records import Row, Run
from dpbam.app.runs.config import RunConfig
from dpbam.app.runs.settings import policies
from dpbam.privacy.rounding import up

_POLICIES = policies(RunConfig)
PALETTE_SIZE = 8

#: Settings that are not the method's: runs that differ in nothing else are one group.
NOT_COMPARED = frozenset(name for name, one in _POLICIES.items() if not one.distinguishes)


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
            series.append(Series(g.label, g.colour, x, y))
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
    """The method, and up to three settings that differ between runs of the same method."""
    labels = []
    for run in runs:
        same = [other for other in runs if other.method == run.method]
        differing = sorted(
            key
            for key in set().union(*(other.config for other in same)) - NOT_COMPARED
            if len({str(other.config.get(key)) for other in same}) > 1
        )
        parts = [f"{_symbol(k)} {_short(k, run.config.get(k))}" for k in differing[:3]]
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
    text = str(value)
    if isinstance(value, float):
        text = up(value) if name == "epsilon" else f"{value:g}"
    return text if len(text) <= 24 else f"{text[:23]}…"
