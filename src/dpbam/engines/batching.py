"""Leave ``vmap`` and re-enter it: from the tensor of one row to the tensor of all rows.

Inside ``torch.func.vmap`` a tensor that differs from row to row is *batched*: it looks like the
tensor of one row and holds all N. To compute something once for all rows, an engine takes the
tensor of all rows, ``[N, *row]``, computes with it outside vmap, and returns the result as a
batched one. A ``torch.autograd.Function`` with a ``vmap`` static method does the same at eight
times the cost per call; hence torch's internal functions, in this module alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_bdim,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch import vmap as _vmap
from torch.autograd import Function

from dpbam.params import map_rows

is_batched: Callable[[Tensor], bool] = is_batchedtensor
is_wrapped: Callable[[Tensor], bool] = is_functorch_wrapped_tensor


def differs_by_row(t: Tensor) -> bool:
    """Whether a tensor has one value per row of an enclosing vmap, at any depth of transforms."""
    while is_wrapped(t):
        if is_batched(t):
            return True
        t = get_unwrapped(t)
    return False


def innermost(t: Tensor) -> Tensor:
    """Return the tensor under all wrappers of vmap, grad and jvp, which hide ``requires_grad``."""
    while is_wrapped(t):
        t = get_unwrapped(t)
    return t


def version(t: Tensor) -> int:
    """Return how often a tensor's memory was changed in place, also for a wrapped tensor."""
    return innermost(t)._version


def depth() -> int:
    """Return the number of active functorch transforms."""
    return maybe_current_level() or 0


def all_rows(t: Tensor, rows: int) -> Tensor:
    """Return the tensor of all rows, [N, *row]; one that rows share is expanded."""
    if not is_batched(t):
        return t.expand(rows, *t.shape)
    rows_of_all: Tensor = get_unwrapped(t)
    axis = maybe_get_bdim(t)
    return rows_of_all if axis == 0 else rows_of_all.movedim(axis, 0)


def requires_grad(t: Tensor) -> bool:
    """Whether gradients of the pass outside vmap reach ``t``."""
    return bool((get_unwrapped(t) if is_batched(t) else t).requires_grad)


def batched(t: Tensor) -> Tensor:
    """Return [N, *row] as a batched tensor of the innermost active ``vmap``."""
    wrapped: Tensor = _add_batch_dim(t, 0, depth())
    return wrapped


@cache
def _load_decompositions() -> None:
    """Load what vmap computes some operations by, as its first call does."""
    _vmap.lazy_load_decompositions()  # type: ignore[attr-defined]


def run_rows(function: Callable[[Any], Any], tensors: list[Tensor]) -> Any:
    """Return ``function`` of each row of [N, ...] tensors, as ``torch.func.vmap`` does.

    Without vmap's handling of other axes, which takes longer than a small layer. Random draws are
    refused.
    """
    _load_decompositions()
    rows = tensors[0].shape[0]
    level = _vmap_increment_nesting(rows, "error")
    try:
        result = function([_add_batch_dim(t, 0, level) for t in tensors])
        return map_rows(lambda t: _remove_batch_dim(t, level, rows, 0), result)
    finally:
        _vmap_decrement_nesting()


def on_all_rows(function: Callable[..., Any], rows: int, *tensors: Tensor) -> Any:
    """Return ``function`` of the tensors of all rows, computed outside vmap, as batched tensors.

    Row i of the result of ``function`` must depend on row i of its arguments alone.

    Example:
        >>> import torch
        >>> def double(x):
        ...     return on_all_rows(lambda of_all: 2 * of_all, 3, x)
        >>> torch.func.vmap(double)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([2., 4., 6.])
    """
    outside = [all_rows(t, rows) for t in tensors]
    layer = pop_dynamic_layer_stack()
    try:
        result = function(*outside)
    finally:
        push_dynamic_layer_stack(layer)
    return tuple(map(batched, result)) if isinstance(result, tuple) else batched(result)


def apply(function: type[Function], *args: Any) -> Any:
    """Return ``function.apply(*args)`` outside vmap, without torch's handling of transforms.

    Torch looks for tensors of finished transforms among the arguments, which takes as long as a
    small operation.
    """
    return super(Function, function).apply(*args)  # type: ignore[misc]
