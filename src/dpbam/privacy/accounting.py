"""The (epsilon, delta) of Poisson-subsampled Gaussian steps, by dp-accounting.

Neighbours differ by one unit of privacy, added or removed. ``pld`` composes privacy loss
distributions and is tight; its discretisation only rounds up. ``rdp`` composes Renyi divergences,
is looser and an upper bound as well; it takes the place of ``pld`` above epsilon 500 and above a
million steps, where a PLD takes too long, and where delta is as small as the rounding of a PLD's
Fourier transforms (1e-12 for 1000 steps). Neither depends on the method: steps of BAM and DP-SAT
cost what those of DP-SGD do.

This module does not import torch, so that calculators start fast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTANTS = ("pld", "rdp")
# PLD grid of the privacy loss, with the epsilon above which it is fine enough. Rounding is upwards,
# so a coarse grid is safe; it is also up to a hundred times faster where epsilon is large.
_GRIDS = ((1e-2, 100.0), (1e-3, 12.0), (1e-4, 0.0))
# A PLD takes time and memory with epsilon and steps: above these, RDP's upper bound is given.
_HOPELESS, _MANY_STEPS = 500.0, 10**6
# Fourier transforms lose mass by rounding, in proportion to the steps: 1.9e-17 per step was
# measured. Above the small deltas the rounding up to a grid is a hundred times as much.
_LOST_PER_STEP, _SMALL_DELTA = 2.0**-50, 1e-8
_NOISE = (1e-6, 1e9)  # sigma outside overflows or underflows when it is squared and summed
_MOST_STEPS = 10**9


class Charge(NamedTuple):
    """``steps`` steps, each at Poisson rate ``sampling_rate`` with noise ``noise_multiplier``."""

    noise_multiplier: float
    sampling_rate: float
    steps: int


def epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    *,
    accountant: str = "pld",
) -> float:
    """Return epsilon of ``steps`` private steps at ``delta``; infinite without noise.

    Guarantee: the training is (epsilon, delta)-DP under adding or removing one unit; the value is
    rounded up only.

    Assumptions: each step is a Poisson-subsampled Gaussian mechanism of the given sigma and q.

    Proof: see ``total_epsilon``.

    Example:
        >>> round(epsilon(1.731, 4096 / 50_000, 1000, delta=1e-5), 2)
        8.0
        >>> epsilon(0.0, 0.1, 10, delta=1e-5)
        inf
    """
    return total_epsilon(
        [Charge(noise_multiplier, sampling_rate, steps)], delta, accountant=accountant
    )


def total_epsilon(charges: Sequence[Charge], delta: float, *, accountant: str = "pld") -> float:
    """Return epsilon of all ``charges`` composed, at ``delta``.

    Guarantee: an upper bound on epsilon of all charges, whatever their order and however each
    depends on earlier releases.

    Assumptions: as for ``epsilon``, for each charge.

    Proof: dominating pairs of the subsampled Gaussian (Zhu, Dong, Wang 2022), composed as privacy
    loss distributions (Koskela et al. 2020; Doroshenko et al. 2022); or Renyi divergences (Mironov,
    Talwar, Zhang 2019). A second accountant brackets it (``dpbam audit``).
    """
    delta = _validate.probability("delta", delta)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    return _refine_epsilon(tuple(checked(c) for c in charges), delta, accountant)


def rough_epsilon(
    charges: tuple[Charge, ...], delta: float, accountant: str, *, near: float
) -> float:
    """Return an upper bound of :func:`total_epsilon` fast, on a grid for values near ``near``.

    Guarantee: at least ``total_epsilon``.

    Assumptions: as there.

    Proof: a coarser grid only rounds losses up further.
    """
    return _on_grid(charges, delta, accountant, 1e-2 if near > 100 else 1e-3)


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Return the noise multiplier of several Gaussian releases from one batch, as one event.

    Each sum, divided by its sensitivity times sigma_k, has noise of variance 1 and moves by at most
    1 / sigma_k when a unit is added or removed: together by sqrt(sum_k 1 / sigma_k^2). Hence

        1 / sigma_joint^2 = sum_k 1 / sigma_k^2

    Guarantee: releasing all sums is one Gaussian mechanism of the returned noise multiplier.

    Assumptions: all are of one batch, with independent noise.

    Proof: the displayed sum of squares.

    Example:
        >>> round(joint_noise_multiplier([1.0, 10.0]), 4), joint_noise_multiplier([1.731])
        (0.995, 1.731)
    """
    sigmas = [_validate.positive("noise_multiplier", sigma) for sigma in noise_multipliers]
    if len(sigmas) == 1:
        return sigmas[0]  # exactly
    return 1 / math.sqrt(sum(sigma**-2 for sigma in sigmas))


def accountant_version(accountant: str) -> str:
    """Name the accountant and its version, for a privacy statement."""
    return f"dp-accounting {version('dp-accounting')}, {accountant.upper()}"


def checked(charge: Charge) -> Charge:
    """Return ``charge`` in plain numbers if an accountant can compose it; refuse other values.

    sigma is 0 (no privacy) or between 1e-6 and 1e9, 0 < q <= 1, and steps is a whole number from 0
    to 1e9: anything else overflows, or takes an accountant too long.

    Raises:
        ArgumentError, ArgumentTypeError: one sentence with the name and the value.

    Example:
        >>> checked(Charge(1.0, 0.1, 10))
        Charge(noise_multiplier=1.0, sampling_rate=0.1, steps=10)
        >>> checked(Charge(1e300, 0.1, 10))
        Traceback (most recent call last):
        dpbam.errors.ArgumentError: noise_multiplier must be 0 or between 1e-06 and 1e+09, ...
    """
    sigma = _validate.non_negative("noise_multiplier", charge.noise_multiplier)
    if sigma and not _NOISE[0] <= sigma <= _NOISE[1]:
        raise ArgumentError(
            f"noise_multiplier must be 0 or between {_NOISE[0]:g} and {_NOISE[1]:g}, got {sigma!r}"
        )
    if (q := _validate.positive("sampling_rate", charge.sampling_rate)) > 1:
        raise ArgumentError(f"sampling_rate must be at most 1, got {charge.sampling_rate}")
    if (steps := _validate.count("steps", charge.steps, least=0)) > _MOST_STEPS:
        raise ArgumentError(
            f"steps must be at most {_MOST_STEPS:,}, got 1e{int(math.log10(steps))}"
        )
    return Charge(sigma, q, steps)  # NumPy's small integers overflow where steps are added up


def _refine_epsilon(charges: tuple[Charge, ...], delta: float, accountant: str) -> float:
    """Return epsilon on the first grid that is fine enough for it.

    A finer grid only lowers epsilon, so grids for larger values than the last are skipped.
    """
    if accountant != "pld":
        return _on_grid(charges, delta, accountant, 0.0)
    value = math.inf
    for grid, enough in _GRIDS:
        if value > enough:
            value = _on_grid(charges, delta, accountant, grid)
        if value > enough:
            break
    return value


def _is_out_of_reach(spent: Sequence[Charge], delta: float) -> bool:
    """Whether a PLD would take minutes: many steps, or an epsilon too large to mean anything.

    Or whether its rounding would be a large share of delta.
    """
    if sum(c.steps for c in spent) > _MANY_STEPS:
        return True
    if _without_lost(spent, delta) < delta / 2:
        return True
    passes = sum(c.steps * c.sampling_rate / c.noise_multiplier for c in spent)
    if passes < 1e4 and all(c.noise_multiplier > 0.1 for c in spent):
        return False  # far from it
    return _on_grid(tuple(spent), delta, "rdp", 0.0) > _HOPELESS


@lru_cache(maxsize=4096)
def _on_grid(charges: tuple[Charge, ...], delta: float, accountant: str, grid: float) -> float:
    spent = [c for c in charges if c.steps]
    if any(c.noise_multiplier == 0 for c in spent):
        return math.inf
    if not spent:
        return 0.0
    if accountant == "pld" and _is_out_of_reach(spent, delta):
        return _on_grid(charges, delta, "rdp", 0.0)
    with quiet():
        if accountant == "rdp":
            return _by_rdp(spent, delta)
        covered = _without_lost(spent, delta)
        return float(_compose(tuple(spent), grid).get_epsilon_for_delta(covered))


def compose_losses(charges: Sequence[Charge]) -> tuple[PrivacyLossDistribution, float] | None:
    """Return the privacy loss of all ``charges``, and its grid: what epsilon is taken from.

    None without noise, without steps, and where a PLD is out of reach.

    Guarantee: a dominating distribution, of a unit removed and of one added.

    Assumptions: as for ``total_epsilon``.

    Proof: as there.
    """
    spent = tuple(checked(c) for c in charges if c.steps)
    if not spent or any(c.noise_multiplier == 0 for c in spent) or _is_out_of_reach(spent, 1e-5):
        return None
    value = total_epsilon(spent, 1e-5)
    grid = next(grid for grid, enough in _GRIDS if value >= enough)
    return _compose(spent, grid), grid


def _without_lost(spent: Sequence[Charge], delta: float) -> float:
    """Return a small delta less the mass that Fourier transforms may lose, and others as they are.

    Mass that is lost is missing from the delta of every epsilon, so that epsilon would be too low:
    26.24 in place of 26.72 after 100,000 steps of sigma 100 at q = 1 and delta 1e-12.
    """
    if delta >= _SMALL_DELTA:
        return delta
    return delta - _LOST_PER_STEP * sum(c.steps for c in spent)


@lru_cache(maxsize=48)
def _compose(charges: tuple[Charge, ...], grid: float) -> PrivacyLossDistribution:
    """Return the privacy loss of all charges; where one of many has changed, most are known.

    Guarantee: dominates all charges together, each of which may depend on earlier releases; mass
    that is cut off at the ends, 1e-15 per composition, counts as infinite loss.

    Assumptions: the rounding of Fourier transforms is negligible next to delta, or is covered by
    ``_without_lost``.

    Proof: adaptive composition of dominating pairs (Zhu, Dong, Wang 2022), by dp-accounting.
    """
    if len(charges) == 1:
        sigma, q, steps = charges[0]
        return _step_loss(sigma, q, grid).self_compose(steps)
    middle = len(charges) // 2
    return _compose(charges[:middle], grid).compose(_compose(charges[middle:], grid))


# takes most of the time, and does not depend on the number of steps; some megabytes each, at most
@lru_cache(maxsize=32)
def _step_loss(sigma: float, q: float, grid: float) -> PrivacyLossDistribution:
    """Return the privacy loss of one step, of a unit removed and of one added.

    Guarantee: its hockey-stick divergences are at least those of the step, for every epsilon.

    Assumptions: sigma > 0 and 0 < q <= 1.

    Proof: dp-accounting's connect-the-dots (Doroshenko et al. 2022): exact on the grid, and chords
    of a convex function lie above it.
    """
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=sigma,
        sampling_prob=q,
        value_discretization_interval=grid,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


def _by_rdp(spent: Sequence[Charge], delta: float) -> float:
    import dp_accounting

    divergences = [charge.steps * _step_rdp(*charge[:2]) for charge in spent]
    orders = dp_accounting.rdp.RdpAccountant().orders
    return float(dp_accounting.rdp.compute_epsilon(orders, sum(divergences), delta)[0])


@lru_cache(maxsize=4096)
def _step_rdp(sigma: float, q: float) -> NDArray[np.float64]:
    """Return the Renyi divergences of one step, at dp-accounting's default orders.

    dp-accounting computes them in pure Python, a tenth of a second per step kind, while epsilon is
    asked for after every step of a training. Composition only adds them up.
    """
    import dp_accounting

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)))
    divergences: NDArray[np.float64] = accountant.rdp
    divergences.setflags(write=False)  # it is shared by all who ask
    return divergences


@contextmanager
def quiet() -> Iterator[None]:
    """Silence RDP's note that it left out an order: the minimum over the others is as valid."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
