"""Multi-head attention step by step, for whoever has to see its parts.

Torch runs ``F.multi_head_attention_forward`` as one function, inside which no
``TorchFunctionMode`` sees anything. Here it is taken apart into linear layers, whose weights are
slices of ``in_proj_weight``, products, and one ordinary dropout.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_UNSERVED = ("bias_k", "bias_v", "static_k", "static_v")


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def unserved(given: dict[str, Any]) -> str | None:
    """Why :func:`forward` cannot compute this call, or None."""
    if given["add_zero_attn"] or any(given[name] is not None for name in _UNSERVED):
        return "multi-head attention with bias_k, bias_v or add_zero_attn is not known"
    if given["query"].ndim != 3:
        return "multi-head attention without a batch axis is not known"
    return None


def forward(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
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
    if not given["use_separate_proj_weight"] and given["query"] is given["key"] is given["value"]:
        packed = F.linear(given["query"], given["in_proj_weight"], given["in_proj_bias"])
        return list(packed.chunk(3, -1))
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
