"""Embeddings: linear layers whose input is a one-hot row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.bilinear import Layer, Pair, Purpose
from dpbam.engines.fused.generic import generic
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.rules import Call, rule, use_matrix
from dpbam.engines.fused.tape import LOOKUPS, Capture
from dpbam.errors import ArgumentTypeError


@dataclass(frozen=True)
class Embedding(Layer):
    """y = W[ids]: a holds ids [U, T], b [U, T, d], W [V, d].

    G_u = sum_t onehot(id_t) (x) b_t, and the Gram matrix of one-hot rows is 1 where ids are equal.
    """

    shape: tuple[int, ...]
    is_matrix_product: ClassVar[bool] = True
    has_input_gradient: ClassVar[bool] = False

    def left_form(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        return (a[:, :, None] == c[:, None, :]).to(torch.get_default_dtype())

    def size(self, a: Tensor) -> Tensor:
        """Return sqrt(c), c the count of the most frequent id: |G_u|^2 <= c |B|^2."""
        most = a.mode(1).values
        return (a == most[:, None]).sum(1).sqrt()

    def short_size(self, a: Tensor) -> Tensor:
        return self.size(a)

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        units = a.shape[0]
        offset = torch.arange(units, device=a.device)[:, None] * self.shape[0]
        out = b.new_zeros(units * self.shape[0], self.shape[1])
        out = out.index_add(0, (a + offset).flatten(), b.flatten(0, 1))
        return out.view(units, *self.shape)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        rows = b.flatten(0, 1)
        return rows.new_zeros(self.shape).index_add(0, a.flatten(), rows)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        return weight[a]

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        unit = torch.arange(a.shape[0], device=a.device)[:, None]
        return weights[unit, a]

    def prefers_gram(self, t: int, pairs: int, purpose: Purpose) -> bool:
        return math.prod(self.shape) > 2 * t * t  # the larger of the two is not computed

    def as_product(self, a: Tensor, b: Tensor) -> tuple[Layer, Pair]:
        """Return the linear layer with a and b exchanged, since the table is [V, d]."""
        return Linear(self.shape), (b, F.one_hot(a, self.shape[0]).to(b.dtype))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ArgumentTypeError("an embedding has no gradient in its ids, and no centred table")

    gram_back = mean = mean_back = transpose_each = channels = _refuse


@rule(F.embedding, torch.embedding)
def _embedding(capture: Capture, call: Call) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    arguments = call.bind(names)
    if call.func is torch.embedding:
        arguments["input"], arguments["weight"] = arguments["weight"], arguments["input"]
    ids, weight, padding = arguments["input"], arguments["weight"], arguments["padding_idx"]
    source, what = capture.weight(weight), capture.name_of(call, weight)
    if arguments["max_norm"] is not None or arguments["scale_grad_by_freq"]:
        raise UnsupportedModelError(
            f"{what} uses max_norm or scale_grad_by_freq, which depend on the batch"
        )
    if source is None or not source.selection or (padding is not None and padding >= 0):
        return generic(capture, call)

    def look_up(ids: Tensor, weight: Tensor, _: None) -> Tensor:
        return F.embedding(ids, weight)

    layer = Embedding(tuple(weight.shape))
    return use_matrix(capture, what, look_up, layer, (ids, weight, None))


LOOKUPS.update({F.embedding, torch.embedding})
