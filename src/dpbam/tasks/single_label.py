"""One class per record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dpbam.errors import ArgumentError
from dpbam.tasks.base import Floats, Row, Task, Words, by_name, ratio
from dpbam.tasks.scores import Compared, Figures, Scores, Subset, wilson

BINS = 15  # of the calibration error


class SingleLabel(Task):
    """One class per record.

    With ``adjusted``, the loss adds ``offsets`` to the outputs, and predictions do not (logit
    adjustment, Menon et al. 2021): offsets a log pi_k for frequencies pi take the share a of their
    logarithms out of the decision.

    Attributes:
        offsets: [K], of the classes. A buffer: part of a training's state.

    Example:
        >>> task = SingleLabel(["ill", "well"], class_weights={"ill": 4.0})
        >>> task(torch.zeros(2, 2), torch.tensor([0, 1])) / math.log(2)
        tensor([4., 1.])
    """

    name = layout = "single-label"
    metric = "accuracy"
    words = Words(
        gives="one of these classes: {names}",
        outputs="One output per class; softmax makes them probabilities.",
        pipeline_tag="image-classification",
    )

    offsets: Tensor
    adjusted = False

    def __init__(self, class_names: Sequence[str], **settings: Any) -> None:
        super().__init__(class_names, **settings)
        self.register_buffer("offsets", torch.zeros(len(self.class_names)))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        if self.adjusted:
            output = output + self.offsets
        nll = F.cross_entropy(output, targets, reduction="none")
        return self._weighted(nll, self.weights[targets])

    def predictions(self, output: Tensor) -> Tensor:
        return output.double().softmax(dim=1)

    def scores(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        return {"accuracy": float((summaries.argmax(1) == targets).mean())}

    def compared(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare accuracy, and balanced accuracy: the mean share recognised of a class.

        Example: with nine of ten in one class, always naming it has an accuracy of 90%.
            >>> y = np.array([0] * 9 + [1])
            >>> compared = SingleLabel(["well", "ill"]).compared(np.eye(2)[y * 0], y)
            >>> [(c.score, c.constant, c.better) for c in compared.values()]
            [(0.9, 0.9, False), (0.5, 0.5, False)]
        """
        right, counts = summaries.argmax(1) == targets, np.bincount(targets)
        present = counts > 0
        recalls = np.bincount(targets, weights=right)[present] / counts[present]
        frequent, classes = counts.max() / counts.sum(), len(recalls)
        balanced = math.sqrt((1 - 1 / classes) / classes * (1 / counts[present]).sum()) / classes
        return {
            "accuracy": Compared(
                float(right.mean()), float(frequent),
                math.sqrt(frequent * (1 - frequent) / counts.sum()),
            ),
            "balanced_accuracy": Compared(float(recalls.mean()), 1 / classes, balanced),
        }  # fmt: skip

    def details(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        """Add balanced accuracy, AUC and the calibration error.

        The AUC of more than two classes is that of one class against the rest, averaged over the
        classes that occur.
        """
        from scipy.special import softmax
        from sklearn.metrics import recall_score, roc_auc_score

        p, present = softmax(summaries, axis=1), np.unique(targets)
        predicted, auc = p.argmax(1), math.nan
        if len(present) > 1:
            shown = [1] if p.shape[1] == 2 else present
            auc = float(np.mean([roc_auc_score(targets == k, p[:, k]) for k in shown]))
        return {
            **self.scores(summaries, targets),
            "balanced_accuracy": float(
                recall_score(targets, predicted, labels=present, average="macro")
            ),
            "auc": auc,
            "calibration_error": calibration_error(p.max(axis=1), predicted == targets),
        }

    def interval(self, summaries: Floats, targets: NDArray[Any]) -> tuple[float, float]:
        """Return Wilson's interval."""
        return wilson(int((summaries.argmax(1) == targets).sum()), len(targets))

    def of_group(self, summaries: Floats, targets: NDArray[Any]) -> Subset:
        interval = self.interval(summaries, targets)
        return replace(super().of_group(summaries, targets), interval=interval)

    def by_class(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Subset]:
        right, count = (
            summaries.argmax(1) == targets,
            np.bincount(targets, minlength=summaries.shape[1]),
        )
        classes: dict[str, Subset] = {}
        for k, name in enumerate(self.class_names):
            recognised, records = int(right[targets == k].sum()), int(count[k])
            value, interval = ratio(recognised, records), wilson(recognised, records)
            classes[name] = Subset({"value": value}, records, interval)
        return classes

    def figures(self, summaries: Floats, targets: NDArray[Any]) -> Figures:
        """Return the confusion [K, K]: rows the label, columns the prediction."""
        from sklearn.metrics import confusion_matrix

        labels = range(len(self.class_names))
        return {"confusion": confusion_matrix(targets, summaries.argmax(1), labels=labels).tolist()}

    def row(self, prediction: NDArray[Any], thresholds: Mapping[str, float]) -> Row:
        label = self.class_names[int(prediction.argmax())]
        return Row(label, by_name(self.class_names, prediction))

    def numbered(self, class_names: Sequence[str]) -> NDArray[np.int64]:
        """Match classes by name, so that a set that lacks some is evaluated too."""
        number = {name: k for k, name in enumerate(self.class_names)}
        unknown = [name for name in class_names if name not in number]
        if unknown:
            raise ArgumentError(
                f"has the class {unknown[0]!r}, which the model does not know: it knows "
                f"{', '.join(self.class_names[:10])}{', ...' if len(number) > 10 else ''}"
            )
        return np.array([number[name] for name in class_names])


def calibration_error(confidence: Floats, correct: NDArray[np.bool_]) -> float:
    """Compute the expected calibration error: bins ((b-1)/15, b/15] of the winning probability.

    ECE = sum_b |B_b| / N |accuracy(B_b) - confidence(B_b)|.

    Example:
        >>> error = calibration_error(np.array([0.8, 0.8]), np.array([True, False]))
        >>> round(error, 6)  # |0.5 - 0.8|
        0.3
    """
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, weights=correct - confidence, minlength=BINS)  # |B_b| (acc - conf)
    return float(np.abs(gaps).sum() / len(confidence))
