"""A layer whose weight is centred at each use: D = V - mean(V) by output channel.

The gradient in V is the centred one, G' = G - mean(G), and so is the gradient of everything that
depends on V through D. Centring is an orthogonal projection P, so |G'|^2 = <a', a'> <b, b> with
a' = P a, and <a'_t, c'_t'> = <a_t, c_t'> - m mean(a_t) mean(c_t') with m the fan-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpbam.engines.fused.layers.base import Layer


@dataclass(frozen=True)
class Centred:
    """``layer`` with G' in the place of G; all other questions go to ``layer``."""

    layer: Layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    @property
    def fan_in(self) -> int:
        """m."""
        size = 1
        for n in self.layer.shape[1:]:
            size *= n
        return size

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """[U, T, T]: <a'_t, c'_t'>."""
        left = self.layer.mean(a)
        right = left if c is a else self.layer.mean(c)
        gram = self.layer.gram(a, c)
        return gram.baddbmm_(left.unsqueeze(2), right.unsqueeze(1), alpha=-self.fan_in)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in c of sum weights * gram(c, a)."""
        pulled = (weights @ self.layer.mean(a).unsqueeze(2)).squeeze(2)
        plain = self.layer.gram_back(weights, a)
        return plain - self.layer.mean_back(self.fan_in * pulled, a)

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        """[U, *shape]: G'_u."""
        return centre(self.layer.materialise(a, b))

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """f(P weight, a), so that <G'_u, V> = sum_t <b_t, f(P V, a)_t>."""
        return self.layer.apply(centre(weight.unsqueeze(0)).squeeze(0), a)

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """f(P weights_u, a_u): what rounding left of a mean would be multiplied by sum(a)."""
        return self.layer.apply_each(centre(weights), a)

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """f(P weights_u, .)^T b_u."""
        return self.layer.transpose_each(centre(weights), b, like)


def centre(g: Tensor) -> Tensor:
    """[U, o, *rest]: g less its mean over the rest, by unit and channel."""
    return g - g.mean(tuple(range(2, g.ndim)), keepdim=True)
