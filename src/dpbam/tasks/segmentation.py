"""One class per pixel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dpbam.tasks.base import Floats, Row, Task, Words, by_name, mean, ratio
from dpbam.tasks.scores import Compared, Figures, Scores, Subset


class Segmentation(Task):
    """One class per pixel; the first is the background.

    Example:
        >>> task = Segmentation(["back", "disc"])
        >>> scores = torch.tensor([[[[0., 0.], [0., 0.]], [[1., 1.], [-1., -1.]]]])  # [1, 2, 2, 2]
        >>> summaries, _ = task.summary(scores, torch.tensor([[[1, 0], [0, 0]]], dtype=torch.uint8))
        >>> {k: round(v, 3) for k, v in task.scores(summaries.numpy(), np.zeros(1)).items()}
        {'dice': 0.667, 'iou': 0.5}
    """

    name = layout = "segmentation"
    metric = "dice"
    targets_are_images = True
    words = Words(
        gives="one of these classes for every pixel: {names}",
        outputs="One output per class and pixel; the class with the largest is predicted.",
        pipeline_tag="image-segmentation",
        values="shares",
        column="share({})",
        counted="pixels",
    )
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

    def scores(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        dice, iou = self._overlaps(summaries)
        return {"dice": mean(dice[1:]), "iou": mean(iou[1:])}

    def compared(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare Dice with that of one class everywhere."""
        masks = summaries.sum(axis=(0, 2))  # pixels of each class
        dice = 2 * masks / (masks + masks.sum())  # of a class that is predicted everywhere
        constant = float(dice[1:].max() / max(1, (masks[1:] > 0).sum()))
        return {"dice": Compared(self.main_score(summaries, targets), constant, 0.0)}

    def by_class(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Subset]:
        dice, iou = self._overlaps(summaries)
        counts = summaries.sum(axis=(0, 2))
        return {
            name: Subset({"value": dice[k], "iou": iou[k]}, int(counts[k]))
            for k, name in enumerate(self.class_names)
        }

    def _overlaps(self, summaries: Floats) -> tuple[list[float], list[float]]:
        """Return Dice, 2 |A and B| / (|A| + |B|), and |A and B| / |A or B| of each class."""
        pixels = summaries.sum(axis=0)
        both, sizes = pixels.diagonal(), pixels.sum(axis=1) + pixels.sum(axis=0)
        dice = [ratio(2 * b, size) for b, size in zip(both, sizes, strict=True)]
        return dice, [ratio(b, size - b) for b, size in zip(both, sizes, strict=True)]

    def output_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (len(self.class_names), height, width)

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        return torch.zeros(count, height, width, dtype=torch.uint8)

    def figures(self, summaries: Floats, targets: NDArray[Any]) -> Figures:
        """Return the confusion of pixels [K, K]: rows the mask, columns the prediction."""
        return {"confusion": summaries.sum(axis=0).astype(int).tolist()}

    def row(self, prediction: NDArray[Any], thresholds: Mapping[str, float]) -> Row:
        names = self.class_names
        shares = np.bincount(prediction.reshape(-1), minlength=len(names)) / prediction.size
        seen = [name for name, share in zip(names, shares, strict=True) if share > 0]
        return Row("|".join(seen), by_name(names, shares), prediction)
