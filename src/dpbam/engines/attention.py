"""The rule for ``torch.nn.MultiheadAttention``: taken apart, each step captured on its own."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from dpbam.engines import multihead
from dpbam.engines.base import CannotServe
from dpbam.engines.capture import Capture
from dpbam.engines.layer_rules import rule


@rule(F.multi_head_attention_forward)
def _attention(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = multihead.arguments(args, kwargs)
    if reason := multihead.unserved(given):
        raise CannotServe(reason)
    with capture:
        return multihead.forward(given)
