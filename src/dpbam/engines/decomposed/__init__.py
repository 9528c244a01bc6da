"""Layers that torch runs as one opaque function, decomposed for the vmapped engines.

A ``TorchFunctionMode`` intercepts nothing inside multi-head attention and recurrent layers, so an
engine would miss the uses of their weights. Two more functions are decomposed because torch's
derivatives do not suffice: PReLU's fails under vmap, and that of an embedding with a padding index
blocks gradients in backward mode but not in forward mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.decomposed import attention
from dpbam.engines.decomposed.recurrent import DECOMPOSED

_PRELU = {torch.prelu, Tensor.prelu}
_INTERCEPTED = {F.multi_head_attention_forward, F.embedding, *DECOMPOSED, *_PRELU}


class Decompose(TorchFunctionMode):
    """Replace opaque functions by the same equations over functions that can be intercepted."""

    def intercepts(self, func: Any) -> bool:
        """Whether ``func`` may be replaced."""
        return func in _INTERCEPTED

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            call = attention.arguments(args, kwargs)
            if reason := attention.reason_against(call):
                raise UnsupportedModelError(reason)
            return attention.multi_head(call)
        if func in DECOMPOSED:
            return DECOMPOSED[func](*args, **kwargs)
        if func is F.embedding and len(args) + len(kwargs) > 2:
            return _embedding(*args, **kwargs)
        if func in _PRELU:
            return _prelu(*args, **kwargs)
        return func(*args, **kwargs)


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Return weight[input], with no derivative at the padding index."""
    y = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return y
    place = padding_idx + (weight.shape[0] if padding_idx < 0 else 0)
    return torch.where((input == place).unsqueeze(-1), y.detach(), y)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Return max(x, 0) + weight min(x, 0), by channel."""
    trailing = (1,) * (input.ndim - 2 if weight.numel() > 1 else 0)
    return input.clamp_min(0) + weight.reshape(-1, *trailing) * input.clamp_max(0)
