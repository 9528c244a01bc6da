"""Attention decomposed into functions that a ``TorchFunctionMode`` intercepts.

Torch runs ``F.multi_head_attention_forward`` and ``F.scaled_dot_product_attention`` as one function
each. Here they are linear layers, whose weights are slices of ``in_proj_weight``, products, a
softmax, and an ordinary dropout.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.params import Keywords

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_UNSUPPORTED = ("static_k", "static_v")


def arguments(args: tuple[Any, ...], kwargs: Keywords) -> Keywords:
    """Return the call's arguments by name, with defaults."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def reason_against(call: Keywords) -> str | None:
    """Return why :func:`multi_head` does not support this call, or None."""
    if any(call[name] is not None for name in _UNSUPPORTED):
        return "multi-head attention with static_k or static_v is not supported"
    return None


def multi_head(call: Keywords) -> tuple[Tensor, Tensor | None]:
    """Return softmax(q k^T / sqrt(d) + mask) v, by head, for inputs [length, N, width] as torch's.

    Without a batch axis inputs and output are [length, width].
    """
    if call["query"].ndim == 2:
        out, weights = multi_head(_with_batch_axis(call))
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    heads = call["num_heads"]
    q, *_ = projected = _projections(call)
    length, n, width = q.shape
    k, v = _longer(call, *projected[1:])
    q, k, v = (t.reshape(t.shape[0], n, heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    if call["add_zero_attn"]:
        k, v = (torch.cat([t, t.new_zeros(n, heads, 1, t.shape[-1])], 2) for t in (k, v))
    weights = None
    if call["need_weights"] or (call["training"] and call["dropout_p"]):
        scores = (q * (width // heads) ** -0.5) @ k.transpose(-2, -1)
        mask = _mask(call, scores)  # [N, heads, length, sources]
        if mask is not None:
            scores = scores + mask
        weights = F.dropout(scores.softmax(-1), call["dropout_p"], call["training"])
        mixed = weights @ v
    else:
        nothing = torch.empty((), dtype=q.dtype, device=q.device)
        scores_shape = nothing.expand(n, heads, length, k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, _mask(call, scores_shape))
    mixed = mixed.permute(2, 0, 1, 3).reshape(length, n, width)
    out = F.linear(mixed, call["out_proj_weight"], call["out_proj_bias"])
    if weights is None or not call["need_weights"]:
        return out, None
    return out, weights.mean(1) if call["average_attn_weights"] else weights


def _with_batch_axis(call: Keywords) -> Keywords:
    once = {id(call[name]): call[name].unsqueeze(1) for name in ("query", "key", "value")}
    inputs = {name: once[id(call[name])] for name in ("query", "key", "value")}  # keeps q is k
    padding = call["key_padding_mask"]
    return {**call, **inputs, "key_padding_mask": None if padding is None else padding[None]}


def _longer(call: Keywords, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with the learned ``bias_k`` and ``bias_v`` as the last source."""
    if call["bias_k"] is None:
        return k, v
    n = k.shape[1]
    longer_k = torch.cat([k, call["bias_k"].expand(1, n, -1)])
    return longer_k, torch.cat([v, call["bias_v"].expand(1, n, -1)])


def dot_product(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``F.scaled_dot_product_attention``; 0 for a query all of whose sources are masked."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    size = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * size) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores + _additive(
            ~attn_mask if attn_mask.dtype == torch.bool else attn_mask, scores
        )
    if attn_mask is None:
        return F.dropout(scores.softmax(-1), dropout_p, True) @ value
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(nothing, 0.0, torch.where(nothing, 0.0, scores).softmax(-1))
    return F.dropout(weights, dropout_p, True) @ value


def _projections(call: Keywords) -> list[Tensor]:
    if not call["use_separate_proj_weight"] and call["query"] is call["key"] is call["value"]:
        packed = F.linear(call["query"], call["in_proj_weight"], call["in_proj_bias"])
        return list(packed.chunk(3, -1))
    if call["use_separate_proj_weight"]:
        matrices = [call[f"{letter}_proj_weight"] for letter in "qkv"]
    else:
        matrices = list(call["in_proj_weight"].chunk(3))
    bias = call["in_proj_bias"]
    shifts = [None] * 3 if bias is None else list(bias.chunk(3))
    inputs = (call["query"], call["key"], call["value"])
    return [F.linear(*operands) for operands in zip(inputs, matrices, shifts, strict=True)]


def _mask(call: Keywords, scores: Tensor) -> Tensor | None:
    """Return the sum of both masks, broadcast to [N, heads, length, sources]."""
    n, heads = scores.shape[:2]
    total = None
    attention, padding = (_extend(call[m], scores) for m in ("attn_mask", "key_padding_mask"))
    if attention is not None:
        total = _additive(attention, scores)
        if total.ndim == 3:
            total = total.view(n, heads, *total.shape[1:])
    if padding is not None:
        extra = _additive(padding, scores)[:, None, None, :]
        total = extra if total is None else total + extra
    return total


def _extend(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """Return the mask extended by the sources that were added at the end, unmasked."""
    return None if mask is None else F.pad(mask, (0, scores.shape[-1] - mask.shape[-1]))


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, float("-inf"))
