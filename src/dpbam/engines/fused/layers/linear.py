"""Linear layers, and what is linear by another name: matrix products, bilinear forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.fused.bilinear import Layer, Pair
from dpbam.engines.fused.generic import generic
from dpbam.engines.fused.rules import Call, ready, rule, use_matrix
from dpbam.engines.fused.tape import UNSAFE_VIEW, Capture


@dataclass(frozen=True)
class Linear(Layer):
    """y = a W^T, the canonical form itself: a [U, T, i], b [U, T, o], W [o, i]."""

    shape: tuple[int, ...]
    is_matrix_product: ClassVar[bool] = True

    def is_outer_product(self, b: Tensor) -> bool:
        return b.shape[1] == 1

    def run_each(
        self, x: Tensor, weights: Tensor, offset: Tensor | None, *, swap: bool = False
    ) -> Tensor:
        if swap:
            return super().run_each(x, weights, offset, swap=swap)
        y = self.apply_each(weights, x)  # torch's own derivative, which needs no Python
        return y if offset is None else y + self.channels(offset, y)

    def ascend(self, x: Tensor, pairs: Sequence[Pair]) -> Tensor:
        return reduce(torch.add, (self.gram(x, a).to(b.dtype) @ b for a, b in pairs))

    def as_product(self, a: Tensor, b: Tensor) -> tuple[Layer, Pair]:
        return self, (a, b)


@rule(F.linear, always=True)
def _linear(capture: Capture, call: Call) -> Any:
    x, weight, bias = call.operands("input weight bias")
    trained = capture.weight(weight) is not None or capture.weight(bias) is not None
    if not ready(capture, x, weight, bias):
        return generic(capture, call) if trained else call.run()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # as one matrix: else torch multiplies slice by slice
        y = F.linear(x.flatten(0, -2), weight, bias)
        shape = (*x.shape[:-1], y.shape[-1])
        # no view: the tape would make another tensor of it (Tape.output)
        return UNSAFE_VIEW(y, shape) if trained and y.requires_grad else y.view(shape)

    if not trained:  # frozen: for all rows at once too, which vmap does by a slower path
        return capture.all_rows(lambda x: linear(x, weight, bias), x)
    layer = Linear(tuple(weight.shape))
    return use_matrix(capture, capture.name_of(call, weight), linear, layer, (x, weight, bias))


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul(capture: Capture, call: Call) -> Any:
    if len(call.args) == 2:
        x, weight = call.args
        source = capture.weight(weight)
        if source and source.selection and weight.ndim == 2 and x.ndim >= 2:
            with capture:
                return F.linear(x, weight.t())
    return generic(capture, call)


@rule(torch.addmm)
def _addmm(capture: Capture, call: Call) -> Any:
    if call.kwargs or len(call.args) != 3:
        return generic(capture, call)
    with capture:
        return torch.matmul(call.args[1], call.args[2]) + call.args[0]


@rule(F.bilinear)
def _bilinear(capture: Capture, call: Call) -> Any:
    """Run x1^T W_o x2 as a linear layer of the outer product of x1 and x2."""
    arguments = call.bind("input1 input2 weight bias")
    with capture:
        outer = (arguments["input1"].unsqueeze(-1) * arguments["input2"].unsqueeze(-2)).flatten(-2)
        return F.linear(outer, arguments["weight"].flatten(1), arguments["bias"])
