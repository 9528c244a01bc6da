"""Tables of the report: results by setting, and settings side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpbam.app.report.bias_figures import OWN, PLAIN, last_mean
from dpbam.app.report.groups import Group
from dpbam.app.report.records import Run
from dpbam.privacy.rounding import up
from dpbam.training.events import metric_label


@dataclass(frozen=True)
class Table:
    """A table for the page.

    Attributes:
        heads: of the columns.
        rows: texts.
        differing: so many of the first rows differ between runs.
        marked: heads of columns that privacy does not protect.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    differing: int = 0
    marked: tuple[str, ...] = ()


def results(groups: Sequence[Group]) -> Table:
    """One row per setting: main metric and, where measured, bias and cosine, mean ± SD of runs."""
    metrics = list(dict.fromkeys(run.metric for group in groups for run in group.runs))
    columns: dict[str, tuple[Callable[[Run], float | None], str]] = {
        **{
            f"final {metric_label(m)}": (partial(_final, m), ".1%" if m == "accuracy" else ".3f")
            for m in metrics
        },
        "bias at the end": (lambda run: _reading(run, "bias"), ".2f"),
        "cosine with ĝ": (lambda run: _reading(run, "cosine"), ".3f"),
    }
    runs = [run for group in groups for run in group.runs]
    shown = {h: c for h, c in columns.items() if any(c[0](run) is not None for run in runs)}
    rows = []
    for g in groups:
        spreads = [_spread(map(of, g.runs), form) for of, form in shown.values()]
        rows.append((g.label, str(len(g.runs)), *spreads))
    marked = ("bias at the end", "cosine with ĝ")
    return Table(("setting", "runs", *shown), tuple(rows), marked=marked)


def side_by_side(groups: Sequence[Group], facts: Callable[[Run], dict[str, Any]]) -> Table:
    """One row per fact, a column per group; facts that differ between groups first."""
    same: list[tuple[str, ...]] = []
    differing: list[tuple[str, ...]] = []
    for name in dict.fromkeys(key for g in groups for run in g.runs for key in facts(run)):
        texts = [
            ", ".join(dict.fromkeys(_fact(name, facts(run).get(name)) for run in g.runs))
            for g in groups
        ]
        (differing if len(set(texts)) > 1 else same).append((name, *texts))
    heads = ("setting", *(g.label for g in groups))
    return Table(heads, (*differing, *same), len(differing))


def _fact(name: str, value: Any) -> str:
    """A setting as people read it; an epsilon, also what is taken of one, rounded up."""
    spent = name in ("epsilon", "taken") and isinstance(value, float)
    return up(value) if spent else shown(value)


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
        return ", ".join(f"{str(k).replace('_', ' ')} {_fact(k, v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(shown(v) for v in value)
    return str(value)


def _final(metric: str, run: Run) -> float | None:
    found = [float(row[metric]) for row in run.metrics if row.get(metric) is not None]
    return found[-1] if found else None


def _reading(run: Run, key: str) -> float | None:
    plain = last_mean(run, PLAIN, key)
    return last_mean(run, OWN, key) if plain is None else plain


def _spread(values: Iterable[float | None], form: str) -> str:
    """Mean ± sample standard deviation."""
    found = [v for v in values if v is not None]
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found):{form}}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):{form}}{spread}"
