"""Means and paired differences over seeds, with Student's t intervals.

Paired: runs of one seed share initial weights and data order, so their difference varies less than
the runs themselves do, and its interval is the one to read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over ``count`` seeds and its 95% t interval; deviation and interval NaN of one seed.

    Attributes:
        mean: m = sum x / k.
        deviation: s, the sample's (k - 1 in the denominator).
        low: m - t s / sqrt(k), t the 97.5% quantile of Student's t with k - 1 degrees of freedom.
        high: m + t s / sqrt(k).
        count: k.
    """

    mean: float
    deviation: float
    low: float
    high: float
    count: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of ``values`` and its interval.

    Example:
        >>> e = estimate([0.90, 0.92, 0.94])
        >>> round(e.mean, 3), round(e.low, 3), round(e.high, 3)
        (0.92, 0.87, 0.97)
    """
    from scipy.stats import t

    k = len(values)
    if k == 0:
        raise ValueError("there are no values to average")
    mean = statistics.fmean(values)
    if k == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1)
    deviation = statistics.stdev(values)
    half = float(t.ppf((1 + LEVEL) / 2, k - 1)) * deviation / math.sqrt(k)
    return Estimate(mean, deviation, mean - half, mean + half, k)


def paired_difference(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """The mean of one[seed] - other[seed] over the seeds that both have.

    Example:
        >>> paired_difference({0: 0.93, 1: 0.95}, {0: 0.92, 1: 0.94}).mean
        0.01...
    """
    shared = sorted(set(one) & set(other))
    if not shared:
        raise ValueError("no seed is in both: a paired difference needs shared seeds")
    return estimate([one[seed] - other[seed] for seed in shared])
