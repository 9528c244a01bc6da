"""The figure of a comparison: what a setting gains over the first one, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence

from dpbam.app.compare.statistics import Estimate, paired_difference
from dpbam.app.report.charts import forest
from dpbam.app.report.figure import COLOURS, Figure
from dpbam.app.report.groups import Group
from dpbam.tasks.scores import metric_label


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
