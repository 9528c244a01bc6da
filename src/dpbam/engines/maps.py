"""Convolutions and norms as autograd functions, with derivatives written out.

Torch can differentiate all of this itself. Written out it does less: no gradient for weights that
we never ask for, one product in place of two for a symmetric Gram matrix, nothing kept twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.conv_math import ConvFamily
from dpbam.engines.layer_math import Family


class Convolve(torch.autograd.Function):
    """y = f(W, x) + bias, in x alone: x [n, i, *space]. Its derivative is :class:`Spread`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, family: ConvFamily
    ) -> Tensor:
        """The function itself."""
        ctx.given = weight, family, x.shape
        none = [0] * len(family.stride)
        return torch.convolution(
            x, weight, bias, family.stride, family.padding, family.dilation, False, none,
            family.groups,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its derivative."""
        weight, family, shape = ctx.given
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return Spread.apply(grad, weight, family, shape), None, None, None  # type: ignore[no-untyped-call]


class Spread(torch.autograd.Function):
    """h = f(W, .)^T b, the data gradient, in b alone. Its derivative is :class:`Convolve`."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, weight: Tensor, family: ConvFamily, shape: Any) -> Tensor:
        """The function itself."""
        ctx.given = weight, family
        return family.back(b, weight, shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its derivative."""
        weight, family = ctx.given
        return Convolve.apply(grad, weight, None, family), None, None, None  # type: ignore[no-untyped-call]


class GhostNorm(torch.autograd.Function):
    """|G_u|^2 = sum_tt' K_tt' S_tt' with K the Gram matrix of a (centred or not) and S that of b.

    Gradients: in b, 2 K B; in a, that of sum S K. K and S are kept for the second norm.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, family: Family, fan: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The function itself."""
        rows = family.right(b)
        right = rows @ rows.transpose(1, 2)
        left = centred_gram(family, a, a, fan).to(right.dtype)
        ctx.save_for_backward(a, b, left, right)
        ctx.given = family, fan
        ctx.mark_non_differentiable(left, right)
        return frobenius(left, right), left, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        """Its derivative."""
        a, b, left, right = ctx.saved_tensors
        family, fan = ctx.given
        g = grad.view(-1, 1, 1)
        in_a = in_b = None
        if ctx.needs_input_grad[1]:
            in_b = family.unright(left @ (family.right(b) * (2 * g)), b)
        if ctx.needs_input_grad[0]:
            in_a = family.gram_back(right, a)
            if fan is not None:  # d/da of -fan sum S mean mean'
                pulled = (right @ family.mean(a).unsqueeze(2)).squeeze(2)
                in_a = in_a - family.mean_back(fan * pulled, a)
            in_a = in_a * (2 * grad).view(-1, *(1,) * (in_a.ndim - 1))  # K has a twice
        return in_a, in_b, None, None


class FormedNorm(torch.autograd.Function):
    """|G_u|^2 by forming G_u (centred or not). Gradients: f(2 G_u, a) in b, its transpose in a."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, family: Family, fan: int | None) -> Tensor:
        """The function itself."""
        formed = family.instantiate(a, b)
        if fan is not None:
            formed = formed - formed.flatten(2).mean(2).view(
                *formed.shape[:2], *(1,) * (formed.ndim - 2)
            )
        ctx.save_for_backward(a, b, formed)
        ctx.family = family
        return frobenius(formed, formed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its derivative."""
        a, b, formed = ctx.saved_tensors
        weights = formed * (2 * grad).view(-1, *(1,) * (formed.ndim - 1))
        in_a = ctx.family.transpose_each(weights, b, a) if ctx.needs_input_grad[0] else None
        in_b = ctx.family.apply_each(weights, a) if ctx.needs_input_grad[1] else None
        return in_a, in_b, None, None


def frobenius(left: Tensor, right: Tensor) -> Tensor:
    """sum_tt' left * right for each unit: [U], without forming the product."""
    units = left.shape[0]
    return (left.reshape(units, 1, -1) @ right.reshape(units, -1, 1)).view(units)


def centred_gram(family: Family, a: Tensor, c: Tensor, fan: int | None) -> Tensor:
    """<a'_t, c'_t'> = <a, c> - m mean(a) mean(c) for centred weights of fan-in m."""
    gram = family.gram(a, c)
    if fan is None:
        return gram
    left, right = family.mean(a), family.mean(c)
    return gram.baddbmm_(left.unsqueeze(2), right.unsqueeze(1), alpha=-fan)


def _places(k: int) -> list[tuple[Any, slice, slice]]:
    """The pixels at each place of a tile, as strided views."""
    return [(..., slice(i, None, k), slice(j, None, k)) for i in range(k) for j in range(k)]


class AveragePool(torch.autograd.Function):
    """Means over tiles of k x k pixels that cover the image. Its derivative is :class:`Tile`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        """The function itself."""
        ctx.k = k
        total = None
        for place in _places(k):
            total = x[place].clone() if total is None else total.add_(x[place])
        assert total is not None
        return total.mul_(1 / k**2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its derivative."""
        return Tile.apply(grad, ctx.k), None  # type: ignore[no-untyped-call]


class Tile(torch.autograd.Function):
    """Each pixel spread over a tile of k x k, divided by k^2. Its derivative is the pool again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, k: int) -> Tensor:
        """The function itself."""
        ctx.k = k
        share, (n, c, y, x) = g / k**2, g.shape
        out = g.new_empty(n, c, y * k, x * k)
        for place in _places(k):
            out[place] = share
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its derivative."""
        return AveragePool.apply(grad, ctx.k), None  # type: ignore[no-untyped-call]
