"""Privacy losses on a grid, composed by Fourier transforms.

dp-accounting discretises one step's privacy loss, rounded upwards; here steps are composed. The
numbers are those of dp-accounting's own composition (tests compare to 1e-9), in half of its time:
Chernoff's moments by products, and epsilon by cumulative sums. T equal steps are

    P = F^-1(F(p)^T)

on a window that misses at most :data:`TAIL` of the mass, by Chernoff's bound; that mass, and what a
step has at infinity, counts as infinite loss.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TAIL = 1e-15  # mass that a composition may lose at its ends, and which then counts as infinite
_ORDERS = 20  # of Chernoff's bound, on each side


class Losses(NamedTuple):
    """A distribution of the privacy loss: loss (lower + i) grid with probability probs[i]."""

    lower: int
    probs: NDArray[np.float64]
    infinity: float  # the probability of an infinite loss


def step_losses(sigma: float, q: float, grid: float) -> tuple[Losses, Losses]:
    """Return the losses of one step when a unit is removed and when one is added; at q = 1 equal.

    Poisson sampling at rate q, Gaussian noise of sigma; dp-accounting's connect-the-dots.

    Guarantee: its hockey-stick divergences are at least those of the step, for every epsilon.

    Assumptions: sigma > 0 and 0 < q <= 1.

    Proof: dp-accounting's connect-the-dots (Doroshenko et al. 2022): exact on the grid, and chords
    of a convex function lie above it.
    """
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution

    distribution: Any = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        sampling_prob=q,
        value_discretization_interval=grid,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    removed = _dense(distribution._pmf_remove)
    return removed, removed if distribution._symmetric else _dense(distribution._pmf_add)


def _dense(pmf: Any) -> Losses:
    dense = pmf.to_dense_pmf()
    return Losses(dense._lower_loss, np.asarray(dense._probs), dense._infinity_mass)


def self_composed(losses: Losses, count: int) -> Losses:
    """Compose ``count`` equal steps.

    Guarantee: dominates ``count`` steps; mass outside the window counts as infinite loss.

    Assumptions: the Fourier transform's rounding, some 1e-16 of the largest mass, is negligible
    next to delta.

    Proof: losses of independent steps add up; Chernoff's bound gives the window.

    Example:
        >>> coin = Losses(-1, np.array([0.5, 0.0, 0.5]), 0.0)  # loss -1 or 1 cells
        >>> twice = self_composed(coin, 2)
        >>> twice.lower, twice.probs.round(3).tolist()
        (-2, [0.25, 0.0, 0.5, 0.0, 0.25])
    """
    from scipy import fft

    first, last = _window(losses.probs, count)
    size = fft.next_fast_len(max(last - first + 1, len(losses.probs)))
    cyclic = np.real(fft.ifft(fft.fft(losses.probs, size) ** count))  # cell i is i modulo size
    finite = count * math.log1p(-losses.infinity)
    return Losses(
        count * losses.lower + first,
        np.roll(cyclic, -first)[: last - first + 1],
        TAIL - math.expm1(finite),  # TAIL + 1 - (1 - infinity)^T
    )


def composed(one: Losses, other: Losses) -> Losses:
    """Compose two mechanisms: their losses add up.

    Guarantee: dominates both mechanisms together, the second of which may depend on the first one's
    release.

    Assumptions: as for ``self_composed``.

    Proof: adaptive composition of dominating pairs (Zhu, Dong, Wang 2022).
    """
    from scipy.signal import fftconvolve

    return Losses(
        one.lower + other.lower,
        fftconvolve(one.probs, other.probs),
        one.infinity + other.infinity - one.infinity * other.infinity,
    )


def epsilon_at(losses: Losses, grid: float, delta: float) -> float:
    """Return the least epsilon >= 0 with sum_l max(0, 1 - e^(epsilon - l)) P(l) <= delta.

    With U the probability of losses above epsilon, infinity included, and L the sum of e^-l P(l)
    over the finite ones, the sum is U - e^epsilon L, so epsilon = log((U - delta) / L).

    Guarantee: no smaller epsilon satisfies the inequality.

    Assumptions: the losses dominate.

    Proof: the sum falls in epsilon, and is U - e^epsilon L between two losses.
    """
    if losses.infinity > delta:
        return math.inf
    values, upper, lower = _from_above(losses, grid)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = np.log((upper - delta) / lower)  # NaN while U < delta, infinite while L = 0
    enough = np.append((upper > delta)[:-1] & (at[:-1] >= values), True)
    k = int(np.argmax(enough))
    if upper[k] <= lower[k] + delta:
        return 0.0
    return float(at[k]) if lower[k] > 0 else max(0.0, float(values[k - 1]))


def deltas_at(losses: Losses, grid: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return U - e^epsilon L, the delta of :func:`epsilon_at`, at each of ``epsilons``.

    Guarantee: the hockey-stick divergence of the losses, at each epsilon.

    Assumptions: the losses dominate, for an upper bound.

    Proof: as for ``epsilon_at``.
    """
    values, upper, lower = _from_above(losses, grid)
    above = np.searchsorted(-values, -epsilons)  # how many losses exceed epsilon
    return np.asarray(upper[above] - np.exp(epsilons) * lower[above])


def _from_above(losses: Losses, grid: float) -> tuple[NDArray[np.float64], ...]:
    """Return the N losses in descending order, and U and L of the first 0, ..., N of them."""
    values = (np.arange(len(losses.probs))[::-1] + losses.lower) * np.float64(grid)
    probs = losses.probs[::-1]
    upper = np.cumsum(np.append(losses.infinity, probs))
    with np.errstate(over="ignore", invalid="ignore"):
        lower = np.cumsum(np.append(0.0, np.exp(-values) * probs))
    return values, upper, lower


def _window(probs: NDArray[np.float64], count: int) -> tuple[int, int]:
    """Return the first and last cell between which all but TAIL of the composed mass lies.

    Chernoff: P[X >= x] <= E[e^(s X)] e^(-s x), likewise below, TAIL / 2 for each side. The orders s
    are multiples of 1 / len(probs), so that no power overflows.
    """
    orders = np.arange(1, _ORDERS + 1) / len(probs)
    above = (count * _log_moments(probs, 1) + math.log(2 / TAIL)) / orders
    below = (count * _log_moments(probs, -1) + math.log(2 / TAIL)) / -orders
    return max(0, math.floor(below.max())), min((len(probs) - 1) * count, math.ceil(above.min()))


def _log_moments(probs: NDArray[np.float64], sign: int) -> NDArray[np.float64]:
    """Return log E[e^(s X)] = log sum_i e^(s i) probs[i] for s = sign j / len(probs), j = 1..20."""
    factor = np.exp(sign * np.arange(len(probs)) / len(probs))
    weighted, moments = probs, []
    for _ in range(_ORDERS):
        weighted = weighted * factor
        moments.append(weighted.sum())
    return np.log(moments)
