"""The rule for ``torch.nn.MultiheadAttention``: the same sums, step by step.

Torch runs it as one function. Here it is taken apart into linear layers, whose weights are slices
of ``in_proj_weight``, and products that hold no parameter; each step is captured on its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.base import CannotServe
from dpbam.engines.capture import Capture
from dpbam.engines.layer_rules import rule

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_UNSERVED = ("bias_k", "bias_v", "static_k", "static_v")


@rule(F.multi_head_attention_forward)
def _attention(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["add_zero_attn"] or any(given[name] is not None for name in _UNSERVED):
        raise CannotServe("multi-head attention with bias_k, bias_v or add_zero_attn is not known")
    if given["query"].ndim != 3:
        raise CannotServe("multi-head attention without a batch axis is not known")
    with capture:
        return _forward(given)


def _forward(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """softmax(q k^T / sqrt(d) + mask) v: inputs [length, N, width], as torch has them."""
    heads = given["num_heads"]
    q, k, v = _projections(given)
    length, n, width = q.shape
    q, k, v = (t.reshape(t.shape[0], n, heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    scores = (q * (width // heads) ** -0.5) @ k.transpose(-2, -1)  # [N, heads, length, sources]
    mask = _mask(given, scores)
    if mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), given["dropout_p"], given["training"])
    mixed = (weights @ v).permute(2, 0, 1, 3).reshape(length, n, width)
    out = F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"])
    if not given["need_weights"]:
        return out, None
    return out, weights.mean(1) if given["average_attn_weights"] else weights


def _projections(given: dict[str, Any]) -> list[Tensor]:
    if given["use_separate_proj_weight"]:
        matrices = [given[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        matrices = list(given["in_proj_weight"].chunk(3))
    bias = given["in_proj_bias"]
    shifts = [None] * 3 if bias is None else list(bias.chunk(3))
    inputs = (given["query"], given["key"], given["value"])
    return [F.linear(*operands) for operands in zip(inputs, matrices, shifts, strict=True)]


def _mask(given: dict[str, Any], scores: Tensor) -> Tensor | None:
    """The two masks as one to add, broadcast to [N, heads, length, sources]."""
    n, heads = scores.shape[:2]
    total = None
    attention, padding = given["attn_mask"], given["key_padding_mask"]
    if attention is not None:
        total = _additive(attention, scores)
        if total.ndim == 3:
            total = total.view(n, heads, *total.shape[1:])
    if padding is not None:
        extra = _additive(padding, scores)[:, None, None, :]
        total = extra if total is None else total + extra
    return total


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))
