"""One sentence per setting on what a figure means for its runs, computed from all of them.

Each figure has its sentence next to it. Numbers are means over the runs of a setting, which differ
in their seed alone, with 95% t intervals. It is understandable without the paper: words for
letters, degrees for cosines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from dpbam.app.compare.statistics import estimate
from dpbam.app.report.figure import mean
from dpbam.app.report.groups import Group
from dpbam.app.report.records import Run
from dpbam.tasks.scores import metric_text

Runs = Sequence[Run]
_MOST = 8  # settings that have a sentence


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


def mean_text(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Format a mean over seeds with its 95% t interval; the number alone if all of it reads so.

    Example:
        >>> mean_text([0.90, 0.92, 0.94], "{:.2f}".format), mean_text([0.9], "{:.2f}".format)
        ('0.92 [0.87, 0.97]', '0.90')
        >>> mean_text([0.6, 0.9], "{:.0%}".format)
        '75% [0%, 100%]'
    """
    spread = estimate(values)
    # a t interval of few seeds reaches beyond what a share or a loss can be
    least = 0.0 if min(values) >= 0 else -math.inf
    most = 1.0 if text(1.0).startswith("100") else math.inf
    mean, low, high = text(spread.mean), text(max(least, spread.low)), text(min(most, spread.high))
    return mean if spread.count == 1 or low == mean == high else f"{mean} [{low}, {high}]"


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
    lowest, highest = (
        mean_text(by_name[name], lambda value: metric_text(metric, value)) for name in (low, high)
    )
    return f"{what} {low} does worst, {lowest}, and {high} best, {highest}"


def present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
