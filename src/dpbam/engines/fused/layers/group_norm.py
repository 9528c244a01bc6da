"""Group and instance normalisation, with first and second derivative written out.

Torch's own second derivative of group norm is a long chain of element-wise passes. Here all but the
last pass is arithmetic on sums over a channel. For one group of m values, with r = 1 / sqrt(var +
eps), xhat = r (x - mean), g the gradient at y = scale * xhat + shift, u = scale * g::

    dx = r (u - mean(u) - xhat a)                       a = mean(u xhat)
    dscale = sum_t g xhat,   dshift = sum_t g           per sample and channel

and with v, sbar, tbar the adjoints of dx, dscale, dshift, and c = mean(v xhat), p = sbar * g::

    gbar = scale r (v - mean(v) - xhat c) + sbar xhat + tbar
    xbar = r^2 (-a (v - mean(v)) - c (u - mean(u)) + xhat (3 a c - mean(u v) + mean(u) mean(v)))
           + r (p - mean(p) - xhat mean(p xhat))
    scale's second use: sum_t g r (v - mean(v) - xhat c)

All means over a group follow from sums over each channel, which also give the per-sample gradients
of scale and shift. Shapes: x, g, v [n, channels, *space]; sums [n, channels].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import apply
from dpbam.engines.fused.fold import cached_slices, split_axis
from dpbam.engines.fused.layers.norm import (
    affine_by_row,
    differs_by_row,
    eps_of,
    refuse_non_linear,
)
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture, with_rows
from dpbam.engines.fused.uses import RecordedUse
from dpbam.engines.fused.weights import Weight
from dpbam.params import Keywords, accumulation_dtype

_BACKWARD = torch.ops.aten.native_group_norm_backward.default
Record = Callable[[Tensor, Tensor | None], None]


class GroupNorm(torch.autograd.Function):
    """y = scale * xhat + shift, both [channels], or both [n, channels] (then differentiable once).

    ``record`` is called with the per-sample gradients of scale and shift. y is [rows, n / rows,
    channels, *space].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, groups: int, eps: float,
        record: Record, rows: int,
    ) -> Tensor:  # fmt: skip
        scales = _of_every_row(scale, x)
        y, mean, r = torch.native_group_norm(
            x, scales, _of_every_row(shift, x), *_as_one_image(x, groups), eps
        )
        ctx.save_for_backward(x)
        ctx.scales, ctx.options = scales, (scale, mean, r, groups, record)
        return with_rows(y, rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        g = g.flatten(0, 1)
        if torch.is_grad_enabled():
            dx, dscale, dshift = apply(_GroupNormBack, g, x, *ctx.options)
        else:
            dx, dscale, dshift = _back(g.contiguous(), x, ctx.scales, *ctx.options[1:4])
        ctx.options[-1](dscale, dshift)
        return dx, None, None, None, None, None, None


class _GroupNormBack(torch.autograd.Function):
    """(g, x) -> (dx, dscale, dshift) of the formulas above."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, r: Tensor, groups: int,
        record: Record,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        n, g = x.shape[0], g.contiguous()
        dx, dscale, dshift = _back(g, x, _of_every_row(scale, x), mean, r, groups)
        ctx.save_for_backward(g, x, dshift, dscale)
        ctx.options = scale, mean.view(n, -1), r.view(n, -1), groups, record
        return dx, dscale, dshift

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor, sbar: Tensor, tbar: Tensor) -> Any:
        g, x, sum_g, sum_gh = ctx.saved_tensors
        scale, mean, r, groups, record = ctx.options
        s, v = _Stats(scale, mean, r, groups, x), v.contiguous()
        sum_v, sum_vh = s.sums(v, x)
        sum_gv = _dot(g, v)
        scale, r = s.scale, s.r
        of_g = torch.stack([sum_g, sum_gh, sum_gv])
        sums = torch.cat([scale * of_g, sbar * of_g[:2], torch.stack([sum_v, sum_vh])])
        mean_u, a, mean_uv, mean_p, mean_ph, mean_v, c = s.means_over_groups(sums).unbind()
        by_scale, r2 = scale * r, r**2
        # all products [n, channels] of two of these in one operation: on a GPU each would be one
        factors = [
            (mean_v, sum_g), (c, sum_gh), (3 * a, c), (mean_u, mean_v), (a, mean_v), (c, mean_u),
            (by_scale, c), (by_scale, mean_v), (r2, a), (r2, c), (r, sbar.to(r.dtype)),
            (r, mean_ph), (r, mean_p),
        ]  # fmt: skip
        v_g, c_gh, a_c, u_v, a_v, c_u, s_c, s_v, r2_a, r2_c, r_s, r_ph, r_p = (
            torch.stack([left for left, _ in factors])
            * torch.stack([right for _, right in factors])
        ).unbind()
        record(r * (sum_gv - v_g - c_gh), None)  # scale's second use
        gbar = s.combine([(by_scale, v)], sbar - s_c, x, tbar - s_v)
        on_xhat = r2 * (a_c - mean_uv + u_v) - r_ph
        constant = r2 * (a_v + c_u) - r_p
        xbar = s.combine([(-r2_a, v), (r_s - r2_c * scale, g)], on_xhat, x, constant)
        return gbar, xbar, None, None, None, None, None


def _back(
    g: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, r: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dscale = sum g xhat and dshift = sum g, the latter two [n, channels].

    ``scale`` is that of all images: [n * channels].
    """
    ones = x.new_ones(x.shape[:2].numel()) if scale is None else scale
    dx, dscale, dshift = _BACKWARD(g, x, mean, r, ones, *_as_one_image(x, groups), [True] * 3)
    return dx, dscale.view(x.shape[0], -1), dshift.view(x.shape[0], -1)


class _Stats:
    """Sums over channels and means over groups, each [n, channels]."""

    def __init__(
        self, scale: Tensor | None, mean: Tensor, r: Tensor, groups: int, x: Tensor
    ) -> None:
        self._groups, self._size = groups, x.shape[1:].numel() // groups
        channels = x.shape[1]
        dtype = accumulation_dtype(x.dtype)
        self.scale = x.new_ones(channels, dtype=dtype) if scale is None else scale.to(dtype)
        self.mean, self.r = (
            t.to(dtype).repeat_interleave(channels // groups, dim=1) for t in (mean, r)
        )

    def sums(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum_t t, sum_t t xhat) per channel."""
        plain = _positions(t).sum(2, dtype=self.r.dtype)
        return plain, self.r * (_dot(t, x) - self.mean * plain)

    def means_over_groups(self, sums: Tensor) -> Tensor:
        """Return means over a group from sums over its channels: [k, n, channels]."""
        by_group = split_axis(sums, 2, (self._groups, -1))  # [k, n, groups, channels of a group]
        means = by_group.sum(3, keepdim=True) / self._size
        return means.expand(by_group.shape).reshape(sums.shape)

    def combine(
        self, parts: list[tuple[Tensor, Tensor]], on_xhat: Tensor, x: Tensor, constant: Tensor
    ) -> Tensor:
        """Return sum coefficient * tensor + on_xhat * xhat + constant."""
        on_x = on_xhat * self.r  # xhat = r x - r mean
        constant = constant - on_x * self.mean
        out = torch.empty_like(x)
        for piece in cached_slices(x):
            (first, t), *others = parts
            target = _positions(out[piece])
            torch.addcmul(
                _spread(constant, piece, x),
                _spread(first, piece, x),
                _positions(t[piece]),
                out=target,
            )
            for coefficient, t in [*others, (on_x, x)]:
                target.addcmul_(_spread(coefficient, piece, x), _positions(t[piece]))
        return out


def _as_one_image(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Return torch's sizes for n images as one with n times the channels and groups.

    Its gradients of scale and shift, which torch sums over images, are then those of each image.
    """
    n, channels = x.shape[:2]
    return 1, n * channels, x.shape[2:].numel(), n * groups


def _of_every_row(values: Tensor | None, x: Tensor) -> Tensor | None:
    """Return scale or shift, [channels] or [n, channels], for the channels of all images."""
    return None if values is None else values.to(x.dtype).expand(x.shape[:2]).flatten()


def _positions(t: Tensor) -> Tensor:
    """Return a view [n, channels, positions]; vectors have one position."""
    return t.flatten(2) if t.ndim > 2 else t.unsqueeze(2)


def _spread(coefficient: Tensor, piece: slice, x: Tensor) -> Tensor:
    return coefficient[piece].unsqueeze(2).to(x.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return sum_t a b per sample and channel, without materialising the product."""
    n, channels = a.shape[:2]
    rows = (n * channels, 1, -1)
    out = torch.bmm(a.reshape(rows), b.reshape(rows).transpose(1, 2)).view(n, channels)
    return out.to(accumulation_dtype(a.dtype))


@rule(F.group_norm, always=True)
def _group_norm(capture: Capture, call: Call) -> Any:
    args = call.bind("input num_groups weight bias eps")
    return _normalise(capture, call, args, args["num_groups"], eps_of(args))


@rule(F.instance_norm, always=True)
def _instance_norm(capture: Capture, call: Call) -> Any:
    names = "input running_mean running_var weight bias use_input_stats momentum eps"
    args = call.bind(names)
    if args["running_mean"] is not None:
        raise UnsupportedModelError(
            "an instance norm that tracks running statistics keeps private data"
        )
    return _normalise(capture, call, args, args["input"].shape[1], eps_of(args))


def _normalise(capture: Capture, call: Call, args: Keywords, groups: int, eps: float) -> Any:
    """Run group norm, whose backward itself records the per-row gradients of scale and shift."""
    x_of_call, scale, shift = args["input"], args["weight"], args["bias"]
    if not torch.is_grad_enabled():  # a constant: nothing to record
        return call.run()
    if differs_by_row(scale, shift):
        xhat = F.group_norm(x_of_call, groups, None, None, eps)
        return affine_by_row(capture, xhat, scale, shift, x_of_call.ndim - 2)
    dtype = accumulation_dtype(x_of_call.dtype)
    x = x_of_call if x_of_call.dtype == dtype else x_of_call.to(dtype)
    what = capture.name_of(call, shift if scale is None else scale)
    weights = [capture.weight(scale), capture.weight(shift)]
    refuse_non_linear(what, weights)
    uses = [None if w is None else RecordedUse(w) for w in weights]
    count = capture.rows  # the graph holds ``record``, which must not hold the capture

    def record(dscale: Tensor, dshift: Tensor | None) -> None:
        for use, gradient in zip(uses, (dscale, dshift), strict=True):
            if use is not None and gradient is not None:
                use.record(split_axis(gradient, 0, (count, -1)))

    def for_all_rows(x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone()
        x, _ = capture.tape.output(x, what)  # so that backward runs
        images = x.flatten(0, 1).contiguous()
        affine = _affine_of(capture, images, (scale, shift), weights)
        y = apply(GroupNorm, images, *affine, groups, eps, record, count)
        y, _ = capture.tape.output(y, what, recorded=True)
        capture.tape.uses.extend(use for use in uses if use is not None)
        return y

    y = capture.all_rows(for_all_rows, x)
    same = x_of_call.dtype == dtype or torch.is_autocast_enabled(x.device.type)
    return y if same else y.to(x_of_call.dtype)


def _affine_of(
    capture: Capture,
    images: Tensor,
    values: tuple[Tensor | None, Tensor | None],
    weights: list[Weight | None],
) -> list[Tensor | None]:
    """Return scale and shift: [channels], or those of every row in the ascent step."""
    bare_values = [None if v is None else v.detach().to(images.dtype) for v in values]
    if capture.ascent is None or not any(w is not None for w in weights):
        return bare_values
    moved: list[Tensor | None] = []
    for value, weight, default in zip(bare_values, weights, (1.0, 0.0), strict=True):
        value = images.new_full(images.shape[1:2], default) if value is None else value
        step = None if weight is None else capture.ascent.step_of(weight)
        rows = value.expand(images.shape[:2])
        if step is not None:
            each = images.shape[0] // step.shape[0]
            step = step if each == 1 else step.repeat_interleave(each, dim=0)
            rows = rows + step.to(value.dtype)
        moved.append(rows)
    return moved
