"""Scaled dot-product attention: computed for all rows at once, by torch's own kernel.

It has no parameters; without a rule vmap would use torch's slow fallback. Multi-head attention is
decomposed before (:mod:`dpbam.engines.decomposed`).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.batching import requires_grad
from dpbam.engines.decomposed.attention import dot_product
from dpbam.engines.fused.fold import split_axis
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture


@rule(F.scaled_dot_product_attention, always=True)
def _attention(capture: Capture, call: Call) -> Any:
    given = call.bind("query key value attn_mask dropout_p is_causal scale enable_gqa")
    operands = [given["query"], given["key"], given["value"]]
    mask = given["attn_mask"]
    tensors = operands if mask is None else [*operands, mask]
    if any(capture.weight(t) for t in tensors) or (mask is not None and requires_grad(mask)):
        with capture:  # the fast kernels have no gradient for a mask
            return dot_product(*call.args, **call.kwargs)
    if any(t.ndim != 4 for t in operands) or (mask is not None and mask.ndim > 4):
        return call.run()
    options = {k: given[k] for k in ("is_causal", "scale", "enable_gqa") if given[k] is not None}

    def for_all_rows(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        images = [t.flatten(0, 1) for t in (q, k, v)]
        placed = [_four_axes(m, q.shape[1]) for m in masks]
        attend: Any = F.scaled_dot_product_attention
        y: Tensor = attend(*images, *placed, **options)
        return split_axis(y, 0, q.shape[:2])

    return capture.all_rows(for_all_rows, *tensors)


def _four_axes(mask: Tensor, images: int) -> Tensor:
    """Return [N, *row] as [N * images, heads, length, sources], with 1 where axes broadcast."""
    row = (1,) * (5 - mask.ndim) + tuple(mask.shape[1:])
    mask = mask.reshape(mask.shape[0], *row)
    return mask.expand(-1, images, -1, -1, -1).flatten(0, 1)
