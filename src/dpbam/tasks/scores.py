"""Scores and their words: without torch, so that reports and the command line read them fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from dpbam.catalogue import TASKS

Scores = dict[str, float]
LEVEL = 0.95  # of every interval


def metric_label(name: str) -> str:
    """Return a metric's name as people write it.

    Example:
        >>> metric_label("auc"), metric_label("average_precision")
        ('AUC', 'average precision')
    """
    labels = {key: label for task in TASKS.values() for key, label in task.metric_labels}
    return labels.get(name, name.replace("_", " "))


def metric_text(name: str, value: float) -> str:
    """Return a metric's value as people read it: an accuracy in percent, others as they are.

    Example:
        >>> metric_text("accuracy", 0.9234), metric_text("r2", -0.25)
        ('92.3%', '-0.250')
    """
    if math.isnan(value):
        return "-"
    percent = name.endswith("accuracy") or name == "calibration_error"
    return f"{value:.1%}" if percent else f"{value:.3f}"


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of ``right`` of ``count`` records.

    Example:
        >>> [round(edge, 3) for edge in wilson(92, 100)]
        [0.85, 0.959]
    """
    from scipy.stats import binomtest

    if not count:
        return 0.0, 1.0
    interval = binomtest(right, count).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Compared:
    """A model's score next to that of the best constant answer, on the same records.

    Attributes:
        score: the model's.
        constant: what the best answer that ignores the image would have.
        chance: the standard error of the score of a model that knows nothing.
    """

    score: float
    constant: float
    chance: float

    @property
    def better(self) -> bool:
        """Whether it is better by more than two standard errors; NaN never is.

        Example:
            >>> Compared(0.55, 0.5, 0.03).better, Compared(0.6, 0.5, 0.03).better
            (False, True)
        """
        return self.score > self.constant + 2 * self.chance

    @property
    def enough(self) -> bool:
        """Whether there are enough records to tell a useful model from one that knows nothing.

        A model counts as useful that gets a quarter of the way from the constant's score to 1. The
        interval of two standard errors around a score has to be shorter than that on either side.

        Example: 8 records of two classes, and 100.
            >>> Compared(0.5, 0.5, 0.18).enough, Compared(0.5, 0.5, 0.05).enough
            (False, True)
        """
        return 2 * self.chance < (1 - self.constant) / 4


def is_useless(compared: Mapping[str, Compared]) -> bool | None:
    """Return whether no score is better than the best constant's by more than chance.

    None: there are too few records to tell.
    """
    if not compared or any(one.better for one in compared.values()):
        return False
    return True if any(one.enough for one in compared.values()) else None


def explain_no_gain(compared: Mapping[str, Compared]) -> str:
    """Say plainly that a model has learned nothing, or that there are too few records to tell.

    Example:
        >>> explain_no_gain({"accuracy": Compared(0.5, 0.5, 0.05)}).partition(": ")[0]
        'this model is useless'
        >>> explain_no_gain({"accuracy": Compared(0.5, 0.5, 0.18)}).partition(": ")[0]
        'there are too few test records to tell whether this model has learned anything'
    """
    if is_useless(compared) is None:
        ranges = ", ".join(
            f"{metric_label(name)} {metric_text(name, one.score)} against "
            f"{metric_text(name, one.constant)} \u00b1 {metric_text(name, 2 * one.chance)}"
            for name, one in compared.items()
        )
        return (
            "there are too few test records to tell whether this model has learned anything: "
            f"{ranges} for answers that ignore the record"
        )
    scores = ", ".join(
        f"{metric_label(name)} {metric_text(name, one.score)} against "
        f"{metric_text(name, one.constant)}"
        for name, one in compared.items()
    )
    return (
        "this model is useless: it is not better than the best constant answer by more than chance "
        f"({scores}, on the test records)"
    )


class Figures(TypedDict, total=False):
    """What a report draws of an evaluation; each task has some of it.

    Attributes:
        confusion: records, or pixels: rows the label, columns the prediction.
        roc: points of the ROC curve of each finding: (false, true) positive rate.
        scatter: true and predicted value of records.
        value: the name of that value.
    """

    confusion: list[list[int]]
    roc: dict[str, list[list[float]]]
    scatter: list[list[float]]
    value: str


@dataclass(frozen=True)
class Subset:
    """Scores of the records of a class or a sub-group.

    Attributes:
        scores: by metric; of a class or finding, ``value`` is its share of the main one.
        count: records, or pixels.
        interval: of the main metric, 95%; None if it is not computed.
    """

    scores: Scores
    count: int
    interval: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, float | list[float]]:
        interval = {} if self.interval is None else {"interval": list(self.interval)}
        return {**self.scores, **interval, "count": self.count}


@dataclass(frozen=True)
class Evaluation:
    """All metrics of one model on one set.

    They are functions of the records: on records that are not public each is a release of its own,
    which training's epsilon does not cover. Intervals take the records as independent: with several
    records per patient they are too narrow.

    Attributes:
        task: its name.
        metric: the main one's name.
        scores: of all records.
        interval: of the main one, 95%.
        trivial: the main one of the best constant prediction.
        count: records.
        classes: by class or finding.
        groups: column -> value -> its records.
        figures: what a report draws.
        compared: scores next to those of the best constant answer.
    """

    task: str
    metric: str
    scores: Scores
    interval: tuple[float, float]
    trivial: float
    count: int
    classes: Mapping[str, Subset]
    groups: Mapping[str, Mapping[str, Subset]] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    compared: Mapping[str, Compared] = field(default_factory=dict)

    def worst(self, column: str) -> str:
        """Return the sub-group with the lowest main metric; of two, the larger."""
        groups = self.groups[column]

        def rank(name: str) -> tuple[float, int]:
            value = groups[name].scores[self.metric]
            return (math.inf if math.isnan(value) else value, -groups[name].count)

        return min(groups, key=rank)

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "task": self.task,
            "metric": self.metric,
            "scores": self.scores,
            "interval": list(self.interval),
            "trivial": self.trivial,
            "count": self.count,
            "classes": {name: one.to_dict() for name, one in self.classes.items()},
            "groups": {
                column: {
                    "worst": self.worst(column),
                    "groups": {name: one.to_dict() for name, one in groups.items()},
                }
                for column, groups in self.groups.items()
            },
            **self.figures,
        }
