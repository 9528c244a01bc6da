"""Argument checks; their messages have the argument, the value and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from dpbam._names import did_you_mean
from dpbam.errors import ArgumentError, ArgumentTypeError


def number(name: str, value: object, *, hint: str = "") -> float:
    """Return ``value`` as a float; refuse NaN and what is not a number."""
    # the exact type first: isinstance with Real runs Python code, at every step of a training
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ArgumentTypeError(_say(f"{name} must be a number, got {value!r}", hint))
    try:
        x = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        raise ArgumentError(_say(f"{name} must be at most 1e308", hint)) from None
    if math.isnan(x):
        raise ArgumentError(_say(f"{name} must be a number, got NaN", hint))
    return x


def positive(name: str, value: object, *, hint: str = "") -> float:
    """Return ``value`` as a finite float > 0."""
    x = number(name, value, hint=hint)
    if not 0 < x < math.inf:
        raise ArgumentError(_say(f"{name} must be positive and finite, got {value!r}", hint))
    return x


def non_negative(name: str, value: object, *, hint: str = "") -> float:
    """Return ``value`` as a finite float >= 0."""
    x = number(name, value, hint=hint)
    if not 0 <= x < math.inf:
        raise ArgumentError(
            _say(f"{name} must be zero or positive and finite, got {value!r}", hint)
        )
    return x


def probability(name: str, value: object, *, hint: str = "") -> float:
    """Return ``value`` as a float strictly between 0 and 1."""
    x = number(name, value, hint=hint)
    if not 0 < x < 1:
        raise ArgumentError(_say(f"{name} must lie strictly between 0 and 1, got {value!r}", hint))
    return x


def count(name: str, value: object, *, least: int = 1, hint: str = "") -> int:
    """Return ``value`` as an int >= ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(_say(f"{name} must be a whole number, got {value!r}", hint))
    k = int(value.__index__())
    if k < least:
        raise ArgumentError(_say(f"{name} must be at least {least}, got {k}", hint))
    return k


#: missing values as text: pandas and NumPy write them so in ``astype(str)``
_MISSING = {"", "nan", "NaN", "NaT", "None", "<NA>"}


def owners(
    name: str, labels: object, place: Callable[[int], str] = lambda index: f"record {index}"
) -> None:
    """Refuse records without an owner (an empty name, NaN, None): together they would be a unit.

    Missing values that were made text ("nan") and masked entries are refused as well.

    ``place`` returns where a record is to be found, for the message.
    """
    import numpy as np

    values = np.asarray(labels)
    if np.ma.is_masked(labels):
        lost = np.ma.getmaskarray(np.ma.asarray(labels)).tolist()
    elif values.dtype.kind in "OUST":
        lost = [v is None or v != v or str(v).strip() in _MISSING for v in values.tolist()]
    else:
        lost = (values != values).tolist()  # NaN and NaT are the values unlike themselves
    if any(lost):
        raise ArgumentError(
            f"{sum(lost)} of {len(lost)} records have no {name}, {place(lost.index(True))} first: "
            f"together they would count as one {name}, and the guarantee would not hold for them; "
            "fill the column, or leave those records out"
        )


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is among ``choices``."""
    if value not in choices:
        raise ArgumentError(f"{name} {value!r} is unknown: {did_you_mean(value, choices)}")
    return value


def _say(sentence: str, hint: str) -> str:
    return f"{sentence}: {hint}" if hint else sentence
