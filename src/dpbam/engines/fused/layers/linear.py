"""Linear layers, and what is one in disguise: matrix products, bilinear forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.fused.layers.base import Costs, lengths
from dpbam.engines.fused.rules import Call, bind, generic, name_of, ready, rule, use_matrix
from dpbam.engines.fused.tape import Capture


@dataclass(frozen=True)
class Linear:
    """y = a W^T in the canonical form: a [U, T, i], b [U, T, o], W [o, i]."""

    shape: tuple[int, ...]
    has_gram: bool = True

    def left_form(self, x: Tensor) -> Tensor:
        """[U, R, *, i] -> [U, T, i]."""
        return x.flatten(1, -2)

    def right_form(self, y: Tensor) -> Tensor:
        """[U, R, *, o] -> [U, T, o]."""
        return y.flatten(1, -2)

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """A C^T."""
        return a @ c.transpose(1, 2)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """Weights A."""
        return weights @ a

    def size(self, a: Tensor) -> Tensor:
        """|A|."""
        return lengths(a)

    def mean(self, a: Tensor) -> Tensor:
        """Mean over the features."""
        return a.mean(-1)

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """Each feature's share of the mean."""
        return (weights / a.shape[-1]).unsqueeze(2).expand(a.shape)

    def rows(self, b: Tensor) -> Tensor:
        """[U, T, o]."""
        return b

    def from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """[U, T, o]."""
        return rows

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """Features are last."""
        return values.unsqueeze(-2)

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        """B^T A."""
        return b.transpose(1, 2) @ a

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """B^T A over all units at once."""
        return b.flatten(0, 1).t() @ a.flatten(0, 1)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """A W^T."""
        return F.linear(a, weight)

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """A_u W_u^T."""
        return a @ weights.transpose(1, 2)

    def transpose_each(self, weights: Tensor, b: Tensor, like: Tensor) -> Tensor:
        """B_u W_u."""
        return b @ weights

    def positions(self, b: Tensor) -> int:
        """T."""
        return b.shape[1]

    def gram_entries(self, t: int) -> int:
        """Two matrices."""
        return 2 * t * t

    def prefers_gram(self, t: int, pairs: int, *, twice: bool) -> bool:
        """By the cost model."""
        o, i = self.shape
        return Costs(t, t, (i, o), i, entry=10).gram_is_cheaper(pairs, twice=twice)


@rule(F.linear)
def _linear(capture: Capture, call: Call) -> Any:
    given = bind("input weight bias", call)
    x, weight, bias = given["input"], given["weight"], given["bias"]
    if not ready(capture, x, weight, bias):
        return generic(capture, call)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.contiguous(), weight, bias)  # else torch multiplies slice by slice

    layer = Linear(tuple(weight.shape))
    return use_matrix(capture, name_of(capture, call, weight), linear, layer, (x, weight, bias))


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
    """x1^T W_o x2 is linear in the outer product of x1 and x2."""
    given = bind("input1 input2 weight bias", call)
    with capture:
        outer = (given["input1"].unsqueeze(-1) * given["input2"].unsqueeze(-2)).flatten(-2)
        return F.linear(outer, given["weight"].flatten(1), given["bias"])
