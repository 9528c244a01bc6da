"""What a head is: linear scores of features, and how they become answers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpbam.errors import ArgumentError


@dataclass(frozen=True)
class LinearHead:
    """Linear scores of standardised features: scores = x W^T + b.

    Attributes:
        weight: float32 [K, D].
        bias: float32 [K].

    Example:
        >>> import torch
        >>> head = LinearHead(torch.eye(2), torch.zeros(2))
        >>> head.predict(torch.tensor([[0.2, 0.7]]))
        tensor([1])
    """

    weight: Tensor
    bias: Tensor

    def scores(self, features: Tensor) -> Tensor:
        """Return [N, K] from features [N, D]."""
        return features @ self.weight.T + self.bias

    def predict(self, features: Tensor) -> Tensor:
        """Return the class with the highest score, [N]."""
        return self.scores(features).argmax(1)


def check_rows(features: Tensor, targets: Tensor) -> None:
    """Refuse features and targets that are not one row per record each."""
    if features.ndim != 2 or len(features) != len(targets):
        raise ArgumentError(
            f"features must be [N, D] with one target per row, got {list(features.shape)} and "
            f"{len(targets)} targets"
        )
