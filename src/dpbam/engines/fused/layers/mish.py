"""Mish with its first and second derivative written out.

mish(x) = x w with w = tanh(log(1 + e^x)). With e = e^x, n = e (e + 2) and d = 1 / (n + 2)::

    w = n d        s = dw/dx = 4 e (e + 1) d^2        sigma = e / (e + 1)
    f'  = w + x s
    f'' = s (2 + x (1 - sigma (1 + 2 w)))

One exponential in place of torch's exp, log and tanh. The exponential caps x at 20, above which
f' = 1 to the last bit, so that nothing overflows (torch's own second derivative is NaN from x = 89
in float32).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.batching import apply
from dpbam.engines.fused.fold import cached_slices
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture

_CAP = 20.0


class Mish(torch.autograd.Function):
    """y = mish(x); ``twice``: a second derivative will follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, twice: bool) -> Tensor:
        y, first = torch.empty_like(x), torch.empty_like(x)
        second = torch.empty_like(x) if twice else None
        for piece in cached_slices(x):
            _mish(x[piece], y[piece], first[piece], None if second is None else second[piece])
        ctx.twice = twice
        if second is None:
            ctx.save_for_backward(first)
        else:
            ctx.save_for_backward(x, first, second)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if not ctx.twice:
            return g * ctx.saved_tensors[0], None
        x, first, second = ctx.saved_tensors
        return apply(_MishBack, g, x, first, second), None


class _MishBack(torch.autograd.Function):
    """g f'(x), as a function of g and x."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(g, first, second)
        return g * first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> Any:
        g, first, second = ctx.saved_tensors
        in_x = torch.empty_like(v)
        for piece in cached_slices(v):
            torch.mul(g[piece], second[piece], out=in_x[piece]).mul_(v[piece])
        return v * first, in_x, None, None


def _mish(x: Tensor, y: Tensor, first: Tensor, second: Tensor | None) -> None:
    """Fill y, f'(x) and f''(x)."""
    e = x.clamp(max=_CAP).exp_()
    n = torch.addcmul(2 * e, e, e)  # e (e + 2)
    d = (n + 2).reciprocal_()
    w = n.mul_(d)
    torch.mul(x, w, out=y)
    up = e + 1
    s = (e * up).mul_(d).mul_(d).mul_(4.0)
    torch.addcmul(w, x, s, out=first)
    if second is not None:
        sigma = e.div_(up)
        inner = torch.addcmul(sigma, sigma, w, value=2).neg_().add_(1)  # 1 - sigma (1 + 2 w)
        torch.mul(inner, x, out=second).add_(2).mul_(s)


@rule(F.mish, always=True)
def _mish_rule(capture: Capture, call: Call) -> Any:
    arguments = call.bind("input inplace")
    if arguments["inplace"]:
        return call.run()

    def mish(x: Tensor) -> Tensor:
        y: Tensor = apply(Mish, x, capture.twice)
        return y

    return capture.all_rows(mish, arguments["input"])
