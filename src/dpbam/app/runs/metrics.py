"""How good a classifier is on labelled records, as a whole, by class and by sub-group.

N records, K classes, p [N, K] the predicted probabilities, y [N] the labels.

====================  ==========================================================================
accuracy              share of argmax p = y, with a 95% Wilson interval
balanced accuracy     mean over the classes that occur of the share recognised (recall)
AUC                   area under the ROC curve; with K > 2 one class against the rest, averaged
                      over the classes that occur (macro)
calibration error     ECE: sum_b |B_b|/N * |accuracy(B_b) - confidence(B_b)|, 15 equal bins of the
                      winning class's probability
confusion             [K, K] counts: rows the label, columns the prediction
====================  ==========================================================================

All are functions of the records: on records that are not public each is a release of its own, which
training's epsilon does not cover. Intervals take the records as independent: with several records
per patient they are too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.errors import ArgumentError

LEVEL = 0.95
BINS = 15
_MOST_GROUPS = 100

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Proportion:
    """``right`` of ``count`` records, with a 95% Wilson interval.

    Example:
        >>> share = Proportion(right=92, count=100)
        >>> share.value, [round(x, 3) for x in share.interval]
        (0.92, [0.85, 0.959])
    """

    right: int
    count: int

    @property
    def value(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson: (s + z^2/2 -+ z sqrt(s (n-s)/n + z^2/4)) / (n + z^2), s right of n."""
        n, s = self.count, self.right
        z = NormalDist().inv_cdf((1 + LEVEL) / 2)
        half = z * math.sqrt((s * (n - s) / n if n else 0) + z * z / 4)
        middle = s + z * z / 2
        return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval), "count": self.count}


@dataclass(frozen=True)
class Scores:
    """The four metrics of one set of records."""

    accuracy: Proportion
    balanced_accuracy: float
    auc: float
    calibration_error: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy.to_dict()}


@dataclass(frozen=True)
class Metrics:
    """All metrics of one model on one set."""

    scores: Scores  # of all records
    classes: dict[str, Proportion]  # class name -> how many of its records were recognised
    confusion: NDArray[np.int64]  # [K, K], rows the label, columns the prediction
    groups: dict[str, dict[str, Scores]]  # column -> group -> its scores

    def worst(self, column: str) -> str:
        """Return the group with the lowest accuracy; of two, the larger."""
        groups = self.groups[column]
        return min(groups, key=lambda g: (groups[g].accuracy.value, -groups[g].accuracy.count))

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.scores.to_dict(),
            "interval": f"{LEVEL:.0%} Wilson, records independent",
            "classes": {name: share.to_dict() for name, share in self.classes.items()},
            "confusion": self.confusion.tolist(),
            "groups": {
                column: {
                    "worst": self.worst(column),
                    "groups": {name: scores.to_dict() for name, scores in groups.items()},
                }
                for column, groups in self.groups.items()
            },
        }


def evaluate(
    probabilities: NDArray[Any],
    labels: NDArray[Any],
    class_names: Sequence[str],
    groups: Mapping[str, NDArray[Any]] | None = None,
) -> Metrics:
    """Compute every metric of the module's table.

    Args:
        probabilities: [N, K], each row summing to 1.
        labels: [N] in 0..K-1.
        class_names: K of them.
        groups: columns [N] by name; each column's values are sub-groups.

    Example:
        >>> p = np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
        >>> result = evaluate(p, np.array([0, 1, 1]), ["ill", "well"], {"sex": np.array([*"fmf"])})
        >>> result.scores.accuracy.right, result.scores.auc, result.worst("sex")
        (2, 1.0, 'm')
    """
    p, y = _checked(probabilities, labels, len(class_names))
    confusion = confusion_matrix(y, p.argmax(axis=1), len(class_names))
    classes = {
        name: Proportion(int(confusion[k, k]), int(confusion[k].sum()))
        for k, name in enumerate(class_names)
    }
    return Metrics(
        scores=_scores(p, y),
        classes=classes,
        confusion=confusion,
        groups={name: _by_group(name, p, y, values) for name, values in (groups or {}).items()},
    )


def confusion_matrix(labels: Labels, predicted: Labels, classes: int) -> NDArray[np.int64]:
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def calibration_error(confidence: Floats, correct: NDArray[np.bool_]) -> float:
    """Compute the expected calibration error: bins ((b-1)/15, b/15] of the winning probability.

    Example:
        >>> error = calibration_error(np.array([0.8, 0.8]), np.array([True, False]))
        >>> round(error, 6)  # |0.5 - 0.8|
        0.3
    """
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, weights=correct - confidence, minlength=BINS)  # |B_b| (acc - conf)
    return float(np.abs(gaps).sum() / len(confidence))


def _scores(p: Floats, y: Labels) -> Scores:
    predicted = p.argmax(axis=1)
    correct = predicted == y
    confusion = confusion_matrix(y, predicted, p.shape[1])
    there = confusion.sum(axis=1) > 0
    recall = confusion.diagonal()[there] / confusion.sum(axis=1)[there]
    return Scores(
        accuracy=Proportion(int(correct.sum()), len(y)),
        balanced_accuracy=float(recall.mean()),
        auc=_auc(p, y),
        calibration_error=calibration_error(p.max(axis=1), correct),
    )


def _auc(p: Floats, y: Labels) -> float:
    """Average one against the rest over the classes that occur; NaN if only one class occurs."""
    from sklearn.metrics import roc_auc_score

    present = np.unique(y)
    if len(present) < 2:
        return math.nan
    if p.shape[1] == 2:
        return float(roc_auc_score(y, p[:, 1]))
    return float(np.mean([roc_auc_score(y == k, p[:, k]) for k in present]))


def _by_group(column: str, p: Floats, y: Labels, values: NDArray[Any]) -> dict[str, Scores]:
    groups = by_value(column, values, len(y))
    return {name: _scores(p[mine], y[mine]) for name, mine in groups.items()}


def by_value(column: str, values: NDArray[Any], records: int) -> dict[str, NDArray[np.bool_]]:
    """Return which records have each value of a column."""
    if len(values) != records:
        raise ArgumentError(f"column {column!r} has {len(values)} values for {records} records")
    names, group = np.unique(values, return_inverse=True)
    if len(names) > _MOST_GROUPS:
        raise ArgumentError(
            f"column {column!r} has {len(names)} different values, too many to compare as groups: "
            f"put them into at most {_MOST_GROUPS} bins first"
        )
    return {str(name): group == k for k, name in enumerate(names)}


def _checked(p: NDArray[Any], y: NDArray[Any], classes: int) -> tuple[Floats, Labels]:
    p, y = np.asarray(p, np.float64), np.asarray(y)
    if p.ndim != 2 or p.shape[1] != classes or y.shape != p.shape[:1]:
        raise ArgumentError(
            f"probabilities must be [N, {classes}] with one label per row, got {list(p.shape)} and "
            f"{list(y.shape)}"
        )
    if not len(y):
        raise ArgumentError("there are no records to evaluate")
    if not np.isfinite(p).all():
        raise ArgumentError(
            "the model predicts numbers that are not finite: its training has diverged, so lower "
            "the learning rate"
        )
    if y.min() < 0 or y.max() >= classes:
        raise ArgumentError(f"labels must lie in 0..{classes - 1}, got {y.min()}..{y.max()}")
    return p, y.astype(np.int64)
