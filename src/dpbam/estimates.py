"""Means and paired differences over seeds, with Student's t intervals.

Runs of one seed share initial weights and data order. Their paired difference varies less than the
runs themselves do, so its interval is the one to read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from dpbam.errors import ArgumentError, ArgumentTypeError

Verdict = Literal["better", "worse", "no winner"]
LEVEL = 0.95
POWER = 0.8
K = TypeVar("K")


@dataclass(frozen=True)
class Estimate:
    """A mean over k seeds and its 95% t interval.

    Deviation and interval are NaN for one seed, and where a value is not finite.

    Attributes:
        mean: m = sum x / k.
        deviation: s, the sample standard deviation (k - 1 in the denominator).
        low: m - t s / sqrt(k), t the 97.5% quantile of Student's t with k - 1 degrees of freedom.
        high: m + t s / sqrt(k).
        count: k.
    """

    mean: float
    deviation: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> Verdict:
        """Judge a difference: no winner if its interval contains 0, or there is none."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no winner"

    @property
    def effect_size(self) -> float:
        """Cohen's d_z = m / s of paired differences; NaN for one seed.

        Example:
            >>> round(estimate([1.0, 2.0, 3.0]).effect_size, 6)
            2.0
        """
        return self.mean / self.deviation if self.deviation > 0 else math.nan

    @property
    def smallest_detectable(self) -> float:
        """The smallest true difference that k seeds would have shown in 80% of repetitions.

        d s / sqrt(k), with d such that P(T > t) = 0.8 for T noncentral t with k - 1 degrees of
        freedom and noncentrality d; s is taken as the true deviation. NaN for one seed.
        """
        from scipy.optimize import brentq
        from scipy.stats import nct, t

        if self.count < 2:
            return math.nan
        freedom = self.count - 1
        critical = t.ppf((1 + LEVEL) / 2, freedom)
        d = brentq(lambda d: nct.sf(critical, freedom, d) - POWER, 0.1, 5 * critical)
        return float(d) * self.deviation / math.sqrt(self.count)

    def to_dict(self) -> dict[str, float]:
        """Return plain values for JSON, with effect size and smallest detectable difference."""
        return {
            **asdict(self),
            "effect_size": self.effect_size,
            "smallest_detectable": self.smallest_detectable,
        }


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Estimate the mean of ``values`` with its t interval of confidence ``level``.

    Example:
        >>> e = estimate([0.90, 0.92, 0.94])
        >>> round(e.mean, 3), round(e.low, 3), round(e.high, 3)
        (0.92, 0.87, 0.97)
    """
    from scipy.stats import t

    k = len(values)
    if k == 0:
        raise ArgumentError("there are no values to average")
    mean = statistics.fmean(values)
    if k == 1 or not math.isfinite(mean):  # of a training that diverged
        return Estimate(mean, math.nan, math.nan, math.nan, k)
    deviation = statistics.stdev(values)
    half = float(t.ppf((1 + level) / 2, k - 1)) * deviation / math.sqrt(k)
    return Estimate(mean, deviation, mean - half, mean + half, k)


def paired_difference(
    one: Mapping[K, float], other: Mapping[K, float], level: float = LEVEL
) -> Estimate:
    """Estimate the mean of one[seed] - other[seed] over the seeds that both have.

    Example:
        >>> paired_difference({0: 0.93, 1: 0.95}, {0: 0.92, 1: 0.94}).mean
        0.01...
    """
    for scores in (one, other):
        if not isinstance(scores, Mapping):
            raise ArgumentTypeError(
                f"a paired difference is of two dicts, the score of each seed, and got a "
                f"{type(scores).__name__}: pass such as {{0: 0.91, 1: 0.93}}"
            )
    shared = [seed for seed in one if seed in other]
    if not shared:
        raise ArgumentError("no seed is in both: a paired difference needs shared seeds")
    return estimate([one[seed] - other[seed] for seed in shared], level)
