"""Hugging Face models with padding masks under vmap.

Before transformers builds the attention mask of a batch [N, T] of padding masks, it tests whether
all of them are ones, and then leaves the mask out. This branch depends on data, so vmap cannot run
it. Inside :func:`explicit_masks` transformers builds every mask that is data of a row. The result
is the same up to rounding; the model and its configuration are not modified.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpbam.engines.batching import differs_by_row

_IMPLEMENTATIONS = ("sdpa", "eager")  # the others are kernels that vmap cannot run


@contextmanager
def explicit_masks(model: nn.Module) -> Iterator[None]:
    """Keep transformers from branching on the values of masks that vmap has batched.

    It does nothing for a model without parts from transformers, and imports nothing. Masks that
    are not batched, and models that run without vmap, are not affected.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not _has_pretrained(model):
        yield
        return
    interface = masking.AttentionMaskInterface
    known = interface()
    originals = {name: known[name] for name in _IMPLEMENTATIONS if name in known}
    try:
        for name, original in originals.items():
            interface.register(name, partial(_explicit, original))
        yield
    finally:
        for name, original in originals.items():
            interface.register(name, original)


def _has_pretrained(model: nn.Module) -> bool:
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and any(
        isinstance(module, loaded.PreTrainedModel) for module in model.modules()
    )


def _explicit(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the mask function of transformers, without its shortcuts if the mask is batched."""
    padding = kwargs.get("attention_mask")
    if isinstance(padding, Tensor) and differs_by_row(padding):
        kwargs["allow_is_causal_skip"] = False
        if "allow_is_bidirectional_skip" in kwargs:
            kwargs["allow_is_bidirectional_skip"] = False
    return original(*args, **kwargs)
