"""Any subset of findings per record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dpbam.errors import ArgumentError
from dpbam.tasks.base import Floats, Row, Task, Words, by_name, mean, ratio
from dpbam.tasks.scores import Compared, Figures, Scores, Subset


class MultiLabel(Task):
    """Any subset of findings per record.

    Example:
        >>> task = MultiLabel(["oedema", "effusion"])
        >>> y = np.array([[1, 0], [0, 1], [0, 0]])
        >>> {k: round(v, 2) for k, v in task.scores(np.array([[2., 1], [1, 0], [0, 2]]), y).items()}
        {'auc': 0.5, 'micro_auc': 0.5, 'average_precision': 0.67, 'micro_average_precision': 0.42}
    """

    name = layout = "multi-label"
    metric = "auc"
    has_thresholds = several_labels = True
    words = Words(
        gives="which of these findings it shows: {names}",
        outputs="One output per finding; the logistic function makes them probabilities.",
        pipeline_tag="image-classification",
    )

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        y = targets.to(output.dtype)
        nll = F.binary_cross_entropy_with_logits(output, y, reduction="none")
        return self._weighted(nll, 1 + y * (self.weights - 1)).mean(1)

    def predictions(self, output: Tensor) -> Tensor:
        return output.double().sigmoid()

    def scores(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        findings = range(summaries.shape[1])
        precisions = [_precision(summaries[:, k], targets[:, k]) for k in findings]
        return {
            "auc": self.main_score(summaries, targets),
            "micro_auc": _auc(summaries.reshape(-1), targets.reshape(-1)),
            "average_precision": mean(precisions),
            "micro_average_precision": _precision(summaries.reshape(-1), targets.reshape(-1)),
        }

    def main_score(self, summaries: Floats, targets: NDArray[Any]) -> float:
        return mean([_auc(summaries[:, k], targets[:, k]) for k in range(summaries.shape[1])])

    def compared(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare the mean AUC with 1/2; its chance is that of the rank sum test, per finding."""
        n, ill = len(targets), targets.sum(axis=0).astype(np.float64)
        seen = ill[(ill > 0) & (ill < n)]
        chance = np.sqrt((n + 1) / (12 * seen * (n - seen))).mean() if len(seen) else 0.0
        return {"auc": Compared(self.main_score(summaries, targets), 0.5, float(chance))}

    def by_class(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Subset]:
        return {
            name: Subset(
                {
                    "value": _auc(summaries[:, k], targets[:, k]),
                    "average_precision": _precision(summaries[:, k], targets[:, k]),
                },
                int(targets[:, k].sum()),
            )
            for k, name in enumerate(self.class_names)
        }

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        return torch.zeros(count, len(self.class_names), dtype=torch.uint8)

    def at_thresholds(
        self, summaries: Floats, targets: NDArray[Any], thresholds: Mapping[str, float]
    ) -> dict[str, Scores]:
        """Return sensitivity and specificity where a finding is predicted from a probability on.

        It is 0.5, the user's, or the one of the highest F1 on a set that is declared public. Chosen
        on others, it would be a release.
        """
        scores = {}
        for k, name in enumerate(self.class_names):
            threshold, true = thresholds.get(name, 0.5), targets[:, k] == 1
            said = _sigmoid(summaries[:, k]) >= threshold
            scores[name] = {
                "threshold": threshold,
                "sensitivity": ratio(said[true].sum(), true.sum()),
                "specificity": ratio((~said[~true]).sum(), (~true).sum()),
            }
        return scores

    def best_thresholds(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, float]:
        """Return the probability of each finding at which F1 = 2 TP / (2 TP + FP + FN) is best."""
        from sklearn.metrics import precision_recall_curve

        best = {}
        for k, name in enumerate(self.class_names):
            if not targets[:, k].any():
                raise ArgumentError(
                    f"no record of the public set has {name!r}: it gives no threshold"
                )
            precision, recall, at = precision_recall_curve(targets[:, k], _sigmoid(summaries[:, k]))
            f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
            best[name] = float(at[int(f1[:-1].argmax())])
        return best

    def figures(self, summaries: Floats, targets: NDArray[Any]) -> Figures:
        """Return the ROC curve of each finding, of at most a hundred points."""
        return {
            "roc": {
                name: _roc(summaries[:, k], targets[:, k])
                for k, name in enumerate(self.class_names)
            }
        }

    def row(self, prediction: NDArray[Any], thresholds: Mapping[str, float]) -> Row:
        values = by_name(self.class_names, prediction)
        return Row("|".join(n for n, p in values.items() if p >= thresholds.get(n, 0.5)), values)


def _roc(scores: Floats, labels: NDArray[Any]) -> list[list[float]]:
    """Return points (false positive rate, true positive rate)."""
    from sklearn.metrics import roc_curve

    if not 0 < labels.sum() < len(labels):
        return []
    false, true, _ = roc_curve(labels, scores)
    few = np.unique(np.linspace(0, len(false) - 1, min(len(false), 100)).round().astype(int))
    return [[float(false[k]), float(true[k])] for k in few]


def _sigmoid(logits: Floats) -> Floats:
    from scipy.special import expit

    return np.asarray(expit(logits))


def _auc(scores: Floats, labels: NDArray[Any]) -> float:
    """Return the area under the ROC curve; NaN if only one label occurs."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores)) if 0 < labels.sum() < len(labels) else math.nan


def _precision(scores: Floats, labels: NDArray[Any]) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(labels, scores)) if labels.any() else math.nan
