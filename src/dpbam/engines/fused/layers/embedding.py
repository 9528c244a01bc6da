"""Embeddings: linear layers whose input is a one-hot row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.rules import LOOKUPS, Call, bind, generic, name_of, rule, use_matrix
from dpbam.engines.fused.tape import Capture
from dpbam.errors import ArgumentTypeError


@dataclass(frozen=True)
class Embedding:
    """y = W[ids]: a holds ids [U, T], b [U, T, d], W [V, d].

    G_u = sum_t onehot(id_t) (x) b_t, and the Gram matrix of one-hot rows is 1 where ids are equal.
    """

    shape: tuple[int, ...]
    has_gram: bool = True

    def left_form(self, x: Tensor) -> Tensor:
        """[U, R, *] -> [U, T]."""
        return x.flatten(1)

    def right_form(self, y: Tensor) -> Tensor:
        """[U, R, *, d] -> [U, T, d]."""
        return y.flatten(1, -2)

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """[id_t == id_t']."""
        return (a[:, :, None] == c[:, None, :]).to(torch.get_default_dtype())

    def size(self, a: Tensor) -> Tensor:
        """|G_u|^2 <= c |B|^2, with c how often the most frequent id occurs."""
        most = a.mode(1).values
        return (a == most[:, None]).sum(1).sqrt()

    def rows(self, b: Tensor) -> Tensor:
        """[U, T, d]."""
        return b

    def from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """[U, T, d]."""
        return rows

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows of b added up by id, unit by unit."""
        units = a.shape[0]
        offset = torch.arange(units, device=a.device)[:, None] * self.shape[0]
        out = b.new_zeros(units * self.shape[0], self.shape[1])
        out = out.index_add(0, (a + offset).flatten(), b.flatten(0, 1))
        return out.view(units, *self.shape)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows of b added up by id."""
        rows = b.flatten(0, 1)
        return rows.new_zeros(self.shape).index_add(0, a.flatten(), rows)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """W[ids]."""
        return weight[a]

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """W_u[ids]."""
        unit = torch.arange(a.shape[0], device=a.device)[:, None]
        return weights[unit, a]

    def positions(self, b: Tensor) -> int:
        """T."""
        return b.shape[1]

    def gram_entries(self, t: int) -> int:
        """Two matrices."""
        return 2 * t * t

    def prefers_gram(self, t: int, pairs: int, *, twice: bool) -> bool:
        """The table is far larger than the rows that were looked up."""
        return True

    # --- a derivative in ids does not exist, and a table is never centred

    def _none(self, *_: Any) -> Any:
        raise ArgumentTypeError("an embedding has no gradient in its ids")

    gram_back = mean = mean_back = transpose_each = channels = _none


def as_linear(layer: Embedding, ids: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return an embedding's pair as a linear layer's, for tied weights: b (x) onehot."""
    return b, F.one_hot(ids, layer.shape[0]).to(b.dtype)


def tied(layer: Embedding) -> Linear:
    """Return the linear layer that an embedding is."""
    return Linear(layer.shape)


@rule(F.embedding, torch.embedding)
def _embedding(capture: Capture, call: Call) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    given = bind(names, call)
    if call.func is torch.embedding:
        given["input"], given["weight"] = given["weight"], given["input"]
    ids, weight, padding = given["input"], given["weight"], given["padding_idx"]
    source, what = capture.weight(weight), name_of(capture, call, weight)
    if given["max_norm"] is not None or given["scale_grad_by_freq"]:
        raise UnsupportedModelError(
            f"{what} uses max_norm or scale_grad_by_freq, which look at the batch"
        )
    if source is None or not source.selection or (padding is not None and padding >= 0):
        return generic(capture, call)

    def look_up(ids: Tensor, weight: Tensor, _: None) -> Tensor:
        return F.embedding(ids, weight)

    layer = Embedding(tuple(weight.shape))
    return use_matrix(capture, what, look_up, layer, (ids, weight, None))


LOOKUPS.update({F.embedding, torch.embedding})
