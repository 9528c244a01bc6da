"""Per-unit gradients of one parameter: the interface, and the plain way of holding them.

:class:`Formed` holds [U, *shape]: small parameters, and layers where forming is cheapest.
:class:`dpbam.engines.unformed.Unformed` holds the pairs that a matrix's gradients are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpbam.trees import Params


class Store(Protocol):
    """The per-unit gradients of some parameters (one clipping group's, or one parameter's)."""

    name: str

    def squared_norm(self) -> Tensor:
        """[U]."""

    def detached(self) -> Store:
        """Without the graph."""

    def weighted_sum(self, factors: Tensor) -> Params:
        """sum_u factors[u] d_u; a factor of 0 removes the unit."""

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """[U]: <d_u, vector>."""


@dataclass
class Formed:
    """[U, *shape], one parameter."""

    name: str
    values: Tensor

    def detached(self) -> Formed:
        """Without the graph."""
        return Formed(self.name, self.values.detach())

    def squared_norm(self) -> Tensor:
        """|d_u|^2."""
        return self.values.reshape(self.values.shape[0], -1).square().sum(1)

    def weighted_sum(self, factors: Tensor) -> Params:
        """Factors times values."""
        d, kept = self.values, factors != 0
        if not bool(kept.all()):
            d, factors = d[kept], factors[kept]
        return {self.name: torch.tensordot(factors.to(d.dtype), d, dims=1)}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Values times vector."""
        v = vector[self.name].to(self.values)
        return self.values.reshape(self.values.shape[0], -1) @ v.flatten()
