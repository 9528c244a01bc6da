"""Torch's samplers with values that depend on the row's key alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.draws.row import Handler, RowDraws, fill, refusal
from dpbam.params import Keywords

_EXACT = 53  # bits of an integer draw


def _empty(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
    """Return zeros for uninitialised memory, one tensor per row, so that draws can be written."""
    memory: Tensor = func(*args, **kwargs)
    if memory.requires_grad or memory.layout != torch.strided or kwargs.get("out") is not None:
        return memory
    return row.empty(memory)


def _allocate(func: Handler, empty: Handler, args: tuple[Any, ...], kwargs: Keywords) -> Tensor:
    """Return a tensor as ``func`` would, by ``empty``, which takes the same arguments."""
    if kwargs.get("out") is not None or kwargs.get("requires_grad"):
        raise refusal(func)
    return empty(*args, **{k: v for k, v in kwargs.items() if k != "generator"})  # type: ignore


def _sampler(draw: Callable[[RowDraws, Tensor], Tensor], empty: Handler) -> Handler:
    """Return the sampler of ``draw(row, tensor)`` for a tensor as ``empty`` allocates it."""

    def handler(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
        return draw(row, _allocate(func, empty, args, kwargs))

    return handler


def _integers(row: RowDraws, t: Tensor, low: int, high: int) -> Tensor:
    """Draw integers in [low, high), with a bias of at most (high - low) 2^-53."""
    return (row.bits(t.shape, _EXACT, t.device) % (high - low) + low).to(t.dtype)


def _randint(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
    """Draw by (high, size) or (low, high, size)."""
    numbers = [a for a in args if isinstance(a, int)]
    size = kwargs.pop("size", None) or args[-1]
    low, high = _bounds(numbers, kwargs)
    kwargs.setdefault("dtype", torch.int64)
    return _integers(row, _allocate(func, torch.empty, (size,), kwargs), low, high)


def _randint_like(row: RowDraws, func: Handler, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = _bounds(list(args), kwargs)
    return _integers(row, _allocate(func, torch.empty_like, (input,), kwargs), low, high)


def _random(row: RowDraws, func: Handler, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw in place by random_(to) or random_(from, to)."""
    kwargs = {{"from": "low", "to": "high"}.get(k, k): v for k, v in kwargs.items()}
    if not args and "high" not in kwargs:
        raise refusal(func)
    low, high = _bounds(list(args), kwargs)
    return fill(func, tensor, _integers(row, tensor, low, high))


def _bounds(numbers: list[int], kwargs: Keywords) -> tuple[int, int]:
    """Return (low, high), positional or by name; low is 0 by default."""
    if "high" in kwargs:
        numbers = [*numbers, kwargs.pop("high")]
    if "low" in kwargs:
        numbers = [kwargs.pop("low"), *numbers]
    return (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _randperm(row: RowDraws, func: Handler, n: int, **kwargs: Any) -> Tensor:
    kwargs.setdefault("dtype", torch.int64)
    t = _allocate(func, torch.empty, (n,), kwargs)
    return row.bits((n,), _EXACT, t.device).argsort().to(t.dtype)


def _bernoulli(
    row: RowDraws, func: Handler, input: Tensor, p: float | None = None, *, generator: Any = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if out is not None:
        raise refusal(func)
    return row.happens(input.shape, input if p is None else p, input.device).to(input.dtype)


def _bernoulli_in_place(
    row: RowDraws, func: Handler, tensor: Tensor, p: float | Tensor = 0.5, *, generator: Any = None
) -> Tensor:
    return fill(func, tensor, row.happens(tensor.shape, p, tensor.device))


def _normal(
    row: RowDraws, func: Handler, mean: float | Tensor, std: float | Tensor = 1.0,
    size: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return mean + std z; the shape is that of the parameters, or ``size``."""
    if size is not None:
        return mean + std * row.normal(_allocate(func, torch.empty, (size,), kwargs))
    kwargs.pop("generator", None)
    if kwargs:
        raise refusal(func)
    return mean + std * row.normal(torch.as_tensor(mean + std))


def _in_place(sample: Callable[..., Tensor]) -> Handler:
    """Return the in-place sampler of ``sample(row, tensor, *parameters)``."""

    def handler(
        row: RowDraws, func: Handler, tensor: Tensor, *args: Any, generator: Any = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        kwargs = {{"from": "low", "to": "high"}.get(k, k): v for k, v in kwargs.items()}
        return fill(func, tensor, sample(row, tensor, *args, **kwargs))

    return handler


def _uniform_values(row: RowDraws, t: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * row.uniform(t)


def _normal_values(row: RowDraws, t: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * row.normal(t)


def _log_normal_values(row: RowDraws, t: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (mean + std * row.normal(t)).exp()


def _exponential_values(row: RowDraws, t: Tensor, lambd: float = 1.0) -> Tensor:
    return row.exponential(t) / lambd


def _cauchy_values(row: RowDraws, t: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * (torch.pi * (row.open_uniform(t) - 0.5)).tan()


def _multinomial(
    row: RowDraws, func: Handler, input: Tensor, num_samples: int, replacement: bool = False,
    *, generator: Any = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the indices of the largest weights / exponential draws."""
    if out is not None:
        raise refusal(func)
    if not replacement:
        return (input / row.exponential(input)).topk(num_samples, -1).indices
    many = input.unsqueeze(-2).expand(*input.shape[:-1], num_samples, input.shape[-1])
    return (many / row.exponential(many)).argmax(-1)


def _gumbel_softmax(
    row: RowDraws, func: Handler, logits: Tensor, tau: float = 1.0, hard: bool = False,
    eps: float = 1e-10, dim: int = -1,
) -> Tensor:  # fmt: skip
    """Return softmax((logits - log e) / tau), e exponential; hard: its maximum as 0 and 1."""
    soft = ((logits - row.exponential(logits).log().to(logits.dtype)) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


KEYED: dict[Callable[..., Any], Handler] = {
    **dict.fromkeys([torch.empty, torch.empty_like, Tensor.new_empty], _empty),
    torch.rand: _sampler(RowDraws.uniform, torch.empty),
    torch.rand_like: _sampler(RowDraws.uniform, torch.empty_like),
    torch.randn: _sampler(RowDraws.normal, torch.empty),
    torch.randn_like: _sampler(RowDraws.normal, torch.empty_like),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_in_place,
    torch.normal: _normal,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.random_: _random,
    Tensor.uniform_: _in_place(_uniform_values),
    Tensor.normal_: _in_place(_normal_values),
    Tensor.log_normal_: _in_place(_log_normal_values),
    Tensor.exponential_: _in_place(_exponential_values),
    Tensor.cauchy_: _in_place(_cauchy_values),
    F.gumbel_softmax: _gumbel_softmax,
}
