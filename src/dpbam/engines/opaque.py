"""Functions that torch runs as one, shown to the vmapped engines step by step.

Inside multi-head attention and recurrent layers no ``TorchFunctionMode`` sees anything, so an
engine would miss the uses of their weights. Two more functions are decomposed because torch's
derivatives of them do not fit: PReLU's under vmap, and that of an embedding with a padding index,
which blocks gradients in backward mode and not in forward mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpbam.engines import multihead
from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.recurrent import DECOMPOSED

_PRELU = {torch.prelu, Tensor.prelu}


class Decompose(TorchFunctionMode):
    """Replaces opaque functions by the same equations over functions that can be seen."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            given = multihead.arguments(args, kwargs)
            if reason := multihead.unserved(given):
                raise UnsupportedModelError(reason)
            return multihead.forward(given)
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
    """weight[input], with no derivative at the padding index."""
    y = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return y
    place = padding_idx + (weight.shape[0] if padding_idx < 0 else 0)
    return torch.where((input == place).unsqueeze(-1), y.detach(), y)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """max(x, 0) + weight min(x, 0), by channel: torch's batching rule fails for its gradient."""
    trailing = (1,) * (input.ndim - 2 if weight.numel() > 1 else 0)
    return input.clamp_min(0) + weight.reshape(-1, *trailing) * input.clamp_max(0)
