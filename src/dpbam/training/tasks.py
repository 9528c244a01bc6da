"""What a model is trained for: the loss of a record, metrics, predictions.

Outputs z of the model, K classes or findings, y the target of a record, w class weights, gamma of
the focal loss (Lin et al. 2017):

=============  ==============================================  ====================================
task           loss of one record                              metrics, the main one first
=============  ==============================================  ====================================
single-label   w_y (1 - p_y)^gamma (-log p_y), p = softmax z   accuracy
multi-label    mean over the findings of the same, p =         macro AUC, micro AUC, macro and micro
               sigmoid z; w applies to records that have it    average precision
regression     (z - s(y))^2, s maps a public range to [-1, 1]  R2, MAE, Spearman's correlation
segmentation   mean over the pixels of single-label's          Dice, IoU: means over the classes
                                                               except the first, the background
=============  ==============================================  ====================================

A loss depends on one record alone and is computed before the clip, so weights and focal loss change
no sensitivity. Dice and IoU of a class are taken over all pixels of a set together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbam import _validate
from dpbam._names import did_you_mean
from dpbam.errors import ArgumentError
from dpbam.training.events import Compared

Scores = dict[str, float]
Floats = NDArray[np.float64]


class Task(nn.Module, ABC):
    """One task; calling it returns the loss of each record, [N].

    Args:
        class_names: of the outputs.
        class_weights: a public weight per class name; others weigh 1.
        focal: gamma; 0 is cross-entropy.

    Attributes:
        weights: [K], of the classes. A buffer: part of a training's state.
    """

    name: ClassVar[str]
    metric: ClassVar[str]  # the first of the scores: more is better
    weights: Tensor

    def __init__(
        self,
        class_names: Sequence[str],
        *,
        class_weights: Mapping[str, float] | None = None,
        focal: float = 0.0,
    ) -> None:
        super().__init__()
        self.class_names, given = tuple(class_names), class_weights or {}
        self.focal = _validate.non_negative("focal", focal)
        for name, weight in given.items():
            if name not in self.class_names:
                hint = did_you_mean(name, self.class_names)
                raise ArgumentError(f"class_weights names {name!r}, which is no class: {hint}")
            _validate.positive(f"the weight of class {name!r}", weight)
        weights = [float(given.get(name, 1.0)) for name in self.class_names]
        self.register_buffer("weights", torch.tensor(weights))

    @abstractmethod
    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each record: [N, ...], [N, ...] -> [N]."""

    @abstractmethod
    def predictions(self, output: Tensor) -> Tensor:
        """Return what a user is given of the outputs: probabilities, values or masks."""

    def summary(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the metrics need of each record, small enough to keep for a whole set."""
        return output, targets

    @abstractmethod
    def scores(self, kept: Floats, targets: NDArray[Any]) -> Scores:
        """Return the metrics of records, from what :meth:`summary` kept of them."""

    def main_score(self, kept: Floats, targets: NDArray[Any]) -> float:
        """Return the main metric alone, which a bootstrap computes many times."""
        return self.scores(kept, targets)[self.metric]

    @abstractmethod
    def compared(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Return the main metric, and others that show it, next to those of the best constant."""

    @abstractmethod
    def by_class(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Scores]:
        """Return the main metric of each class as ``value``, and others."""

    def check_output(self, output: Tensor, images: Tensor) -> None:
        expected = (len(images), *self.output_shape(images.shape[-2], images.shape[-1]))
        if tuple(output.shape) != expected:
            raise ArgumentError(
                f"{self.name} needs a model with outputs {list(expected[1:])} per record, this one "
                f"gives {list(output.shape[1:])}: {self._hint}"
            )

    _hint: ClassVar[str] = "unet is for segmentation, choose another"

    def output_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (len(self.class_names),)

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        """Return targets of ``count`` blank records, to measure memory with."""
        return torch.zeros(count, dtype=torch.int64)

    def _weighted(self, nll: Tensor, weights: Tensor) -> Tensor:
        """w (1 - p)^gamma (-log p), from -log p."""
        if self.focal:
            wrong = (-torch.expm1(-nll)).clamp(min=1e-7)  # 1 - p; at 0 powers have no derivative
            nll = wrong**self.focal * nll
        return weights * nll


class SingleLabel(Task):
    """One class per record.

    Example:
        >>> task = SingleLabel(["ill", "well"], class_weights={"ill": 4.0})
        >>> task(torch.zeros(2, 2), torch.tensor([0, 1])) / math.log(2)
        tensor([4., 1.])
    """

    name, metric = "single-label", "accuracy"

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        nll = F.cross_entropy(output, targets, reduction="none")
        return self._weighted(nll, self.weights[targets])

    def predictions(self, output: Tensor) -> Tensor:
        return output.double().softmax(dim=1)

    def scores(self, kept: Floats, targets: NDArray[Any]) -> Scores:
        return {"accuracy": float((kept.argmax(1) == targets).mean())}

    def compared(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare accuracy, and balanced accuracy: the mean share recognised of a class.

        Example: with nine of ten in one class, always naming it has an accuracy of 90%.
            >>> y = np.array([0] * 9 + [1])
            >>> found = SingleLabel(["well", "ill"]).compared(np.eye(2)[y * 0], y)
            >>> [(c.own, c.constant, c.better) for c in found.values()]
            [(0.9, 0.9, False), (0.5, 0.5, False)]
        """
        right, counts = kept.argmax(1) == targets, np.bincount(targets)
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

    def by_class(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Scores]:
        right, count = kept.argmax(1) == targets, np.bincount(targets, minlength=kept.shape[1])
        return {
            name: {"value": _ratio(right[targets == k].sum(), count[k]), "count": int(count[k])}
            for k, name in enumerate(self.class_names)
        }


class MultiLabel(Task):
    """Any subset of findings per record.

    Example:
        >>> task = MultiLabel(["oedema", "effusion"])
        >>> y = np.array([[1, 0], [0, 1], [0, 0]])
        >>> {k: round(v, 2) for k, v in task.scores(np.array([[2., 1], [1, 0], [0, 2]]), y).items()}
        {'auc': 0.5, 'micro_auc': 0.5, 'average_precision': 0.67, 'micro_average_precision': 0.42}
    """

    name, metric = "multi-label", "auc"

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        y = targets.to(output.dtype)
        nll = F.binary_cross_entropy_with_logits(output, y, reduction="none")
        return self._weighted(nll, 1 + y * (self.weights - 1)).mean(1)

    def predictions(self, output: Tensor) -> Tensor:
        return output.double().sigmoid()

    def scores(self, kept: Floats, targets: NDArray[Any]) -> Scores:
        each = list(self.by_class(kept, targets).values())
        return {
            "auc": _mean([finding["value"] for finding in each]),
            "micro_auc": _auc(kept.reshape(-1), targets.reshape(-1)),
            "average_precision": _mean([finding["average_precision"] for finding in each]),
            "micro_average_precision": _precision(kept.reshape(-1), targets.reshape(-1)),
        }

    def main_score(self, kept: Floats, targets: NDArray[Any]) -> float:
        return _mean([_auc(kept[:, k], targets[:, k]) for k in range(kept.shape[1])])

    def compared(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare the mean AUC with 1/2; its chance is that of the rank sum test, per finding."""
        n, ill = len(targets), targets.sum(axis=0).astype(np.float64)
        seen = ill[(ill > 0) & (ill < n)]
        chance = np.sqrt((n + 1) / (12 * seen * (n - seen))).mean() if len(seen) else 0.0
        return {"auc": Compared(self.main_score(kept, targets), 0.5, float(chance))}

    def by_class(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Scores]:
        return {
            name: {
                "value": _auc(kept[:, k], targets[:, k]),
                "average_precision": _precision(kept[:, k], targets[:, k]),
                "count": int(targets[:, k].sum()),
            }
            for k, name in enumerate(self.class_names)
        }

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        return torch.zeros(count, len(self.class_names), dtype=torch.uint8)


class Regression(Task):
    """One value per record, within a public range.

    Args:
        class_names: the name of the value.
        target_range: (low, high), which must not have been computed from the data.

    Example:
        >>> task = Regression(["age"], target_range=(0.0, 100.0))
        >>> task(torch.tensor([[0.0], [1.0]]), torch.tensor([50.0, 75.0]))
        tensor([0.0000, 0.2500])
        >>> task.predictions(torch.tensor([[0.5]]))
        tensor([[75.]], dtype=torch.float64)
    """

    name, metric = "regression", "r2"

    def __init__(self, class_names: Sequence[str], *, target_range: tuple[float, float]) -> None:
        super().__init__(class_names)
        self.low, self.high = (_validate.number("target_range", edge) for edge in target_range)
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ArgumentError(f"target_range must be low:high, got {self.low:g}:{self.high:g}")

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        scaled = 2 * (targets.to(output.dtype) - self.low) / (self.high - self.low) - 1
        return (output[:, 0] - scaled).square()

    def predictions(self, output: Tensor) -> Tensor:
        return self.low + (output.double() + 1) / 2 * (self.high - self.low)

    def summary(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(output), targets

    def scores(self, kept: Floats, targets: NDArray[Any]) -> Scores:
        from scipy.stats import spearmanr

        value, y = kept[:, 0], targets.astype(np.float64)
        spread = float(((y - y.mean()) ** 2).sum())
        constant = len(np.unique(value)) < 2 or len(np.unique(y)) < 2
        return {
            "r2": 1 - float(((value - y) ** 2).sum()) / spread if spread else math.nan,
            "mae": float(np.abs(value - y).mean()),
            "spearman": math.nan if constant else float(spearmanr(value, y).statistic),
        }

    def compared(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare R2 with 0, that of the mean; by chance it is of the order of 1 / n."""
        return {"r2": Compared(self.main_score(kept, targets), 0.0, 1 / len(targets))}

    def by_class(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Scores]:
        return {}

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        return torch.full((count,), self.low)


class Segmentation(Task):
    """One class per pixel; the first is the background.

    Example:
        >>> task = Segmentation(["back", "disc"])
        >>> scores = torch.tensor([[[[0., 0.], [0., 0.]], [[1., 1.], [-1., -1.]]]])  # [1, 2, 2, 2]
        >>> kept, _ = task.summary(scores, torch.tensor([[[1, 0], [0, 0]]], dtype=torch.uint8))
        >>> {k: round(v, 3) for k, v in task.scores(kept.numpy(), np.zeros(1)).items()}
        {'dice': 0.667, 'iou': 0.5}
    """

    name, metric = "segmentation", "dice"
    _hint = "pass --model unet"

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        y = targets.long()
        nll = F.cross_entropy(output, y, reduction="none")  # [N, H, W]
        return self._weighted(nll, self.weights[y]).flatten(1).mean(1)

    def predictions(self, output: Tensor) -> Tensor:
        return output.argmax(dim=1).to(torch.uint8)

    def summary(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each record's pixels by mask and prediction: [N, K, K]."""
        k = len(self.class_names)
        cell = (targets.long() * k + output.argmax(dim=1)).flatten(1)
        counts = torch.stack([torch.bincount(row, minlength=k * k) for row in cell])
        return counts.reshape(-1, k, k), torch.zeros(len(targets))

    def scores(self, kept: Floats, targets: NDArray[Any]) -> Scores:
        each = list(self.by_class(kept, targets).values())[1:]
        return {"dice": _mean([c["value"] for c in each]), "iou": _mean([c["iou"] for c in each])}

    def compared(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare Dice with that of one class everywhere."""
        masks = kept.sum(axis=(0, 2))  # pixels of each class
        dice = 2 * masks / (masks + masks.sum())  # of a class that is predicted everywhere
        constant = float(dice[1:].max() / max(1, (masks[1:] > 0).sum()))
        return {"dice": Compared(self.main_score(kept, targets), constant, 0.0)}

    def by_class(self, kept: Floats, targets: NDArray[Any]) -> dict[str, Scores]:
        pixels = kept.sum(axis=0)
        both, masks, found = pixels.diagonal(), pixels.sum(axis=1), pixels.sum(axis=0)
        return {
            name: {
                "value": _ratio(2 * both[k], masks[k] + found[k]),
                "iou": _ratio(both[k], masks[k] + found[k] - both[k]),
                "count": int(masks[k]),
            }
            for k, name in enumerate(self.class_names)
        }

    def output_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (len(self.class_names), height, width)

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        return torch.zeros(count, height, width, dtype=torch.uint8)


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (SingleLabel, MultiLabel, Regression, Segmentation)
}


def make_task(
    name: str,
    class_names: Sequence[str],
    *,
    class_weights: Mapping[str, float] | None = None,
    focal: float = 0.0,
    target_range: tuple[float, float] | None = None,
) -> Task:
    """Return the task called ``name``; refuse settings that it does not have."""
    if name != "regression":
        if target_range is not None:
            raise ArgumentError(f"target_range is for a regression, not for {name}: leave it out")
        return TASKS[name](class_names, class_weights=class_weights, focal=focal)
    if class_weights or focal:
        raise ArgumentError("class weights and focal loss are for classes, not for a regression")
    if target_range is None:
        raise ArgumentError(
            "a regression needs --target-range LOW:HIGH, a public fact such as 0:100 for an age: "
            "measured on the data it would be a release without noise"
        )
    return Regression(class_names, target_range=target_range)


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


def _mean(values: Sequence[float]) -> float:
    """Return the mean of those that are defined; NaN if none is."""
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def _auc(scores: Floats, labels: NDArray[Any]) -> float:
    """Return the area under the ROC curve; NaN if only one label occurs."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores)) if 0 < labels.sum() < len(labels) else math.nan


def _precision(scores: Floats, labels: NDArray[Any]) -> float:
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(labels, scores)) if labels.any() else math.nan
