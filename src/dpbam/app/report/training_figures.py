"""Figures of the training itself: accuracy, budget, loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpbam.app.report.bias_figures import epochs
from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group, curves, numbers
from dpbam.app.report.panels import Lines, Numbers
from dpbam.app.report.records import Run
from dpbam.methods import is_private
from dpbam.privacy.rounding import up


def accuracy(groups: Sequence[Group]) -> Figure:
    """Test accuracy over training, and over the budget spent."""

    def over(key: str, run: Run) -> tuple[Numbers, Numbers]:
        return numbers(run.metrics, key), numbers(run.metrics, "accuracy")

    def over_epsilon(run: Run) -> tuple[Numbers, Numbers]:
        """A point's label shows three digits: rounded up here, it is never below the epsilon."""
        spent, reached = over("epsilon", run)
        return tuple(x if math.isnan(x) else float(up(x, 3)) for x in spent), reached

    by_epoch = curves(groups, lambda run: over("epoch", run))
    by_epsilon = curves([g for g in groups if _private(g)], over_epsilon)
    panels = [Lines("Over training", "epoch", "accuracy", by_epoch, percent=True)]
    if by_epsilon:
        panels.append(Lines("Over the budget", "ε spent", "accuracy", by_epsilon, percent=True))
    return Figure(
        "accuracy",
        "Accuracy",
        "Share of test records classified rightly, by the model that would be handed out at that "
        "moment: against passes over the data, and against the budget spent by then.",
        about="test",
        panels=panels if by_epoch else (),
        missing="No accuracy was recorded, or it was left out of a report for publication: with "
        "--public-test-data it stays in.",
        wide=True,
    )


def loss(groups: Sequence[Group]) -> Figure:
    """Training loss over steps."""
    series = curves(groups, _loss)
    return Figure(
        "loss",
        "Training loss",
        "Mean cross-entropy on a part of each batch, before the step.",
        about="training",
        panels=[Lines("", "epoch", "cross-entropy", series, zero=True)] if series else (),
        missing="No training loss was recorded.",
    )


def _loss(run: Run) -> tuple[Numbers, Numbers]:
    rows = [row for row in run.steps if row.get("non_private_loss") is not None]
    return epochs(run, tuple(rows)), numbers(rows, "non_private_loss")


def _private(group: Group) -> bool:
    return is_private(group.runs[0].config.get("method"))
