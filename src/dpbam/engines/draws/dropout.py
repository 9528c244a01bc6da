"""Torch's dropouts with masks that depend on the row's key alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.draws.row import Handler, RowDraws, fill
from dpbam.errors import ArgumentError
from dpbam.params import Keywords

_ALPHA = 1.7580993408473766  # SELU's scale times its alpha: alpha dropout puts -_ALPHA
_OFF_BY_DEFAULT = {F.alpha_dropout, F.feature_alpha_dropout}


def _dropout(
    drop: Callable[[Tensor, Tensor, float], Tensor], channels: bool, row: RowDraws, func: Handler,
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return drop(x, keep, p), with one draw of ``keep`` per element or per channel."""
    x, p, training, in_place = _arguments(func, args, kwargs)
    if not training or p == 0:
        return x
    out = drop(x, row.keep(_per_channel(func, x) if channels else x.shape, p, x), p)
    return fill(func, x, out) if in_place else out


def _plain(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Return x keep / (1 - p)."""
    return x * (keep / (1 - p) if p < 1 else keep)


def _alpha(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Return a (x keep - alpha (1 - keep) + alpha p), where a preserves mean 0 and variance 1."""
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    return a * (x * keep + _ALPHA * (keep - 1 + p))


def _native(
    row: RowDraws, func: Handler, input: Tensor, p: float, train: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return (output, mask)."""
    if train is False:
        return func(input, p, train)  # type: ignore[no-any-return]
    keep = row.keep(input.shape, p, input)
    return _plain(input, keep, p), keep.bool()


def _rrelu(
    row: RowDraws, func: Handler, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3,
    training: bool = False, inplace: bool = False, generator: Any = None,
) -> Tensor:  # fmt: skip
    """Return x for x >= 0, else a x with a slope a per element, uniform in [lower, upper)."""
    if not training:
        return func(input, lower, upper, training)  # type: ignore[no-any-return]
    slope = lower + (upper - lower) * row.uniform(input)
    out = torch.where(input >= 0, input, slope * input)
    return fill(func, input, out) if inplace or func is torch.rrelu_ else out


def _per_channel(func: Handler, x: Tensor) -> tuple[int, ...]:
    """Return [N, C, 1, ...], or [C, 1, ...] where torch interprets x as one sample."""
    single = (func is F.dropout1d and x.ndim == 2) or (func is F.dropout3d and x.ndim == 4)
    axes = 1 if single else 2
    return (*x.shape[:axes], *(1 for _ in x.shape[axes:]))


def _arguments(
    func: Handler, args: tuple[Any, ...], kwargs: Keywords
) -> tuple[Tensor, float, bool, bool]:
    """Return (input, p, training, in place) of any of torch's dropouts, with their defaults."""
    names = ("input", "p", "training", "inplace")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    training = arguments.get("training", arguments.get("train", func not in _OFF_BY_DEFAULT))
    p = float(arguments.get("p", 0.5))
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout probability has to be between 0 and 1, but got {p}")
    in_place = arguments.get("inplace", False) or func.__name__.endswith("_")
    return arguments["input"], p, bool(training), bool(in_place)


_ELEMENTS: list[Handler] = [F.dropout, torch.dropout, torch.dropout_]
_CHANNELS: list[Handler] = [
    F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_,
]  # fmt: skip
_ALPHA_ELEMENTS: list[Handler] = [F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_]
_ALPHA_CHANNELS: list[Handler] = [
    F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
]  # fmt: skip
KEYED: dict[Callable[..., Any], Handler] = {
    **dict.fromkeys(_ELEMENTS, partial(_dropout, _plain, False)),
    **dict.fromkeys(_CHANNELS, partial(_dropout, _plain, True)),
    **dict.fromkeys(_ALPHA_ELEMENTS, partial(_dropout, _alpha, False)),
    **dict.fromkeys(_ALPHA_CHANNELS, partial(_dropout, _alpha, True)),
    torch.native_dropout: _native,
    **dict.fromkeys([F.rrelu, torch.rrelu, torch.rrelu_], _rrelu),
}
