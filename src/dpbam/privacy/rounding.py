"""Rounding of epsilons for display: never to a stronger guarantee."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def up(x: float, digits: int = 4) -> str:
    """Round up to significant digits: a stated epsilon is never below the true one.

    Example:
        >>> up(2.07001), up(2.99999), up(0.2), up(float("inf"))
        ('2.071', '3', '0.2', 'infinite')
    """
    return _round_to(x, digits, ROUND_CEILING)


def down(x: float, digits: int = 4) -> str:
    """Round down to significant digits: for lower bounds on epsilon, such as an audit's.

    Example:
        >>> down(2.07999), down(float("inf"))
        ('2.079', 'infinite')
    """
    return _round_to(x, digits, ROUND_FLOOR)


def _round_to(x: float, digits: int, rounding: str) -> str:
    if math.isinf(x):
        return "infinite"
    exact = Decimal(repr(float(x)))  # 0.2 is meant, not 0.2000000000000000111
    places = Decimal(1).scaleb(exact.adjusted() + 1 - digits)
    return f"{float(exact.quantize(places, rounding=rounding)):.{max(6, digits)}g}"
