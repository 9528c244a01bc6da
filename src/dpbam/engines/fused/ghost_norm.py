"""Norms and sums of G_u = sum over pairs and positions of b (x) a, from the pairs (a, b).

The ghost norm needs no G_u, only Gram matrices between the positions of a unit:

    |G_u|^2 = sum_jk sum_tt' <a_jt, a_kt'> <b_jt, b_kt'> = sum_jk sum_tt' K_jk,tt' S_jk,tt'

:class:`GhostNorm` and :class:`MaterialisedNorm` are the two ways to the norm, differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam import params
from dpbam.engines.fused.bilinear import Layer, Pair
from dpbam.engines.fused.fold import per_unit

_CACHED = 2**20  # numbers, 4 MiB
_EVERY = slice(None)
Grams = dict[tuple[str, int, int], Tensor]  # ("left" or "right", j, k): of a_j and a_k, or b


def materialise(layer: Layer, pairs: Sequence[Pair]) -> Tensor:
    """Return G_u = sum over the pairs: [U, *D]."""
    return reduce(Tensor.add_, (layer.materialise(a, b) for a, b in pairs))


class Factors(NamedTuple):
    """The factors c_u of a weighted sum; units whose factor is 0 are left out, even a NaN.

    Attributes:
        values: [k], those of the units that are left.
        units: their indices; a slice where they are consecutive, which copies nothing.
    """

    values: Tensor
    units: slice | Tensor = _EVERY

    @classmethod
    def of(cls, factors: Tensor) -> Factors:
        """Return the factors [U] that are not 0.

        Example:
            >>> Factors.of(torch.tensor([0.0, 0.5, 0.25, 0.0])).units
            slice(1, 3, None)
        """
        index = factors.nonzero()[:, 0]
        count = len(index)
        if count == len(factors):
            return cls(factors)
        first, last = index[[0, -1]].tolist() if count else (0, -1)
        units = slice(first, last + 1) if last - first + 1 == count else index
        return cls(factors[units], units)

    def select(self, values: Tensor) -> Tensor:
        """Return the rows of the units that are left: [U, ...] -> [k, ...]."""
        return values if self.units is _EVERY else values[self.units]

    def contract(self, values: Tensor) -> Tensor:
        """Return sum_u c_u values[u]: [U, ...] -> [...]."""
        rows = self.select(values)
        entries = values.shape[1:].numel()
        total = self.values.to(values.dtype) @ rows.reshape(rows.shape[0], entries)
        return total.view(values.shape[1:])


def squared_lengths(values: Tensor) -> Tensor:
    """Return |values_u|^2, by one pass for each row of a unit's matrix: [U, ...] -> [U]."""
    rows = values.flatten(2) if values.ndim > 2 else values.reshape(len(values), 1, -1)
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=2)
    return lengths.square().sum(1)


def frobenius(left: Tensor, right: Tensor) -> Tensor:
    """Return <left_u, right_u> for each unit: [U].

    As sums of products, which are faster and more accurate than products of matrices with one row;
    some units at a time, so that the products stay in the processor's cache.
    """
    count = -(-left.numel() // _CACHED) if params.on_processor([left]) else 1
    if count <= 1:
        product: Tensor = torch.linalg.vecdot(left.flatten(1), right.flatten(1))
        return product
    parts = zip(left.flatten(1).chunk(count), right.flatten(1).chunk(count), strict=True)
    return torch.cat([torch.linalg.vecdot(a, b) for a, b in parts])


def blocks(pairs: Sequence[Pair]) -> list[tuple[str, int, int]]:
    """Return the keys of the Gram matrices between all pairs j <= k."""
    count = len(pairs)
    return [(s, j, k) for j in range(count) for k in range(j, count) for s in ("left", "right")]


def grams_of(layer: Layer, pairs: Sequence[Pair], known: Grams) -> Grams:
    """Return the Gram matrices of a and of b between all pairs j <= k: [U, T, T] each."""
    rows = [layer.rows(b) for _, b in pairs]
    grams: Grams = {}
    for side, j, k in blocks(pairs):
        matrix = known.get((side, j, k))
        if matrix is None and side == "left":
            matrix = layer.gram(pairs[j][0], pairs[k][0]).to(rows[0].dtype)
        grams[side, j, k] = rows[j] @ rows[k].transpose(1, 2) if matrix is None else matrix
    return grams


def ghost_norm(layer: Layer, pairs: Sequence[Pair], known: Grams) -> tuple[Tensor, Grams]:
    """Return |G_u|^2: [U], and the Gram matrices K and S."""
    grams = grams_of(layer, pairs, known)
    parts = []
    for (side, j, k), left in grams.items():
        if side == "left":
            product = frobenius(left, grams["right", j, k])
            parts.append(product if j == k else 2 * product)
    return reduce(torch.add, parts), grams


class GhostNorm(torch.autograd.Function):
    """:func:`ghost_norm` with its derivative written out; also returns the Gram matrices.

    Gradients: in b_j, 2 sum_k K_jk b_k; in a_j, that of 2 sum_k <S_jk, gram(a_j, a_k)>.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, *flat: Tensor) -> tuple[Tensor, ...]:
        square, grams = ghost_norm(layer, _as_pairs(flat), {})
        matrices = tuple(grams.values())
        ctx.save_for_backward(*flat, *matrices)
        ctx.options = layer, tuple(grams), len(flat)
        ctx.mark_non_differentiable(*matrices)
        ctx.set_materialize_grads(False)  # else zeros of the matrices' size
        return (square, *matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grams_unused: Any) -> Any:
        layer, keys, count = ctx.options
        if grad is None:
            return (None,) * (1 + count)
        pairs = _as_pairs(ctx.saved_tensors[:count])
        grams = dict(zip(keys, ctx.saved_tensors[count:], strict=True))
        out: list[Any] = [None]
        for j, (_, b) in enumerate(pairs):
            in_a = in_b = None
            for k, (c, d) in enumerate(pairs):
                left, right = (_block(grams, side, j, k) for side in ("left", "right"))
                if ctx.needs_input_grad[1 + 2 * j]:
                    in_a = _plus(in_a, layer.gram_back(right, c))
                if ctx.needs_input_grad[2 + 2 * j]:
                    in_b = _plus(in_b, left @ (layer.rows(d) * (2 * grad).view(-1, 1, 1)))
            out.append(None if in_a is None else in_a * per_unit(2 * grad, in_a))
            out.append(None if in_b is None else layer.from_rows(in_b, b))
        return tuple(out)


class MaterialisedNorm(torch.autograd.Function):
    """|G_u|^2 by materialising G_u. Gradients: f(2 G_u, a) in b, its transpose in a."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, *flat: Tensor) -> Tensor:
        g = materialise(layer, _as_pairs(flat))
        ctx.save_for_backward(*flat, g)
        ctx.layer = layer
        return squared_lengths(g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        *flat, g = ctx.saved_tensors
        weights = g * per_unit(2 * grad, g)
        out: list[Any] = [None]
        for j, (a, b) in enumerate(_as_pairs(flat)):
            needed = ctx.needs_input_grad[1 + 2 * j : 3 + 2 * j]
            out.append(ctx.layer.transpose_each(weights, b, a) if needed[0] else None)
            out.append(ctx.layer.apply_each(weights, a) if needed[1] else None)
        return tuple(out)


def _as_pairs(flat: Sequence[Tensor]) -> list[Pair]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _block(grams: Grams, side: str, j: int, k: int) -> Tensor:
    return grams[side, j, k] if j <= k else grams[side, k, j].transpose(1, 2)


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term
