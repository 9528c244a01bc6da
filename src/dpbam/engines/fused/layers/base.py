"""Bilinear layers: what a layer's per-unit gradient is made of.

A layer y = f(W, a) that is linear in W and in a has the per-unit gradient

    G_u = sum_t b_t (x) a_t       b_t the gradient at the t-th output position, a_t what W met

summed over the T positions of all rows of unit u. In the canonical form a is [U, T, in], b is
[U, T, out], and G_u = b^T a. :class:`Layer` states the questions that
:mod:`~dpbam.engines.fused.gradients` asks; only ``materialise`` computes G_u:

=================  ========================================================  ==================
``gram``           <a_t, c_t'> for all pairs of positions of a unit          [U, T, T]
``materialise``    G_u                                                       [U, *weight]
``contract``       sum_u G_u (scale b first for a weighted sum)              [*weight]
``apply``          f(V, a), so that <G_u, V> = sum_t <b_t, f(V, a)_t>        as b
=================  ========================================================  ==================

With Gram matrices the norm needs no G_u (the ghost norm):
|G_u|^2 = sum_tt' <a_t, a_t'> <b_t, b_t'>.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layer(Protocol):
    """One kind of bilinear layer with one setting of its options.

    a and b are as :meth:`left_form` and :meth:`right_form` return them.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, output channels first."""

    @property
    def has_gram(self) -> bool:
        """Whether :meth:`gram` serves."""

    def left_form(self, x: Tensor) -> Tensor:
        """[U, R, *row] of the layer's input -> a."""

    def right_form(self, y: Tensor) -> Tensor:
        """[U, R, *row] of the layer's output -> b."""

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """[U, T, T]: <a_t, c_t'>."""

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in c of sum weights * gram(c, a), weights [U, T, T]."""

    def size(self, a: Tensor) -> Tensor:
        """[U]: at least sqrt(sum_t |a_t|^2), of the weight's own input (not centred)."""

    def mean(self, a: Tensor) -> Tensor:
        """[U, T]: the mean of a_t's entries (for centred weights)."""

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in a of sum weights * mean(a), weights [U, T]."""

    def rows(self, b: Tensor) -> Tensor:
        """[U, T, out]: b in the order of :meth:`gram`."""

    def from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """[U, T, out] -> b, shaped as ``like``."""

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """[out] or [U, out], shaped to be multiplied with b."""

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        """[U, *shape]: G_u."""

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """[*shape]: sum_u G_u."""

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """f(weight, a), shaped as b."""

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """f(weights_u, a_u), shaped as b."""

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """f(weights_u, .)^T b_u, shaped as ``like``, an a."""

    def positions(self, b: Tensor) -> int:
        """T: positions per unit."""

    def gram_entries(self, t: int) -> int:
        """Entries of the matrices that :meth:`gram` needs per unit, for T positions."""

    def prefers_gram(self, t: int, pairs: int, *, twice: bool) -> bool:
        """Whether the Gram matrices are the faster way to the norm."""


def lengths(x: Tensor) -> Tensor:
    """[U, ...] -> [U]: |x_u|, in float64, which MPS has not."""
    dtype = x.dtype if x.device.type == "mps" else torch.float64
    found: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=dtype)
    return found


_ENTRY = 60  # an entry of a Gram matrix takes the time of this many products


@dataclass(frozen=True)
class Costs:
    """The cost model of one layer, in multiplications per unit.

    A Gram matrix takes T^2 products per channel and some time per entry; G_u takes T i o products
    and some time per entry, and then serves the weighted sum too, which saves those products again.
    A norm that is differentiated costs the Gram way twice (K B and S A), the other three times.

    Attributes:
        positions: T.
        pixels: positions of the input, where its Gram matrix is made.
        weights: (i, o).
        channels: of a pixel.
        entry: the time of an entry of G_u: quick for matrices, slow for kernels.
    """

    positions: int
    pixels: int
    weights: tuple[int, int]
    channels: int
    entry: int

    def gram_is_cheaper(self, pairs: int, *, twice: bool) -> bool:
        """Whether the Gram way is the faster one; always where G_u is far larger than x and b."""
        i, o = self.weights
        if i * o > 2 * (self.pixels * self.channels + self.positions * o):
            return True
        gram = self.pixels**2 * (self.channels + _ENTRY) + self.positions**2 * o
        materialised = i * o * self.entry
        if twice:
            return 2 * pairs * gram < 3 * pairs * (materialised + self.positions * i * o)
        return gram < materialised
