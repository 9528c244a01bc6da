"""Families of bilinear layers: what a layer's per-unit gradient is made of, and its four questions.

A layer y = f(W, a) that is linear in W and in a has the per-unit gradient

    G_u = sum_t b_t (x) a_t        b_t the gradient at the t-th output position, a_t what W met there

summed over the positions t of all rows of unit u. A family answers four questions about it, and
only one of them forms it:

=================  =========================================================  ==================
``gram``           <a_t, a_t'> for all pairs of positions of a unit            [U, T, T]
``instantiate``    G_u itself                                                 [U, *weight]
``contract``       sum_u G_u (scale b first for a weighted sum)               [*weight]
``apply``          f(V, a), so that <G_u, V> = sum_t <b_t, f(V, a)_t>         as y
=================  =========================================================  ==================

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

    shape: tuple[int, ...]  # of the weight; its first axis is b's features

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

    def instantiate(self, a: Tensor, b: Tensor) -> Tensor:
        """[U, *shape]: G_u."""

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """[*shape]: sum_u G_u."""

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """f(weight, a), shaped as b."""


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

    def instantiate(self, a: Tensor, b: Tensor) -> Tensor:
        """B^T A."""
        return self.right(b).transpose(1, 2) @ self.right(a)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """B^T A over all units at once."""
        return b.flatten(0, -2).t() @ a.flatten(0, -2)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """A W^T."""
        return F.linear(a, weight)


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


@dataclass(frozen=True)
class ConvFamily:
    """A convolution: a [U, q, i, *space], b [U, q, o, *space'], W [o, i / groups, *kernel].

    A transposed convolution is this one with a and b exchanged: see the rule for it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def ghost(self) -> bool:
        """Grouped convolutions have small weights: those are instantiated."""
        return self.groups == 1

    def positions(self, b: Tensor) -> int:
        """T = q * the output's size."""
        return b[0, :, 0].numel()

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """sum_d K[t + d, t' + d] over the kernel's offsets d, K the Gram matrix of pixels.

        The sum over d is done one spatial axis after the other: k + k adds in place of k * k.
        """
        units, q, channels, *space = a.shape
        left, right = (t.transpose(1, 2).reshape(units, channels, -1) for t in (a, c))
        pixels = left.transpose(1, 2) @ right  # <a(s), c(s')>
        gram = pixels.view(units, q, *space, q, *space)
        for axis in range(len(space)):
            gram = self._shift(gram, axis, 2 + axis, 3 + len(space) + axis)
        return gram.reshape(units, self._rows(gram, q), -1)

    @staticmethod
    def _rows(gram: Tensor, q: int) -> int:
        spatial = (gram.ndim - 3) // 2
        return q * int(torch.Size(gram.shape[2 : 2 + spatial]).numel())

    def _shift(self, gram: Tensor, axis: int, first: int, second: int) -> Tensor:
        """sum_d K[.., s o + d, .., s o' + d, ..] along one spatial axis; zero outside the image."""
        k, s = self.shape[2 + axis], self.stride[axis]
        p, dil = self.padding[axis], self.dilation[axis]
        size = gram.shape[first]
        out = (size + 2 * p - dil * (k - 1) - 1) // s + 1
        if (k, s, p) == (1, 1, 0):
            return gram
        shape = list(gram.shape)
        shape[first] = shape[second] = out
        total = gram.new_zeros(shape)
        for d in range(k):
            offset = d * dil - p  # output o meets input s o + offset
            low = max(0, -(offset // s))  # first o with s o + offset >= 0
            high = min(out, (size - 1 - offset) // s + 1)
            if high <= low:
                continue
            begin, count = s * low + offset, high - low
            piece = _strided(_strided(gram, first, begin, s, count), second, begin, s, count)
            total.narrow(first, low, count).narrow(second, low, count).add_(piece)
        return total

    def mean(self, a: Tensor) -> Tensor:
        """The patch's mean: a box filter over the mean channel."""
        box = a.new_full((1, 1, *self.shape[2:]), 1.0 / torch.Size(self.shape[2:]).numel())
        channel = a.mean(2, keepdim=True).flatten(0, 1)
        return self._conv(channel, box, 1).reshape(a.shape[0], -1)

    def right(self, b: Tensor) -> Tensor:
        """[U, T, o]."""
        return b.flatten(3).transpose(2, 3).flatten(1, 2)

    def instantiate(self, a: Tensor, b: Tensor) -> Tensor:
        """The weight gradient of one convolution whose groups are the units."""
        units = a.shape[0]
        like = a.new_empty((units * self.shape[0], *self.shape[1:]))
        merged = self._weight_gradient(_units_as_groups(a), _units_as_groups(b), like, units)
        return merged.view(units, *self.shape)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """The ordinary weight gradient."""
        return self._weight_gradient(a.flatten(0, 1), b.flatten(0, 1), a.new_empty(self.shape), 1)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """The convolution."""
        return self._conv(a.flatten(0, 1), weight, self.groups).unflatten(0, a.shape[:2])

    def _conv(self, a: Tensor, weight: Tensor, groups: int) -> Tensor:
        none = [0] * len(self.stride)
        return torch.convolution(
            a, weight, None, self.stride, self.padding, self.dilation, False, none, groups
        )

    def _weight_gradient(self, a: Tensor, b: Tensor, like: Tensor, units: int) -> Tensor:
        none = [0] * len(self.stride)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            b, a, like, None, self.stride, self.padding, self.dilation, False, none,
            self.groups * units, [False, True, False],
        )[1]  # fmt: skip
        return gradient


def _units_as_groups(t: Tensor) -> Tensor:
    """[U, q, c, *space] -> [q, U * c, *space]."""
    return t.transpose(0, 1).flatten(1, 2)


def _strided(t: Tensor, axis: int, begin: int, step: int, count: int) -> Tensor:
    index: list[slice] = [slice(None)] * t.ndim
    index[axis] = slice(begin, begin + step * (count - 1) + 1, step)
    return t[tuple(index)]


def reduce_to(t: Tensor, like: Sequence[int]) -> Tensor:
    """Sum [U, q, *rest] over q and over the axes that ``like`` broadcasts: [U, *like].

    Example:
        >>> reduce_to(torch.ones(2, 3, 4, 5), (5,)).shape, float(reduce_to(torch.ones(1, 3, 4), ())[0])
        (torch.Size([2, 5]), 12.0)
    """
    rest = t.shape[2:]
    padded = (1,) * (len(rest) - len(like)) + tuple(like)
    axes = [1] + [2 + i for i, (n, m) in enumerate(zip(rest, padded, strict=True)) if m != n]
    return t.sum(axes, keepdim=True).reshape(t.shape[0], *like)
