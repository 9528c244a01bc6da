"""The random numbers of one row: each draw is a function of the row's key and its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpbam.engines.batching import differs_by_row, version
from dpbam.errors import ArgumentError
from dpbam.privacy.randomness import derive, keyed_bits

Handler = Callable[..., Any]  # (row, func, *args, **kwargs) -> the result of func, keyed
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_NEVER_NEGATIVE = "never_negative"  # attribute of uniform draws: the version that is >= 0


class RowDraws:
    """Draw for one row: draw number n at position i is a hash of (key, n, i).

    Args:
        key: int64 scalar; under vmap it is batched, and so is every draw. A function is called
            at the first draw.
    """

    def __init__(self, key: Tensor | Callable[[], Tensor]) -> None:
        self._key = key
        self._number = 0

    def bits(self, shape: tuple[int, ...], digits: int, device: torch.device) -> Tensor:
        """Return the next draw: integers uniform in [0, 2^digits)."""
        if torch._C._current_graph_task_id() != -1:  # inside backward
            raise ArgumentError(
                "the model draws random numbers in a part that backward recomputes (gradient "
                "checkpointing), where they would differ from those of forward: set its "
                "dropout to 0, or switch checkpointing off"
            )
        key = derive(self._read_key().to(device), self._number)
        self._number += 1
        return keyed_bits(key, shape, digits)

    def uniform(self, template: Tensor) -> Tensor:
        """Draw uniform numbers in [0, 1), with the shape, dtype and device of ``template``."""
        digits = _DIGITS[template.dtype]
        bits = self.bits(template.shape, digits, template.device)
        numbers = bits.to(template.dtype) / 2.0**digits
        numbers.__dict__[_NEVER_NEGATIVE] = version(numbers)
        return numbers

    def open_uniform(self, template: Tensor, *lead: int) -> Tensor:
        """Draw uniform numbers in (0, 1), never 0 or 1: [*lead, *shape], in float32 at least."""
        dtype = torch.float64 if template.dtype == torch.float64 else torch.float32
        digits = _DIGITS[dtype]
        bits = self.bits((*lead, *template.shape), digits - 1, template.device)
        return (2 * bits + 1).to(dtype) / 2.0**digits

    def normal(self, template: Tensor) -> Tensor:
        """Draw standard normal numbers, by Box and Muller: sqrt(-2 log u) cos(2 pi v)."""
        u, v = self.open_uniform(template, 2).unbind(0)
        return ((-2 * u.log()).sqrt() * (2 * torch.pi * v).cos()).to(template.dtype)

    def exponential(self, template: Tensor) -> Tensor:
        """Draw exponential numbers of mean 1, never 0."""
        return -self.open_uniform(template).log()

    def happens(self, shape: tuple[int, ...], p: float | Tensor, device: torch.device) -> Tensor:
        """Draw True with probability p, rounded to a multiple of 2^-24, whatever the dtype."""
        return self.bits(shape, 24, device).float() / (1 << 24) < p

    def keep(self, shape: tuple[int, ...], p: float, x: Tensor) -> Tensor:
        """Draw 0 with probability p, else 1, in x's dtype."""
        return (~self.happens(shape, p, x.device)).to(x.dtype)

    def empty(self, template: Tensor) -> Tensor:
        """Return zeros into which draws can be written: under vmap one tensor per row."""
        key = self._read_key()
        return key.new_zeros(template.shape, dtype=template.dtype, device=template.device)

    def _read_key(self) -> Tensor:
        if not isinstance(self._key, Tensor):
            self._key = self._key()
        return self._key


def fill(func: Callable[..., Any], tensor: Tensor, values: Tensor) -> Tensor:
    """Write the values into the tensor, as the in-place ``func`` does."""
    if differs_by_row(values) and not differs_by_row(tensor):
        raise ArgumentError(
            f"the model draws with {_name(func)} into a tensor that all rows share: draw into "
            "torch.empty(...) or x.new_empty(...) made in forward, or use torch.rand, torch.randn "
            "or torch.bernoulli"
        )
    return tensor.copy_(values)


def below_zero(args: tuple[Any, ...]) -> Tensor | None:
    """Return the result of ``torch.rand(...) < p`` if p = 0, when it needs no draw; else None.

    Models that skip layers at random compute this for every layer, also with p = 0, and branch on
    it, which vmap cannot run.
    """
    numbers, p = (*args, None, None)[:2]
    if not isinstance(p, float | int) or p > 0:
        return None
    if not isinstance(numbers, Tensor):
        return None
    if getattr(numbers, _NEVER_NEGATIVE, None) != version(numbers):
        return None
    return torch.zeros(numbers.shape, dtype=torch.bool, device=numbers.device)


def refusal(func: Callable[..., Any]) -> ArgumentError:
    """Return the error for a draw that cannot be keyed."""
    return ArgumentError(
        f"the model draws random numbers with {_name(func)}, which would depend on the "
        "micro-batch: use torch.nn.Dropout, or draw from dpbam.privacy.randomness.keyed_uniform, "
        "or put the model in eval"
    )


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))
