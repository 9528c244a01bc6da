"""Figures of the training itself: accuracy, budget, loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpbam.app.report.bias_figures import epochs
from dpbam.app.report.charts import Numbers, lines
from dpbam.app.report.figure import Figure, mean
from dpbam.app.report.groups import Group, curves, numbers
from dpbam.app.report.meaning import Runs, finite, mean_of, mean_text
from dpbam.app.report.records import Run
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text


def accuracy(groups: Sequence[Group]) -> Figure:
    """The task's main metric on the test data over training, and over the budget spent."""
    metrics = list(dict.fromkeys(run.metric for group in groups for run in group.runs))
    label = ", ".join(map(metric_label, metrics)) or "accuracy"
    percent = metrics in ([], ["accuracy"])

    def over(key: str, run: Run) -> tuple[Numbers, Numbers]:
        return numbers(run.metrics, key), numbers(run.metrics, run.metric)

    def over_epsilon(run: Run) -> tuple[Numbers, Numbers]:
        """Rounded up to the digits shown, so that no point is below its epsilon."""
        spent, reached = over("epsilon", run)
        return tuple(x if math.isnan(x) else float(up(x, 3)) for x in spent), reached

    by_epoch = curves(groups, lambda run: over("epoch", run))
    by_epsilon = curves([g for g in groups if g.runs[0].private], over_epsilon)
    constants = {run.constant for group in groups for run in group.runs}
    # one line says it for all runs of one data set, and none where some run lacks it
    alone = constants.pop() if len(constants) == 1 else None
    marks = (
        ()
        if alone is None
        else ((alone, f"best constant answer {metric_text(metrics[0], alone)}"),)
    )
    panels = (
        lines("Over training", "epoch", label, by_epoch, percent=percent, marks=marks),
        lines("Over the budget", "ε spent", label, by_epsilon, percent=percent, marks=marks),
    )
    return Figure(
        "accuracy",
        label[:1].upper() + label[1:],
        f"{'Share of test records classified correctly' if percent else f'{label} on test records'}"
        ", by the model that would be handed out at that moment: against passes over the data, and "
        "against the budget spent by then. The best constant answer ignores the image.",
        "test",
        [panel for panel in panels if panel.rows],
        "No accuracy was recorded, or it was left out of a report for publication: with "
        "--public-test-data it stays in.",
        {"y": "shared"},
    )


def of_accuracy(runs: Runs) -> str:
    name = runs[0].metric
    finals = [run.final for run in runs if run.final is not None]
    if not finals:
        return ""
    ending = mean_text(finals, lambda value: metric_text(name, value))
    if len(runs) > 1:
        return f"the {metric_label(name)} ends at {ending}"
    rows = [row for row in runs[0].metrics if row.get(name) is not None]
    top = max(rows, key=lambda row: row[name])
    highest = f"{metric_text(name, top[name])} at epoch {top['epoch']:.3g}"
    more = f", the highest on the way was {highest}" if top[name] > finals[0] else ", its highest"
    return f"the {metric_label(name)} ends at {ending}{more}"


def loss(groups: Sequence[Group]) -> Figure:
    """Training loss over steps."""
    series = curves(groups, _loss)
    return Figure(
        "loss",
        "Training loss",
        "Mean loss on a part of each batch, before the step.",
        "training",
        [lines("", "epoch", "loss", series, zero=True)] if series else (),
        "No training loss was recorded.",
    )


def of_loss(runs: Runs) -> str:
    firsts, lasts = [], []
    for run in runs:
        losses = finite(numbers(run.steps, "non_private_loss"))
        tenth = max(1, len(losses) // 10)
        if losses:
            firsts.append(mean(losses[:tenth]))
            lasts.append(mean(losses[-tenth:]))
    first, last = mean_of(firsts, "{:.3g}"), mean_of(lasts, "{:.3g}")
    return first and f"the loss goes from {first} to {last}, means of a tenth of the steps each"


def _loss(run: Run) -> tuple[Numbers, Numbers]:
    rows = tuple(row for row in run.steps if row.get("non_private_loss") is not None)
    return epochs(run, rows), numbers(rows, "non_private_loss")
