"""The family of convolutions: see :mod:`dpbam.engines.layer_math` for what a family answers.

Two things are done otherwise than by unfolding images into patches, which is slow and large. G_u of
all units is the weight gradient of one convolution whose groups are the units; and the Gram matrix
of patches is a sum of shifted Gram matrices of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbam.engines.layer_math import Costs, split_axis


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
        units, q, _, *space = a.shape
        gram = (self.right(a) @ self.right(c).transpose(1, 2)).view(units, q, *space, q, *space)
        for axis in range(len(space)):
            gram = self._shift(gram, axis, space[axis])
        rows = torch.Size(gram.shape[1 : 2 + len(space)]).numel()
        return gram.reshape(units, rows, rows)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in c of sum weights * gram(c, a), weights [U, T, T]."""
        units, q, _, *space = a.shape
        out = self._out(space)
        total = weights.reshape(units, q, *out, q, *out)
        for axis in reversed(range(len(space))):
            total = self._shift(total, axis, space[axis], back=True)
        pixels = torch.Size([q, *space]).numel()
        rows = total.reshape(units, pixels, pixels) @ self.right(a)
        return split_axis(rows, 1, (q, -1)).transpose(2, 3).reshape(a.shape)

    def _out(self, space: Sequence[int]) -> list[int]:
        settings = zip(space, self.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in settings]

    def _shift(self, gram: Tensor, axis: int, size: int, *, back: bool = False) -> Tensor:
        """sum_d K[.., s o + d, .., s o' + d, ..] along one spatial axis, zero outside the image.

        ``back``: its adjoint. ``size``: of the image along this axis.
        """
        k, s = self.shape[2 + axis], self.stride[axis]
        p, dilation = self.padding[axis], self.dilation[axis]
        if (k, s, p) == (1, 1, 0):
            return gram
        first, second = 2 + axis, 2 + axis + gram.ndim // 2
        out = (size + 2 * p - dilation * (k - 1) - 1) // s + 1
        shape = list(gram.shape)
        shape[first] = shape[second] = size if back else out
        same = s == 1 and out == size and p % dilation == 0  # then one offset is no shift at all
        total = gram.clone() if same else gram.new_zeros(shape)
        for d in range(k):
            offset = d * dilation - p  # output o meets input s o + offset
            if same and offset == 0:
                continue
            low = max(0, -(offset // s))  # the first o that meets the image, and the last
            high = min(out, (size - 1 - offset) // s + 1)
            if high <= low:
                continue
            inside = (s * low + offset, s, high - low)
            whole = (low, 1, high - low)
            read, write = (whole, inside) if back else (inside, whole)
            piece = _strided(_strided(gram, first, *read), second, *read)
            _strided(_strided(total, first, *write), second, *write).add_(piece)
        return total

    def mean(self, a: Tensor) -> Tensor:
        """The patch's mean: a box filter over the mean channel."""
        box = a.new_full((1, 1, *self.shape[2:]), 1.0 / torch.Size(self.shape[2:]).numel())
        channel = a.mean(2, keepdim=True).flatten(0, 1)
        return self._conv(channel, box, 1).reshape(a.shape[0], -1)

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """The gradient in a of sum_t weights_t mean_t: [U, T] -> a's shape, channels equal."""
        units, q, channels, *space = a.shape
        kernel = torch.Size(self.shape[2:])
        box = a.new_full((1, 1, *kernel), 1.0 / (channels * kernel.numel()))
        b = weights.reshape(units * q, 1, *self._out(space))
        channel = self.back(b, box, torch.Size((units * q, 1, *space)))
        return split_axis(channel, 0, (units, q)).expand(a.shape)

    def right(self, b: Tensor) -> Tensor:
        """[U, T, o]."""
        return b.flatten(3).transpose(2, 3).flatten(1, 2)

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """Channels are the third axis of [U, q, o, *space]."""
        units = values.shape[0] if values.ndim == 2 else 1
        return values.reshape(units, 1, -1, *(1,) * (b.ndim - 3))

    def prefers_ghost(self, t: int, pairs: int, *, twice: bool) -> bool:
        """By the cost model."""
        o, pixel, *kernel = self.shape
        i = pixel * torch.Size(kernel).numel()
        costs = Costs(t, self.pixels(t), (i, o), pixel, entry=200)
        return costs.ghost_is_cheaper(pairs, twice=twice)

    def pixels(self, t: int) -> int:
        """About stride * stride pixels a position."""
        return t * torch.Size(self.stride).numel()

    def unright(self, rows: Tensor, b: Tensor) -> Tensor:
        """Back to b's shape."""
        return split_axis(rows, 1, (b.shape[1], -1)).transpose(2, 3).reshape(b.shape)

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
        return split_axis(self._conv(a.flatten(0, 1), weight, self.groups), 0, a.shape[:2])

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """f(W_u, a_u): one convolution whose groups are the units."""
        units = a.shape[0]
        out = self._conv(_units_as_groups(a), weights.flatten(0, 1), units * self.groups)
        return split_axis(out, 1, (units, -1)).transpose(0, 1)

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """f(W_u, .)^T b_u, shaped as ``like``."""
        units = b.shape[0]
        shape = _units_as_groups(like).shape
        back = self.back(_units_as_groups(b), weights.flatten(0, 1), shape, units)
        return split_axis(back, 1, (units, -1)).transpose(0, 1)

    def back(self, b: Tensor, weight: Tensor, shape: torch.Size, units: int = 1) -> Tensor:
        """The data gradient: [n, o, *space'] -> [n, i, *space]."""
        none = [0] * len(self.stride)
        like = b.new_empty(1).expand(shape)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            b, like, weight, None, self.stride, self.padding, self.dilation, False, none,
            self.groups * units, [True, False, False],
        )[0]  # fmt: skip
        return gradient

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
