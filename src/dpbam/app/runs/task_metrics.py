"""How good a model is at multi-label classification, regression or segmentation.

The scores are the task's (:mod:`dpbam.training.tasks`), of all records, by class and by sub-group.
The interval of the main one is the 95% percentile bootstrap over records: 200 resamples, drawn by a
fixed seed. It takes the records as independent: with several per patient it is too narrow.

A finding is predicted where its probability reaches a threshold: 0.5, the user's, or the one of
the highest F1 on a set that is declared public. Chosen on others, it would be a release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam._names import did_you_mean
from dpbam.app.runs.metrics import LEVEL, by_value
from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from dpbam.training.tasks import Scores, Task

_RESAMPLES = 200
_POINTS = 300  # of a figure
Floats = NDArray[np.float64]
Thresholds = Mapping[str, float]


@dataclass(frozen=True)
class TaskMetrics:
    """All metrics of one model on one set.

    Attributes:
        metric: the main one's name.
        scores: of all records.
        interval: of the main one.
        trivial: the main one of the best constant prediction.
        count: records.
        classes: class or finding -> its ``value`` of the main metric, and others.
        groups: column -> value -> scores.
        figures: what the report draws: ``confusion``, ``roc`` or ``scatter``.
    """

    task: str
    metric: str
    scores: Scores
    interval: tuple[float, float]
    trivial: float
    count: int
    classes: dict[str, Scores]
    groups: dict[str, dict[str, Scores]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def worst(self, column: str) -> str:
        """Return the sub-group with the lowest main metric."""
        values = {name: scores[self.metric] for name, scores in self.groups[column].items()}
        return min(values, key=lambda name: math.inf if math.isnan(values[name]) else values[name])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        shared = {
            k: getattr(self, k) for k in ("task", "metric", "scores", "trivial", "count", "classes")
        }
        groups = {
            column: {"worst": self.worst(column), "groups": found}
            for column, found in self.groups.items()
        }
        return {**shared, "interval": list(self.interval), "groups": groups, **self.figures}


def evaluate_task(
    task: Task,
    kept: Floats,
    targets: NDArray[Any],
    groups: Mapping[str, NDArray[Any]] | None = None,
    thresholds: Thresholds | None = None,
) -> TaskMetrics:
    """Compute all metrics.

    Args:
        task: whose metrics.
        kept: what the task's ``summary`` kept of each record.
        targets: of each record.
        groups: columns [N] by name; each column's values are sub-groups.
        thresholds: of findings; others have 0.5.
    """
    if not np.isfinite(kept).all():
        raise ArgumentError(
            "the model predicts numbers that are not finite: its training has diverged, so lower "
            "the learning rate"
        )
    classes = task.by_class(kept, targets)
    if task.name == "multi-label":
        at = _at_thresholds(task, kept, targets, thresholds or {})
        classes = {name: {**found, **at[name]} for name, found in classes.items()}
    return TaskMetrics(
        task=task.name,
        metric=task.metric,
        scores=task.scores(kept, targets),
        interval=_bootstrap(task, kept, targets),
        trivial=task.compared(kept, targets)[task.metric].constant,
        count=len(targets),
        classes=classes,
        groups={
            column: {
                name: {**task.scores(kept[mine], targets[mine]), "count": int(mine.sum())}
                for name, mine in by_value(column, values, len(targets)).items()
            }
            for column, values in (groups or {}).items()
        },
        figures=_figures(task, kept, targets),
    )


def best_thresholds(task: Task, kept: Floats, targets: NDArray[Any]) -> dict[str, float]:
    """Return the probability of each finding at which F1 = 2 TP / (2 TP + FP + FN) is highest."""
    from sklearn.metrics import precision_recall_curve

    found = {}
    for k, name in enumerate(task.class_names):
        if not targets[:, k].any():
            raise ArgumentError(f"no record of the public set has {name!r}: it gives no threshold")
        precision, recall, at = precision_recall_curve(targets[:, k], _sigmoid(kept[:, k]))
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        found[name] = float(at[int(f1[:-1].argmax())])
    return found


def parse_thresholds(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Read ``0.3`` (of all findings) and ``oedema=0.3``.

    Example:
        >>> parse_thresholds(["0.3", "effusion=0.6"], ["oedema", "effusion"])
        {'oedema': 0.3, 'effusion': 0.6}
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if name and name not in names:
            hint = did_you_mean(name, names)
            raise ArgumentError(f"--threshold names {name!r}, which is no finding: {hint}")
        try:
            threshold = float(value)
        except ValueError:
            threshold = math.nan
        if not 0 < threshold < 1:
            raise ArgumentError(f"--threshold must be like 0.3 or NAME=0.3, got {text!r}")
        found |= {name: threshold} if name else dict.fromkeys(names, threshold)
    return found


def _at_thresholds(
    task: Task, kept: Floats, targets: NDArray[Any], thresholds: Thresholds
) -> dict[str, Scores]:
    found = {}
    for k, name in enumerate(task.class_names):
        threshold = thresholds.get(name, 0.5)
        said, true = _sigmoid(kept[:, k]) >= threshold, targets[:, k] == 1
        found[name] = {
            "threshold": threshold,
            "sensitivity": float(said[true].mean()) if true.any() else math.nan,
            "specificity": float((~said[~true]).mean()) if not true.all() else math.nan,
        }
    return found


def _bootstrap(task: Task, kept: Floats, targets: NDArray[Any]) -> tuple[float, float]:
    rng, n = np.random.default_rng(0), len(targets)
    drawn = (rng.integers(0, n, n) for _ in range(_RESAMPLES))
    values = [task.main_score(kept[rows], targets[rows]) for rows in drawn]
    defined = [value for value in values if not math.isnan(value)]
    if not defined:
        return math.nan, math.nan
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _figures(task: Task, kept: Floats, targets: NDArray[Any]) -> dict[str, Any]:
    if task.name == "segmentation":
        return {"confusion": kept.sum(axis=0).astype(int).tolist()}
    if task.name == "regression":
        some = np.linspace(0, len(targets) - 1, min(len(targets), _POINTS)).round().astype(int)
        pairs = zip(targets[some].tolist(), kept[some, 0].tolist(), strict=True)
        return {"value": task.class_names[0], "scatter": [list(pair) for pair in pairs]}
    return {"roc": {name: _roc(kept[:, k], targets[:, k])
                    for k, name in enumerate(task.class_names)}}  # fmt: skip


def _roc(scores: Floats, labels: NDArray[Any]) -> list[list[float]]:
    """Return at most some hundred points (false positive rate, true positive rate)."""
    from sklearn.metrics import roc_curve

    if not 0 < labels.sum() < len(labels):
        return []
    false, true, _ = roc_curve(labels, scores)
    some = np.unique(np.linspace(0, len(false) - 1, min(len(false), 100)).round().astype(int))
    return [[float(false[k]), float(true[k])] for k in some]


def _sigmoid(logits: Floats) -> Floats:
    from scipy.special import expit

    return np.asarray(expit(logits))
