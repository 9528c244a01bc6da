"""Torch's dropouts with masks that depend on the row's key alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.keyed import Handler, RowDraws, fill
from dpbam.errors import ArgumentError

_ALPHA = 1.7580993408473766  # SELU's scale times its alpha: what alpha dropout puts, negative
_OFF_BY_DEFAULT = {F.alpha_dropout, F.feature_alpha_dropout}


def _elements(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
    return _dropout(row, func, args, kwargs, lambda x: x.shape)


def _channels(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
    return _dropout(row, func, args, kwargs, lambda x: _per_channel(func, x))


def _alpha_elements(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
    return _alpha_dropout(row, func, args, kwargs, lambda x: x.shape)


def _alpha_channels(row: RowDraws, func: Handler, *args: Any, **kwargs: Any) -> Tensor:
    return _alpha_dropout(row, func, args, kwargs, lambda x: _per_channel(func, x))


def _native(
    row: RowDraws, func: Handler, input: Tensor, p: float, train: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(output, mask)."""
    if train is False:
        return func(input, p, train)  # type: ignore[no-any-return]
    keep = row.keep(input.shape, p, input)
    return input * _scaled(keep, p), keep.bool()


def _rrelu(
    row: RowDraws, func: Handler, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3,
    training: bool = False, inplace: bool = False, generator: Any = None,
) -> Tensor:  # fmt: skip
    """x for x >= 0, else a x with a slope a of its own, uniform between lower and upper."""
    if not training:
        return func(input, lower, upper, training)  # type: ignore[no-any-return]
    slope = lower + (upper - lower) * row.uniform(input)
    out = torch.where(input >= 0, input, slope * input)
    return fill(func, input, out) if inplace or func is torch.rrelu_ else out


def _dropout(
    row: RowDraws, func: Handler, args: tuple[Any, ...], kwargs: dict[str, Any],
    shape: Callable[[Tensor], tuple[int, ...]],
) -> Tensor:  # fmt: skip
    """x keep / (1 - p)."""
    x, p, training, in_place = _arguments(func, args, kwargs)
    if not training or p == 0:
        return x
    out = x * _scaled(row.keep(shape(x), p, x), p)
    return fill(func, x, out) if in_place else out


def _scaled(keep: Tensor, p: float) -> Tensor:
    return keep / (1 - p) if p < 1 else keep


def _alpha_dropout(
    row: RowDraws, func: Handler, args: tuple[Any, ...], kwargs: dict[str, Any],
    shape: Callable[[Tensor], tuple[int, ...]],
) -> Tensor:  # fmt: skip
    """a (x keep - alpha (1 - keep) + alpha p), a such that mean 0 and variance 1 stay so."""
    x, p, training, in_place = _arguments(func, args, kwargs)
    if not training or p == 0:
        return x
    keep = row.keep(shape(x), p, x)
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    out = a * (x * keep + _ALPHA * (keep - 1 + p))
    return fill(func, x, out) if in_place else out


def _per_channel(func: Handler, x: Tensor) -> tuple[int, ...]:
    """One draw per channel: [N, C, 1, ...], or [C, 1, ...] where torch takes x for one sample."""
    single = (func is F.dropout1d and x.ndim == 2) or (func is F.dropout3d and x.ndim == 4)
    kept = 1 if single else 2
    return (*x.shape[:kept], *(1 for _ in x.shape[kept:]))


def _arguments(
    func: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, float, bool, bool]:
    """(input, p, training, in place) of any of torch's dropouts, with their defaults."""
    names = ("input", "p", "training", "inplace")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    training = given.get("training", given.get("train", func not in _OFF_BY_DEFAULT))
    p = float(given.get("p", 0.5))
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout probability has to be between 0 and 1, but got {p}")
    in_place = given.get("inplace", False) or func.__name__.endswith("_")
    return given["input"], p, bool(training), bool(in_place)


SERVED: dict[Callable[..., Any], Handler] = {
    **dict.fromkeys([F.dropout, torch.dropout, torch.dropout_], _elements),
    **dict.fromkeys([F.dropout1d, F.dropout2d, F.dropout3d], _channels),
    **dict.fromkeys([torch.feature_dropout, torch.feature_dropout_], _channels),
    **dict.fromkeys([F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_], _alpha_elements),
    **dict.fromkeys([F.feature_alpha_dropout, torch.feature_alpha_dropout], _alpha_channels),
    torch.feature_alpha_dropout_: _alpha_channels,
    torch.native_dropout: _native,
    **dict.fromkeys([F.rrelu, torch.rrelu, torch.rrelu_], _rrelu),
}
