"""A second accountant, written apart from dp-accounting: epsilon of a ledger, bracketed.

One step, for neighbours with and without one unit, is the pair (Wang et al. 2019, Zhu et al. 2022)

    P = (1 - q) N(0, sigma^2) + q N(1, sigma^2)   against   Q = N(0, sigma^2)

(unit removed), and Q against P (unit added). The privacy loss log P/Q is put on a grid, rounded up
for an upper and down for a lower bound; T steps are a T-fold convolution, by FFT. Then
delta(eps) = E[(1 - e^(eps - L))+]. The wider of the two directions counts.

It shares no code with :mod:`dpbam.privacy.accounting`, so that a mistake in one shows in the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from dpbam.privacy.accounting import Charge

Array = NDArray[np.float64]
_POINTS = 2**20  # of the grid of losses
_TAIL = 1e-14  # mass of a step's loss beyond the grid of one step


class Bracket(NamedTuple):
    """epsilon lies between ``low`` and ``high``, whatever the rounding did."""

    low: float
    high: float


def bracket(charges: Sequence[Charge], delta: float) -> Bracket:
    """Epsilon of all ``charges`` composed, at ``delta``, from below and from above.

    Example:
        >>> low, high = bracket([Charge(1.731, 0.08192, 1000)], 1e-5)
        >>> round(low, 1), round(high, 1)
        (8.0, 8.0)
    """
    spent = [c for c in charges if c.steps]
    if any(c.noise_multiplier == 0 for c in spent):
        return Bracket(math.inf, math.inf)
    if not spent:
        return Bracket(0.0, 0.0)
    width = _width(spent, delta)
    low, high = (max(_epsilon(spent, delta, width, up, add) for add in (True, False))
                 for up in (False, True))  # fmt: skip
    return Bracket(low, high)


def _width(charges: Sequence[Charge], delta: float) -> float:
    """Half the range of the composed loss: beyond it the mass is negligible compared to delta.

    A loss of mean m and deviation s over T steps stays within T m + 12 sqrt(T) s, and a single
    step's does within its own extreme.
    """
    mean = sum(c.steps * _moments(c)[0] for c in charges)
    spread = math.sqrt(sum(c.steps * _moments(c)[1] for c in charges))
    single = max(_extreme(c) for c in charges)
    return mean + 12 * spread + 2 * single + 2 * math.log(1 / delta)


def _moments(charge: Charge) -> tuple[float, float]:
    """A bound on the mean |loss| and the second moment of one step, by integration."""
    x = np.linspace(-12, 12, 4001) * charge.noise_multiplier + 0.5
    loss = _loss(x, charge)
    weight = norm.pdf(x, 0, charge.noise_multiplier) + charge.sampling_rate * norm.pdf(
        x, 1, charge.noise_multiplier
    )
    weight /= weight.sum()
    return abs(float((weight * loss).sum())), float((weight * loss**2).sum())


def _extreme(charge: Charge) -> float:
    """The largest |loss| of one step outside the tail."""
    reach = -float(norm.ppf(_TAIL)) * charge.noise_multiplier
    return float(np.abs(_loss(np.array([-reach, 1 + reach]), charge)).max())


def _loss(x: Array, charge: Charge) -> Array:
    """log P(x) / Q(x) = log(1 - q + q exp((2 x - 1) / (2 sigma^2))), rising in x."""
    q, sigma = charge.sampling_rate, charge.noise_multiplier
    with np.errstate(divide="ignore"):
        log_absent = math.log1p(-q) if q < 1 else -math.inf
    return np.logaddexp(log_absent, math.log(q) + (2 * x - 1) / (2 * sigma**2))


def _inverse(loss: Array, charge: Charge) -> Array:
    """The x at which the loss is ``loss``; -inf below its infimum log(1 - q)."""
    q, sigma = charge.sampling_rate, charge.noise_multiplier
    rest = np.expm1(loss) + q  # e^loss - (1 - q)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = sigma**2 * (np.log(rest) - math.log(q)) + 0.5
    return np.where(rest > 0, x, -np.inf)


def profile(charges: Sequence[Charge], epsilons: Array, delta: float) -> tuple[Array, Array]:
    """Return delta at each of the ascending ``epsilons``, from below and from above.

    Args:
        charges: steps with noise.
        epsilons: at least 0.
        delta: about the least that matters; the range of the losses depends on it.
    """
    spent, zero = [c for c in charges if c.steps], np.zeros_like(epsilons)
    width = _width(spent, delta)
    low, high = zero, zero
    for add in (True, False):
        low = np.maximum(low, _deltas(*_composed(spent, width, False, add), epsilons))
        high = np.maximum(high, _deltas(*_composed(spent, width, True, add), epsilons))
    return low, high


def _deltas(grid: Array, mass: Array, epsilons: Array) -> Array:
    """delta(eps) = sum over losses above eps of mass (1 - e^(eps - loss))."""
    grid, mass = grid[grid > 0], mass[grid > 0]
    above, weighed = (
        np.append(np.cumsum(m[::-1])[::-1], 0.0) for m in (mass, mass * np.exp(-grid))
    )
    first = np.searchsorted(grid, epsilons, side="right")
    return np.asarray(above[first] - np.exp(epsilons) * weighed[first])


def _epsilon(charges: Sequence[Charge], delta: float, width: float, up: bool, add: bool) -> float:
    """Epsilon of one direction, the losses rounded up or down."""
    grid, mass = _composed(charges, width, up, add)

    def excess(epsilon: float) -> float:
        above = grid > epsilon
        return float((mass[above] * -np.expm1(epsilon - grid[above])).sum()) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, width, xtol=1e-6)) if excess(width) < 0 else math.inf


def _composed(charges: Sequence[Charge], width: float, up: bool, add: bool) -> tuple[Array, Array]:
    """The grid of losses, and the mass of the composed loss on it."""
    step = 2 * width / _POINTS
    grid: Array = (np.arange(_POINTS) - _POINTS // 2) * np.float64(step)
    spectrum = np.ones(_POINTS // 2 + 1, dtype=np.complex128)
    for charge in charges:
        mass = _masses(charge, grid, step, up, add)
        spectrum *= np.fft.rfft(np.fft.ifftshift(mass)) ** charge.steps
    return grid, np.fft.fftshift(np.fft.irfft(spectrum, _POINTS)).clip(min=0.0)


def _masses(charge: Charge, grid: Array, step: float, up: bool, add: bool) -> Array:
    """The loss's distribution on the grid: P's loss log P/Q, or (unit added) Q's loss log Q/P."""
    edges = (
        np.concatenate([grid - step, grid[-1:]])
        if up
        else np.concatenate([grid, [grid[-1] + step]])
    )
    if add:  # loss = -log P/Q falls in x: {loss <= t} = {x >= inverse(-t)}, under Q
        below = norm.sf(_inverse(-edges, charge), 0, charge.noise_multiplier)
    else:
        x, q, sigma = _inverse(edges, charge), charge.sampling_rate, charge.noise_multiplier
        below = (1 - q) * norm.cdf(x, 0, sigma) + q * norm.cdf(x, 1, sigma)
    mass: Array = np.diff(below)
    mass[0] += below[0]  # what lies below the grid, onto its first point
    mass[-1] += 1 - below[-1] if up else 0.0
    return mass
