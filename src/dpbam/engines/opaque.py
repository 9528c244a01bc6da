"""Functions that torch runs as one, shown to the engines step by step.

Inside them no ``TorchFunctionMode`` sees anything, so an engine would miss the uses of their
weights: multi-head attention and recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpbam.engines import multihead
from dpbam.engines.base import CannotServe
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
                raise CannotServe(reason)
            return multihead.forward(given)
        if func in DECOMPOSED:
            return DECOMPOSED[func](*args, **kwargs)
        if func in _PRELU:
            return _prelu(*args, **kwargs)
        return func(*args, **kwargs)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """max(x, 0) + weight min(x, 0), by channel: torch's batching rule fails for its gradient."""
    trailing = (1,) * (input.ndim - 2 if weight.numel() > 1 else 0)
    return input.clamp_min(0) + weight.reshape(-1, *trailing) * input.clamp_max(0)
