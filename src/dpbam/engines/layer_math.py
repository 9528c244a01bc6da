"""Families of bilinear layers: what a layer's per-unit gradient is made of, and its four questions.

A layer y = f(W, a) that is linear in W and in a has the per-unit gradient

    G_u = sum_t b_t (x) a_t       b_t the gradient at the t-th output position, a_t what W met

summed over the positions t of all rows of unit u. A family answers four questions about it, and
only one of them forms it:

=================  ========================================================  ==================
``gram``           <a_t, a_t'> for all pairs of positions of a unit          [U, T, T]
``instantiate``    G_u itself                                                [U, *weight]
``contract``       sum_u G_u (scale b first for a weighted sum)              [*weight]
``apply``          f(V, a), so that <G_u, V> = sum_t <b_t, f(V, a)_t>        as y
=================  ========================================================  ==================

With the Gram matrix the norm needs no G_u (the "ghost" norm): |G_u|^2 = sum_tt' <a_t, a_t'>
<b_t, b_t'>. Shapes: rows arrive folded, [U, q, ...]: U units, q rows a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Family(Protocol):
    """One kind of bilinear layer with one setting of its options."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""

    @property
    def ghost(self) -> bool:
        """Whether :meth:`gram` is there."""

    def positions(self, b: Tensor) -> int:
        """T: positions a unit."""

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """[U, T, T]: <a_t, c_t'>."""

    def mean(self, a: Tensor) -> Tensor:
        """[U, T]: the mean of a_t's entries (for centred weights)."""

    def right(self, b: Tensor) -> Tensor:
        """[U, T, o]: b as rows, in the order of :meth:`gram`."""

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """[o] or [U, o], shaped to be multiplied with b."""

    def prefers_ghost(self, t: int, pairs: int, *, twice: bool) -> bool:
        """Whether the Gram matrices are the faster way to the norm."""

    def pixels(self, t: int) -> int:
        """The side of the Gram matrix of a's pixels, for T positions."""

    def instantiate(self, a: Tensor, b: Tensor) -> Tensor:
        """[U, *shape]: G_u."""

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """[*shape]: sum_u G_u."""

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """f(weight, a), shaped as b."""

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """f(weights_u, a_u), shaped as b."""

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """f(weights_u, .)^T b_u, shaped as ``like``, an a."""

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in c of sum weights * gram(c, a), weights [U, T, T]."""

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in a of sum weights * mean(a), weights [U, T]."""

    def unright(self, rows: Tensor, b: Tensor) -> Tensor:
        """[U, T, o] back to b's shape."""


@dataclass(frozen=True)
class LinearFamily:
    """y = a W^T: a [U, q, *, i], b [U, q, *, o], W [o, i]; T = q times the axes between."""

    shape: tuple[int, ...]
    ghost: bool = True

    def positions(self, b: Tensor) -> int:
        """T = q * ..."""
        return b[0, ..., 0].numel()

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """A C^T."""
        return self.right(a) @ self.right(c).transpose(1, 2)

    def mean(self, a: Tensor) -> Tensor:
        """Mean over the features."""
        return self.right(a).mean(-1)

    def right(self, b: Tensor) -> Tensor:
        """[U, T, features]."""
        return b.flatten(1, -2)

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """Features are last."""
        return values.reshape(*values.shape[:-1], *(1,) * (b.ndim - values.ndim), -1)

    def prefers_ghost(self, t: int, pairs: int, *, twice: bool) -> bool:
        """By the cost model below."""
        o, i = self.shape
        return Costs(t, t, (i, o), i, entry=10).ghost_is_cheaper(pairs, twice=twice)

    def pixels(self, t: int) -> int:
        """A position is a pixel."""
        return t

    def unright(self, rows: Tensor, b: Tensor) -> Tensor:
        """Back to b's shape."""
        return rows.reshape(b.shape)

    def instantiate(self, a: Tensor, b: Tensor) -> Tensor:
        """B^T A."""
        return self.right(b).transpose(1, 2) @ self.right(a)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """B^T A over all units at once."""
        return b.flatten(0, -2).t() @ a.flatten(0, -2)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """A W^T."""
        return F.linear(a, weight)

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """A_u W_u^T."""
        return (self.right(a) @ weights.transpose(1, 2)).reshape(*a.shape[:-1], -1)

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """B_u W_u."""
        return (self.right(b) @ weights).reshape(like.shape)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in c of sum weights * gram(c, a), weights [U, T, T]."""
        return (weights @ self.right(a)).reshape(a.shape)

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in a of sum_t weights_t mean_t."""
        return (weights / a.shape[-1]).reshape(*a.shape[:-1], 1).expand(a.shape)


@dataclass(frozen=True)
class EmbeddingFamily:
    """y = W[ids]: a linear layer with one-hot rows; a holds ids [U, q, *], b [U, q, *, d].

    The weight is [V, d], and G_u = sum_t onehot(id_t) (x) b_t: here b stands on the right, so
    :meth:`right` is still b and the Gram of one-hot rows says where two ids are equal.
    """

    shape: tuple[int, ...]
    padding: int | None = None
    ghost: bool = True

    def positions(self, b: Tensor) -> int:
        """T = q * ..."""
        return b[0, ..., 0].numel()

    def _ids(self, a: Tensor) -> Tensor:
        return a.flatten(1)

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """[id_t == id_t'], with nothing equal to the padding id."""
        same = self._ids(a)[:, :, None] == self._ids(c)[:, None, :]
        if self.padding is not None:
            same = same & (self._ids(a) != self.padding)[:, :, None]
        return same.to(torch.get_default_dtype())

    def mean(self, a: Tensor) -> Tensor:
        """One over the number of ids."""
        return torch.full_like(self._ids(a), 1.0 / self.shape[0], dtype=torch.get_default_dtype())

    def right(self, b: Tensor) -> Tensor:
        """[U, T, d]."""
        return b.flatten(1, -2)

    def unright(self, rows: Tensor, b: Tensor) -> Tensor:
        """Back to b's shape."""
        return rows.reshape(b.shape)

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """Features are last."""
        return values.reshape(*values.shape[:-1], *(1,) * (b.ndim - values.ndim), -1)

    def prefers_ghost(self, t: int, pairs: int, *, twice: bool) -> bool:
        """The table is far larger than the rows that were looked up."""
        return True

    def pixels(self, t: int) -> int:
        """A position is a pixel."""
        return t

    def _kept(self, a: Tensor, b: Tensor) -> Tensor:
        if self.padding is None:
            return b
        return torch.where((a == self.padding)[..., None], 0.0, b)

    def instantiate(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows of b added up by id, unit by unit."""
        units = a.shape[0]
        rows = self.right(self._kept(a, b))
        offset = torch.arange(units, device=a.device)[:, None] * self.shape[0]
        out = rows.new_zeros(units * self.shape[0], self.shape[1])
        out = out.index_add(0, (self._ids(a) + offset).flatten(), rows.flatten(0, 1))
        return out.view(units, *self.shape)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows of b added up by id."""
        rows = self._kept(a, b).flatten(0, -2)
        return rows.new_zeros(self.shape).index_add(0, a.flatten(), rows)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """W[ids], 0 for the padding id."""
        return self._kept(a, weight[a])

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """W_u[ids]: the padding id too, which blocks gradients and not values."""
        unit = torch.arange(a.shape[0], device=a.device).view(-1, *(1,) * (a.ndim - 1))
        return weights[unit, a]

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """Ids have no gradient."""
        raise TypeError("an embedding has no gradient in its ids")

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """Ids have no gradient."""
        raise TypeError("an embedding has no gradient in its ids")

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """Ids have no gradient."""
        raise TypeError("an embedding has no gradient in its ids")


_ROW = 60  # an entry of a Gram matrix takes the time of so many products


@dataclass(frozen=True)
class Costs:
    """The cost model of one layer, in multiplications a unit.

    A Gram matrix takes T^2 products a channel and some time an entry; G_u takes T i o products and
    some time an entry, and then serves the weighted sum too, which saves those products again. A
    norm that is differentiated costs the Gram way twice (K B and S A), the other three times.

    Attributes:
        positions: T.
        pixels: positions of the input, where its Gram matrix is made.
        weights: (i, o).
        channels: of a pixel.
        entry: the time of an entry of G_u: forming it is quick for matrices, slow for kernels.
    """

    positions: int
    pixels: int
    weights: tuple[int, int]
    channels: int
    entry: int

    def ghost_is_cheaper(self, pairs: int, *, twice: bool) -> bool:
        """Whether the Gram way is the faster one; always where G_u is far larger than x and b."""
        i, o = self.weights
        if i * o > 2 * (self.pixels * self.channels + self.positions * o):
            return True
        ghost = self.pixels**2 * (self.channels + _ROW) + self.positions**2 * o
        formed = i * o * self.entry
        if twice:
            return 2 * pairs * ghost < 3 * pairs * (formed + self.positions * i * o)
        return ghost < formed


def split_axis(t: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """``t.unflatten``, which torch does not type."""
    split: Tensor = t.unflatten(axis, sizes)  # type: ignore[no-untyped-call]
    return split


def reduce_to(t: Tensor, like: Sequence[int]) -> Tensor:
    """Sum [U, q, *rest] over q and over the axes that ``like`` broadcasts: [U, *like].

    Example:
        >>> reduce_to(torch.ones(2, 3, 4, 5), (5,)).shape
        torch.Size([2, 5])
        >>> reduce_to(torch.ones(1, 3, 4), ())
        tensor([12.])
    """
    rest = t.shape[2:]
    padded = (1,) * (len(rest) - len(like)) + tuple(like)
    axes = [1] + [2 + i for i, (n, m) in enumerate(zip(rest, padded, strict=True)) if m != n]
    return t.sum(axes, keepdim=True).reshape(t.shape[0], *like)
