"""Norms and sums in float32 or better, also inside ``torch.autocast``.

Inside autocast the model's forward pass runs in bfloat16. A clip factor or a clipped sum in
bfloat16 would have an error of 0.4%, and so would the sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch autocast off in a block.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), full_precision():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    kinds = [kind for kind in _device_types() if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


def measured(method: _Function) -> _Function:
    """Run a method without a graph and in full precision."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), full_precision():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
