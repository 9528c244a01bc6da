"""Sums and products with a parameter: biases, positional embeddings, layer scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpbam.engines.batching import is_batched
from dpbam.engines.fused.generic import generic
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture
from dpbam.engines.fused.uses import ScaleUse, SumUse
from dpbam.engines.fused.weights import Weight


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def _add(capture: Capture, call: Call) -> Any:
    operands = _broadcast_pair(capture, call)
    if operands is None:
        return generic(capture, call)
    x, theta, weight = operands
    y, j = capture.output(x + capture.move(theta.detach(), weight), capture.name_of(call, theta))
    capture.tape.uses.append(SumUse(weight, tuple(theta.shape), j))
    return y


@rule(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply)
def _mul(capture: Capture, call: Call) -> Any:
    operands = _broadcast_pair(capture, call)
    if operands is None:
        return generic(capture, call)
    x, theta, weight = operands
    what = capture.name_of(call, theta)
    x, k = capture.input(x, what)
    y, j = capture.output(x * capture.move(theta.detach(), weight), what)
    capture.tape.uses.append(ScaleUse(weight, tuple(theta.shape), k, j))
    return y


@rule(Tensor.__iadd__, Tensor.add_, Tensor.__imul__, Tensor.mul_)
def _in_place(capture: Capture, call: Call) -> Any:
    """Run x += theta out of place, then copy the result in, so that aliases of x change too."""
    x, *others = call.args
    if not is_batched(x):
        return generic(capture, call)
    pure, func = (_add, torch.add) if "add" in call.name else (_mul, torch.mul)
    return x.copy_(pure(capture, Call(func, (x.clone(), *others), call.kwargs)))


def _broadcast_pair(capture: Capture, call: Call) -> tuple[Tensor, Tensor, Weight] | None:
    """Return (x, theta, its weight) if a linear weight broadcasts to x's shape, else None."""
    if call.kwargs or len(call.args) != 2 or not all(isinstance(a, Tensor) for a in call.args):
        return None
    for theta, x in (call.args, call.args[::-1]):
        weight = capture.weight(theta)
        if weight is not None and weight.linear and is_batched(x):
            fits = _broadcasts(theta.shape, x.shape)
            same = x.dtype == torch.result_type(x, theta)
            return (x, theta, weight) if fits and same else None
    return None


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, m) for n, m in pairs)
