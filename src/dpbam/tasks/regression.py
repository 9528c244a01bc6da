"""One value per record, within a public range."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.tasks.base import Floats, Row, Task, Words, by_name
from dpbam.tasks.scores import Compared, Figures, Scores, Subset

_POINTS = 300  # of a figure


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

    name = layout = "regression"
    metric = "r2"
    has_classes = False
    words = Words(
        gives="a number, {names}, trained on values from {low:g} to {high:g}",
        outputs="The output y stands for the value {low:g} + (y + 1) / 2 * {width:g}.",
        values="values",
        column="{}",
        labelled=False,  # a value is its own label
    )

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

    def scores(self, summaries: Floats, targets: NDArray[Any]) -> Scores:
        from scipy.stats import spearmanr

        value, y = summaries[:, 0], targets.astype(np.float64)
        spread = float(((y - y.mean()) ** 2).sum())
        constant = len(np.unique(value)) < 2 or len(np.unique(y)) < 2
        return {
            "r2": 1 - float(((value - y) ** 2).sum()) / spread if spread else math.nan,
            "mae": float(np.abs(value - y).mean()),
            "spearman": math.nan if constant else float(spearmanr(value, y).statistic),
        }

    def compared(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Compared]:
        """Compare R2 with 0, that of the mean; by chance it is of the order of 1 / n."""
        return {"r2": Compared(self.main_score(summaries, targets), 0.0, 1 / len(targets))}

    def by_class(self, summaries: Floats, targets: NDArray[Any]) -> dict[str, Subset]:
        return {}

    def blank_targets(self, count: int, height: int, width: int) -> Tensor:
        return torch.full((count,), self.low)

    def figures(self, summaries: Floats, targets: NDArray[Any]) -> Figures:
        """Return true and predicted values of some records."""
        shown = np.linspace(0, len(targets) - 1, min(len(targets), _POINTS)).round().astype(int)
        pairs = zip(targets[shown].tolist(), summaries[shown, 0].tolist(), strict=True)
        return {"value": self.class_names[0], "scatter": [list(pair) for pair in pairs]}

    def row(self, prediction: NDArray[Any], thresholds: Mapping[str, float]) -> Row:
        return Row(f"{prediction[0]:g}", by_name(self.class_names, prediction))

    def numbered(self, class_names: Sequence[str]) -> None:
        """Accept any name of the value."""
