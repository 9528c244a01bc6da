"""What an attacker can do at best: the trade-off of what was charged, next to its epsilon.

An attacker decides from the release whether a unit was in the data. f(alpha) is the least false
negative rate of any attack with false positive rate alpha (Dong, Roth, Su 2022). The accountant's
composed privacy loss distribution gives the privacy profile delta(eps), the larger one of adding
and removing a unit, and each of its points a pair of lines below f (Wasserman and Zhou 2010):

    f(alpha) = sup_eps max(0, 1 - delta(eps) - e^eps alpha, e^-eps (1 - delta(eps) - alpha))

Guarantee: every number here errs to the side of the attacker. The accountant's delta(eps) is an
upper bound, and the supremum over some of the eps is a lower bound of f. So f is never too large,
and rates of success, advantage, mu and bounds on reconstruction are never too small.

Assumptions: those of :mod:`dpbam.privacy.accounting`. RDP has no distribution to derive this from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from dpbam import _validate
from dpbam.privacy.accounting import Charge, compose_losses

Array = NDArray[np.float64]
LEAST_ERROR = 1e-9  # mu covers attacks with both error rates at least this
_LEAST_DELTA = 1e-13  # the profile ends there: the accountant itself cuts tails off at 1e-15
_POINTS = 4000  # of the profile, and of the curve on which the regret is computed


class GaussianBound(NamedTuple):
    """The trade-off is at least that of the Gaussian mechanism of ``mu``, and close to it."""

    mu: float
    regret: float


@dataclass(frozen=True)
class TradeOff:
    """The trade-off function f, from points of the privacy profile.

    Guarantee: f is never too large: no attack does better.

    Assumptions: ``deltas`` are upper bounds.

    Proof: each point gives two lines below f; the module has the formula.

    Attributes:
        epsilons: [K] ascending, from 0.
        deltas: [K] an upper bound of delta at each.

    Example:
        >>> attack = trade_off([Charge(2.0, 1.0, 1)])  # one step of noise multiplier 2 on all data
        >>> round(attack.power(0.01), 4), round(attack.advantage, 4)
        (0.0339, 0.1974)
        >>> round(attack.gaussian.mu, 4)
        0.5
    """

    epsilons: Array
    deltas: Array

    def __call__(self, alpha: ArrayLike) -> Array:
        """Return f: no attack with false positive rate ``alpha`` has fewer false negatives."""
        rates = np.asarray(alpha, dtype=np.float64)
        left, right = self._corners
        return np.asarray(np.interp(rates, left, right, right=0.0))

    def power(self, false_positive_rate: float) -> float:
        """Return 1 - f, the best true positive rate at this false positive rate.

        It also bounds reconstruction: a guess about a unit that is right with probability kappa
        without that unit's data is right with probability at most 1 - f(kappa) with the release
        (Hayes, Mahloujifar, Balle 2023; by f: Kaissis, Hayes, Ziller, Rueckert 2023).
        """
        _validate.probability("false_positive_rate", false_positive_rate)
        return 1.0 - float(self(false_positive_rate))

    def epsilon(self, delta: float) -> float:
        """Return epsilon at ``delta``: delta is convex in e^eps, so its chords lie above it."""
        _validate.probability("delta", delta)
        odds = np.interp(-delta, -self.deltas, np.exp(self.epsilons), right=np.inf)
        return float(np.log(odds))

    @property
    def advantage(self) -> float:
        """The largest true positive rate minus false positive rate: delta(0)."""
        return float(self.deltas[0])

    def advantage_of(self, units: int) -> float:
        """Bound the advantage against ``units`` units that are all used or all left out.

        Each moves a probability alpha to at most T(alpha) = 1 - f(alpha), and k of them to at most
        T^k(alpha) (Dong, Roth, Su 2022), which does not decrease: take it at the end of intervals.
        """
        alpha = power = np.linspace(0.0, 1.0, _POINTS)
        for _ in range(units):
            power = 1 - self(power)
        return min(1.0, float((power[1:] - alpha[:-1]).max()))

    @cached_property
    def gaussian(self) -> GaussianBound:
        """The least mu with f >= G_mu, for attacks whose errors are both at least LEAST_ERROR.

        G_mu(alpha) = Phi(Phi^-1(1 - alpha) - mu). Corners of f suffice, since G_mu is convex:

            mu = max over corners of Phi^-1(1 - alpha) - Phi^-1(f(alpha))

        (Without a least error the only mu is that of all data in all steps, sqrt(T) / sigma.)
        To report it is a proposal of Gomez et al. 2025. The regret is how much more G_mu allows
        than f (the Delta-divergence of Kaissis et al. 2024): the least kappa with
        f(alpha + kappa) - kappa <= G_mu(alpha) for every alpha.
        """
        alpha, _ = self._corners
        alpha = np.append(alpha[(alpha > LEAST_ERROR) & (alpha <= self(alpha))], LEAST_ERROR)
        mu = max(0.0, float((-ndtri(alpha) - ndtri(self(alpha))).max()))
        return GaussianBound(mu, self._regret(mu))

    @cached_property
    def _corners(self) -> tuple[Array, Array]:
        """The corners of f, alpha ascending; f is its own inverse, so they are mirrored."""
        slopes, heights = np.exp(self.epsilons), 1 - self.deltas
        alpha = -np.diff(self.deltas) / np.diff(slopes)  # where neighbouring lines meet
        beta = heights[:-1] - slopes[:-1] * alpha
        alpha, beta = np.append(alpha, 0.0)[::-1], np.append(beta, heights[-1])[::-1]
        beta = np.minimum.accumulate(beta)  # near 1 it is flat but for rounding
        return np.concatenate([alpha, beta[::-1]]), np.concatenate([beta, alpha[::-1]])

    def _regret(self, mu: float) -> float:
        """Bisect for kappa between neighbouring points of G_mu at once.

        Between two points f(alpha + kappa) is at most its value at the first, and G_mu at least its
        value at the second.
        """
        even = np.linspace(0.0, 1.0, _POINTS)
        alpha = np.sort(np.concatenate([even, ndtr(-ndtri(even) - mu)]))
        target = ndtr(-ndtri(alpha[1:]) - mu)
        low, high = np.zeros_like(target), np.ones_like(target)
        for _ in range(40):
            kappa = (low + high) / 2
            enough = self(alpha[:-1] + kappa) - kappa <= target
            low, high = np.where(enough, low, kappa), np.where(enough, kappa, high)
        return float(high.max())


def trade_off(charges: Sequence[Charge]) -> TradeOff | None:
    """Return the trade-off of all ``charges`` composed.

    None where there is no privacy loss distribution to take it from: without noise, and where it
    would take too long (above epsilon 500 or a million steps).

    Guarantee: holds for adding and for removing a unit, for all charges together.

    Assumptions: as for ``accounting.total_epsilon``.

    Proof: as there; the larger delta of the two directions at each epsilon (Dong, Roth, Su 2022).
    """
    return _trade_off(tuple(charges))


@lru_cache(maxsize=16)
def _trade_off(charges: tuple[Charge, ...]) -> TradeOff | None:
    losses = compose_losses(charges)
    if losses is None:
        return None
    distribution, grid = losses
    end = distribution.get_epsilon_for_delta(_LEAST_DELTA)
    stride = grid * max(1, round(end / grid / _POINTS))
    epsilons = np.arange(0.0, end + stride, stride)
    return TradeOff(epsilons, np.asarray(distribution.get_delta_for_epsilon(epsilons)))
