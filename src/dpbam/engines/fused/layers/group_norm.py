"""Group normalisation with its first and second derivative written out.

Torch's own second derivative of group norm is a long chain of element-wise passes. Here everything
but the last pass is arithmetic on sums over a channel. For one group of m values, with r = 1 /
sqrt(var + eps), xhat = r (x - mean), g the gradient at y = scale * xhat + shift, u = scale * g::

    dx = r (u - mean(u) - xhat a)                       a = mean(u xhat)
    dscale = sum_t g xhat,   dshift = sum_t g           per sample and channel

and with v, sbar, tbar the adjoints of dx, dscale, dshift, and c = mean(v xhat), p = sbar * g::

    gbar = scale r (v - mean(v) - xhat c) + sbar xhat + tbar
    xbar = r^2 (-a (v - mean(v)) - c (u - mean(u)) + xhat (3 a c - mean(u v) + mean(u) mean(v)))
           + r (p - mean(p) - xhat mean(p xhat))
    scale's second use: sum_t g r (v - mean(v) - xhat c)

All means over a group follow from sums over each channel, so per-sample gradients of scale and
shift come out on the way. Shapes: x, g, v [n, channels, *space]; sums [n, channels].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Record = Callable[[Tensor, Tensor | None], None]
_CHUNK = 2**17  # elements of one step of an element-wise pass: what stays in the cache


class GroupNorm(torch.autograd.Function):
    """y = scale * xhat + shift, both [channels], or both [n, channels] (then differentiable once).

    ``record`` gets the per-sample gradients of scale and shift.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int, eps: float,
        record: Record,
    ) -> Tensor:  # fmt: skip
        n, channels = x.shape[:2]
        own = scale is not None and scale.ndim == 2  # a scale and a shift for every row
        y, mean, r = torch.native_group_norm(
            x, None if own else scale, None if own else shift, n, channels, x[0, 0].numel(),
            groups, eps,
        )  # fmt: skip
        if own:
            y = torch.addcmul(per_channel(shift, x), y, per_channel(scale, x))
        ctx.save_for_backward(x)
        ctx.given = scale, mean, r, groups, record
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dx, dscale, dshift = GroupNormBack.apply(g, x, *ctx.given)  # type: ignore[no-untyped-call]
        ctx.given[-1](dscale, dshift)
        return dx, None, None, None, None, None


class GroupNormBack(torch.autograd.Function):
    """(g, x) -> (dx, dscale, dshift) of the formulas above."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, r: Tensor, groups: int,
        record: Record,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        n, channels = x.shape[:2]
        g = g.contiguous()
        own = scale is not None and scale.ndim == 2
        u = g * per_channel(scale, x) if own else g
        dx = torch.ops.aten.native_group_norm_backward(
            u, x, mean, r, None if own else scale, n, channels, x[0, 0].numel(), groups,
            [True, False, False],
        )[0]  # fmt: skip
        stats = _Stats(scale, mean, r, groups, x)
        sum_g, sum_gh = stats.sums(g, x)
        ctx.save_for_backward(g, x, sum_g, sum_gh)
        ctx.given = stats, record
        return dx, sum_gh, sum_g  # dscale = sum g xhat, dshift = sum g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, sbar: Tensor, tbar: Tensor) -> Any:
        g, x, sum_g, sum_gh = ctx.saved_tensors
        s, record = ctx.given
        v = v.contiguous()
        sum_v, sum_vh = s.sums(v, x)
        sum_gv = _dot(g, v)
        scale, r, m = s.scale, s.r, s.mean_over_group
        mean_u, a = m(scale * sum_g), m(scale * sum_gh)
        mean_v, c = m(sum_v), m(sum_vh)
        mean_uv, mean_p, mean_ph = m(scale * sum_gv), m(sbar * sum_g), m(sbar * sum_gh)
        record(r * (sum_gv - mean_v * sum_g - c * sum_gh), None)  # scale's second use
        gbar = s.combine([(scale * r, v)], sbar - scale * r * c, x, tbar - scale * r * mean_v)
        on_xhat = r**2 * (3 * a * c - mean_uv + mean_u * mean_v) - r * mean_ph
        constant = r**2 * (a * mean_v + c * mean_u) - r * mean_p
        xbar = s.combine([(-(r**2) * a, v), (r * sbar - r**2 * c * scale, g)], on_xhat, x, constant)
        return gbar, xbar, None, None, None, None, None


class _Stats:
    """Sums over channels, means over groups, all spread to [n, channels]."""

    def __init__(
        self, scale: Tensor | None, mean: Tensor, r: Tensor, groups: int, x: Tensor
    ) -> None:
        self._groups, self._size = groups, x[0].numel() // groups
        channels = x.shape[1]
        wide = torch.promote_types(x.dtype, torch.float32)
        self.scale = x.new_ones(channels, dtype=wide) if scale is None else scale.to(wide)
        self.mean, self.r = (
            t.to(wide).repeat_interleave(channels // groups, dim=1) for t in (mean, r)
        )

    def sums(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(sum_t t, sum_t t xhat) per channel."""
        plain = _positions(t).sum(2, dtype=self.r.dtype)
        return plain, self.r * (_dot(t, x) - self.mean * plain)

    def mean_over_group(self, sums: Tensor) -> Tensor:
        """From sums over channels to the mean over a group: [n, channels]."""
        n, channels = sums.shape
        by_group = sums.view(n, self._groups, -1).sum(2) / self._size
        return by_group.repeat_interleave(channels // self._groups, dim=1)

    def combine(
        self, parts: list[tuple[Tensor, Tensor]], on_xhat: Tensor, x: Tensor, constant: Tensor
    ) -> Tensor:
        """sum coefficient * tensor + on_xhat * xhat + constant, in pieces that fit the cache."""
        on_x = on_xhat * self.r  # xhat = r x - r mean
        constant = constant - on_x * self.mean
        out = torch.empty_like(x)
        for piece in pieces(x):
            (first, t), *others = parts
            target = _positions(out[piece])
            torch.addcmul(
                _wide(constant, piece, x), _wide(first, piece, x), _positions(t[piece]), out=target
            )
            for coefficient, t in [*others, (on_x, x)]:
                target.addcmul_(_wide(coefficient, piece, x), _positions(t[piece]))
        return out


def per_channel(values: Tensor | None, x: Tensor) -> Tensor:
    """[n, channels], to be multiplied with x."""
    assert values is not None
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2)).to(x.dtype)


def pieces(x: Tensor) -> list[slice]:
    """Slices of the first axis with about ``_CHUNK`` elements each."""
    rows = max(1, _CHUNK // max(1, x[0].numel()))
    return [slice(i, i + rows) for i in range(0, x.shape[0], rows)]


def _positions(t: Tensor) -> Tensor:
    """[n, channels, positions], as a view; vectors have one position."""
    return t.flatten(2) if t.ndim > 2 else t.unsqueeze(2)


def _wide(coefficient: Tensor, piece: slice, like: Tensor) -> Tensor:
    return coefficient[piece].unsqueeze(2).to(like.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """sum_t a b per sample and channel, without forming the product."""
    n, channels = a.shape[:2]
    rows = (n * channels, 1, -1)
    out = torch.bmm(a.reshape(rows), b.reshape(rows).transpose(1, 2)).view(n, channels)
    return out.to(torch.promote_types(a.dtype, torch.float32))
