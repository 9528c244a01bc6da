"""Tables of the report: results by setting, and settings side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dpbam.app.compare.statistics import Estimate
from dpbam.app.report.bias_figures import OWN, PLAIN, last_mean
from dpbam.app.report.comparison_figures import difference_text, paired
from dpbam.app.report.groups import Group
from dpbam.app.report.meaning import mean_text
from dpbam.app.report.records import Run
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text


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
    """One row per setting: main metric, difference to the first, epsilon, and what was measured.

    Numbers are means over the runs of a setting with their 95% t intervals.
    """
    metrics = list(dict.fromkeys(run.metric for group in groups for run in group.runs))
    columns: dict[str, Callable[[Group], str]] = {
        f"final {metric_label(m)}": partial(_final, m) for m in metrics
    }
    by_label = {group.label: difference for group, difference in paired(groups)}
    if by_label:
        columns[f"difference to {groups[0].label}"] = lambda g: _difference(by_label, g)
        columns["verdict"] = lambda g: by_label[g.label].verdict if g.label in by_label else ""
    columns["ε of one run"] = _epsilon
    columns["bias at the end"] = lambda g: _spread(g, partial(_reading, "bias"), ".2f")
    cells = {head: [of(g) for g in groups] for head, of in columns.items()}
    shown = {
        head: column for head, column in cells.items() if any(c not in ("", "–") for c in column)
    }
    rows = [
        (g.label, str(len(g.runs)), *(column[k] for column in shown.values()))
        for k, g in enumerate(groups)
    ]
    constants = {run.constant for group in groups for run in group.runs}
    if len(metrics) == 1 and len(constants) == 1 and (alone := constants.pop()) is not None:
        empty = ("",) * (len(shown) - 1)
        rows.append(("best constant answer", "", metric_text(metrics[0], alone), *empty))
    return Table(("setting", "runs", *shown), tuple(rows), marked=("bias at the end",))


def side_by_side(groups: Sequence[Group], facts: Callable[[Run], Mapping[str, object]]) -> Table:
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


def _fact(name: str, value: object) -> str:
    """A setting as people read it; an epsilon, also what is taken of one, rounded up."""
    spent = name in ("epsilon", "taken")
    return up(value) if spent and isinstance(value, float) else shown(value)


def shown(value: object) -> str:
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


def _final(metric: str, group: Group) -> str:
    values = [run.final for run in group.runs if run.metric == metric and run.final is not None]
    useless = ", useless" if any(run.useless for run in group.runs) else ""
    return mean_text(values, partial(metric_text, metric)) + useless if values else "–"


def _difference(by_label: Mapping[str, Estimate], group: Group) -> str:
    if group.label not in by_label:
        return ""
    return difference_text(by_label[group.label], group.runs[0].metric)


def _epsilon(group: Group) -> str:
    """The largest of a setting's runs: what publishing one of them costs at most."""
    epsilon = max(run.epsilon for run in group.runs)
    return up(epsilon) if math.isfinite(epsilon) else "no privacy"


def _reading(key: str, run: Run) -> float | None:
    if not run.private:  # which clips nothing
        return None
    plain = last_mean(run, PLAIN, key)
    return last_mean(run, OWN, key) if plain is None else plain


def _spread(group: Group, of: Callable[[Run], float | None], form: str) -> str:
    values = [value for run in group.runs if (value := of(run)) is not None]
    return mean_text(values, lambda value: f"{value:{form}}") if values else "–"
