"""What is behind the tensors that a model sees under vmap."""

from __future__ import annotations

import torch
from torch import Tensor


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor has one value per row of an enclosing vmap, at any level.

    Example:
        >>> seen = []
        >>> _ = torch.func.vmap(lambda x: seen.append(is_batched(x)) or x)(torch.ones(2))
        >>> seen, is_batched(torch.ones(2))
        ([True], False)
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def version(tensor: Tensor) -> int:
    """How often the memory of a tensor was changed in place: a batched tensor does not count it."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor._version
