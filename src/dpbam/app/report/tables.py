"""Settings next to one another: tables of results and settings, and the figure of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dpbam.app.report.charts import forest
from dpbam.app.report.figure import COLOURS, Figure
from dpbam.app.report.groups import Group, mean_score, mean_text
from dpbam.app.report.records import Run
from dpbam.app.report.training_figures import OWN, PLAIN, last_mean
from dpbam.estimates import Estimate, paired_difference
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
    columns["length of the clipping bias"] = lambda g: _spread(g, partial(_reading, "bias"), ".2f")
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
    return Table(("setting", "runs", *shown), tuple(rows), marked=("length of the clipping bias",))


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
    return mean_score(values, metric) + useless if values else "–"


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


def differences(groups: Sequence[Group]) -> Figure:
    """Paired differences of the main metric to the first setting, each with its interval."""
    metrics = {run.metric for group in groups for run in group.runs}
    metric = metrics.pop() if len(metrics) == 1 else "accuracy"
    scale, unit = (100.0, ", in points") if metric == "accuracy" else (1.0, "")
    rows, colours, useful, sentences = [], [], [], []
    for group, difference in paired(groups):
        values = {"difference": difference.mean, "low": difference.low, "high": difference.high}
        scaled = {name: scale * value for name, value in values.items()}
        rows.append({"setting": group.label, **scaled, "seeds": difference.count})
        colours.append(COLOURS[group.colour % len(COLOURS)])
        useful.append(not any(run.useless for run in group.runs))
        learned = "" if useful[-1] else ". It is not better than an answer that ignores the image"
        sentences.append(f"{group.label}: {_sentence(difference, metric)}{learned}.")
    first = groups[0].label if groups else "the first"
    label = f"{metric_label(metric)} minus that of {first}{unit} (right of the line: better)"
    return Figure(
        "differences",
        f"Difference to {first}",
        f"Mean over the seeds that both have of the {metric_label(metric)} minus that of {first} "
        "with the same seed, and its 95% t interval. An interval that crosses the dashed line "
        "shows no winner. A triangle points to what lies outside of the picture.",
        "test",
        [forest("", label, rows, colours, useful)] if rows else (),
        "Paired differences need two settings that were trained with the same seeds: dpbam compare "
        "trains them. A page for publication has no seeds.",
        # one run has nothing to be compared with
        expected=len(groups) > 1,
        meaning=tuple(sentences),
    )


def paired(groups: Sequence[Group]) -> list[tuple[Group, Estimate]]:
    """Return the groups that share seeds, data and metric with the first, and their differences."""
    if len(groups) < 2:
        return []
    first, *others = groups
    baseline = _by_seed(first)
    alike = [g for g in others if _compared(g) == _compared(first) and {*_by_seed(g)} & {*baseline}]
    return [(g, paired_difference(_by_seed(g), baseline)) for g in alike]


def difference_text(difference: Estimate, metric: str) -> str:
    """Return a difference with its interval: of accuracies in points, of other metrics as it is."""
    scale, form = (100, "+.1f") if metric == "accuracy" else (1, "+.3f")
    mean, low, high = (
        f"{scale * x:{form}}" for x in (difference.mean, difference.low, difference.high)
    )
    return f"{mean} [{low}, {high}]" if difference.count > 1 else mean


def _sentence(difference: Estimate, metric: str) -> str:
    """Return a difference and its verdict for a reader who sees one sentence alone."""
    mean, _, interval = difference_text(difference, metric).partition(" ")
    unit = " points" if metric == "accuracy" else ""
    if not interval:
        return f"{mean}{unit} with one seed, which shows no winner"
    return (
        f"{mean}{unit} on average over {difference.count} seeds, 95% interval {interval}: "
        f"{difference.verdict}"
    )


def _compared(group: Group) -> tuple[str, str]:
    return group.runs[0].data, group.runs[0].metric


def _by_seed(group: Group) -> dict[int, float]:
    """The final metric of each run that has a seed."""
    seeded = [(run.config.get("seed"), run.final) for run in group.runs]
    return {seed: final for seed, final in seeded if isinstance(seed, int) and final is not None}
