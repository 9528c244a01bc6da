"""Norms and sums in float32 or better, also inside ``torch.autocast``.

Inside autocast the model's forward pass runs in bfloat16. A clip factor or a clipped sum in
bfloat16 would have an error of 0.4%, and so would the sensitivity. The same holds of TF32, in which
CUDA computes convolutions by default, and matrix products if asked to: 10 bits in place of 23.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class full_precision:
    """Switch autocast and TF32 off in a block.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), full_precision():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """

    __slots__ = ("_kinds", "_products")

    def __enter__(self) -> None:
        self._kinds = [kind for kind in _device_types() if torch.is_autocast_enabled(kind)]
        products = _cuda_products() if torch.cuda.is_available() else []
        self._products = [(place, name, getattr(place, name)) for place, name, _ in products]
        for kind in self._kinds:
            torch.set_autocast_enabled(kind, False)
        for place, name, full in products:
            setattr(place, name, full)

    def __exit__(self, *error: object) -> None:
        for place, name, asked in self._products:
            setattr(place, name, asked)
        for kind in self._kinds:
            torch.set_autocast_enabled(kind, True)


def _cuda_products() -> list[tuple[Any, str, Any]]:
    """Return the settings that allow TF32, and the value of each that does not."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # torch 2.9; the older names must not be mixed with these
        return [(x, "fp32_precision", "ieee") for x in (cuda.matmul, cudnn.conv, cudnn.rnn)]
    return [(x, "allow_tf32", False) for x in (cuda.matmul, cudnn)]


def measured(method: _Function) -> _Function:
    """Run a method without a graph and in full precision."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        was_enabled = torch.is_grad_enabled()  # torch.no_grad takes as long as a small operation
        torch._C._set_grad_enabled(False)
        try:
            with full_precision():
                return method(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(was_enabled)

    return run  # type: ignore[return-value]


@cache
def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
