"""Shapes: rows to units, and factors that broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dpbam import params
from dpbam.engines.base import PhysicalBatch
from dpbam.params import accumulation_dtype

_CACHED = 2**17  # elements of one slice of an element-wise pass, so that it stays in the cache


class Fold:
    """Reshape rows to units: [U R, ...] to [U, R, ...], and back."""

    def __init__(self, batch: PhysicalBatch) -> None:
        self.rows, self.units, self._per_unit = batch.rows, batch.units, batch.rows_per_unit

    def __call__(self, t: Tensor) -> Tensor:
        """Return [U, R, ...]; floats in float32 or better."""
        if t.is_floating_point() and t.dtype != (dtype := accumulation_dtype(t.dtype)):
            t = t.to(dtype)
        return split_axis(t, 0, (self.units, self._per_unit))

    def undo(self, t: Tensor, row: Sequence[int]) -> Tensor:
        """Return [U, R * ...] as [N, *row]: the inverse."""
        return t.reshape(self.rows, *row)

    def to_rows(self, t: Tensor) -> Tensor:
        """Return the value of each row's unit: [U, ...] -> [N, ...]."""
        return t if self._per_unit == 1 else t.repeat_interleave(self._per_unit, 0)


def split_axis(t: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """Return ``t.unflatten``, which torch does not type."""
    if len(sizes) == 2 and sizes[0] == t.shape[axis] and sizes[1] in (1, -1):
        return t.unsqueeze(axis + 1)
    split: Tensor = t.unflatten(axis, sizes)  # type: ignore[no-untyped-call]
    return split


def per_unit(factors: Tensor, values: Tensor) -> Tensor:
    """Return [U] factors shaped to multiply ``values``, [U, ...]."""
    return factors.to(values.dtype).view(-1, *(1,) * (values.ndim - 1))


def cached_slices(x: Tensor) -> list[slice]:
    """Return slices of the first axis that stay in the processor's cache; elsewhere one slice."""
    if not params.on_processor([x]):
        return [slice(0, x.shape[0])]
    rows = max(1, _CACHED // max(1, x.shape[1:].numel()))
    return [slice(i, i + rows) for i in range(0, x.shape[0], rows)]


def reduce_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum [U, R, *rest] over R and over the axes that ``shape`` broadcasts: [U, *shape].

    Example:
        >>> import torch
        >>> reduce_to(torch.ones(2, 3, 4, 5), (5,)).shape
        torch.Size([2, 5])
        >>> reduce_to(torch.ones(1, 3, 4), ())
        tensor([12.])
    """
    rest = t.shape[2:]
    if t.shape[1:].numel() == math.prod(shape):
        return t.reshape(t.shape[0], *shape)
    padded = (1,) * (len(rest) - len(shape)) + tuple(shape)
    axes = [1] + [2 + i for i, (n, m) in enumerate(zip(rest, padded, strict=True)) if m != n]
    return t.sum(axes, keepdim=True).reshape(t.shape[0], *shape)
