"""What privacy costs: (epsilon, delta) of Poisson-subsampled Gaussian steps, by dp-accounting.

Neighbours differ by one unit of privacy, added or removed. ``pld`` composes privacy loss
distributions and is tight (its discretisation only ever rounds up); ``rdp`` goes by Renyi
divergences and is looser; it serves in place of ``pld`` above epsilon 500 and above a million
steps, where a PLD takes too long, and is an upper bound as well. Neither knows the method: BAM's
and DP-SAT's steps cost what DP-SGD's do.
No torch here: calculators start fast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

ACCOUNTANTS = ("pld", "rdp")
# PLD grid of the privacy loss, with the epsilon above which it is fine enough. Rounding is upwards,
# so a coarse grid is safe; it is also up to a hundred times faster where epsilon is large.
_GRIDS = ((1e-2, 100.0), (1e-3, 12.0), (1e-4, 0.0))
# A PLD takes time and memory with epsilon and steps: above these, RDP's upper bound is given.
_HOPELESS, _MANY_STEPS = 500.0, 10**6
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
    """Epsilon of ``steps`` private steps at ``delta``; infinite where there is no noise.

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
    """Epsilon of all ``charges`` composed, at ``delta``."""
    _validate.probability("delta", delta)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    return _refined(tuple(checked(c) for c in charges), delta, accountant)


def noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    accountant: str = "pld",
    spent: Sequence[Charge] = (),
) -> float:
    """The least sigma (to a relative 1e-4) whose epsilon does not exceed the target: never above.

    What was ``spent`` before on the same data counts too: all together keep within the target.

    Example:
        >>> sigma = noise_multiplier(8.0, 1e-5, 4096 / 50_000, 1000)
        >>> round(sigma, 3)
        1.731
    """
    _validate.positive("epsilon", epsilon)
    _validate.probability("delta", delta)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    _validate.count("steps", steps)

    before = tuple(checked(c) for c in spent)
    if before and (already := _refined(before, delta, accountant)) >= epsilon:
        raise ArgumentError(
            f"earlier steps have spent epsilon {up(already)} at this delta, which leaves nothing "
            f"of {up(epsilon)}: raise epsilon or delta, or stop here"
        )

    def charges(sigma: float) -> tuple[Charge, ...]:
        return (*before, checked(Charge(sigma, sampling_rate, steps)))

    grid = _coarse_grid(epsilon)

    def coarse(sigma: float) -> float:
        return _on_grid(charges(sigma), delta, accountant, grid)

    guess = _gaussian_guess(before, charges(1.0)[-1], epsilon, delta)
    start, slope = _coarse_sigma(coarse, epsilon, guess)
    return _polished_sigma(lambda s: _refined(charges(s), delta, accountant), start, epsilon, slope)


def max_steps(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    *,
    accountant: str = "pld",
) -> int:
    """The most steps whose epsilon does not exceed the target.

    Example:
        >>> max_steps(8.0, 1e-5, noise_multiplier=1.731, sampling_rate=4096 / 50_000)
        1000
    """
    _validate.positive("epsilon", epsilon)
    _validate.probability("delta", delta)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)

    def charges(steps: int) -> tuple[Charge, ...]:
        return (checked(Charge(noise_multiplier, sampling_rate, steps)),)

    grid = _coarse_grid(epsilon)
    coarse = _most_steps(lambda k: _on_grid(charges(k), delta, accountant, grid) <= epsilon, 0, 1)
    return _most_steps(
        lambda k: _refined(charges(k), delta, accountant) <= epsilon, coarse, max(1, coarse // 500)
    )


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """The noise multiplier of several Gaussian releases from one batch, as one event.

    Each sum, divided by its sensitivity times sigma_k, has noise of variance 1 and moves by at most
    1 / sigma_k when a unit comes or goes: together by sqrt(sum_k 1 / sigma_k^2). Hence

        1 / sigma_joint^2 = sum_k 1 / sigma_k^2

    Example:
        >>> round(joint_noise_multiplier([1.0, 10.0]), 4), joint_noise_multiplier([1.731])
        (0.995, 1.731)
    """
    for sigma in noise_multipliers:
        _validate.positive("noise_multiplier", sigma)
    if len(noise_multipliers) == 1:
        return float(noise_multipliers[0])  # exactly, without a rounding
    return 1 / math.sqrt(sum(sigma**-2 for sigma in noise_multipliers))


def remaining_noise_multiplier(joint: float, others: Sequence[float]) -> float:
    """The sigma that, beside ``others``, makes :func:`joint_noise_multiplier` at least ``joint``.

    Example:
        >>> round(remaining_noise_multiplier(0.995, [10.0]), 2)
        1.0
    """
    left = joint**-2 - sum(sigma**-2 for sigma in others)
    if left <= 0:
        least = math.sqrt(len(others)) * joint
        raise ArgumentError(
            f"the statistics' noise multipliers {tuple(others)} leave nothing of the budget for "
            f"the gradient: each must be well above {least:.3g}"
        )
    if not others:
        return joint
    sigma = 1 / math.sqrt(left)
    while joint_noise_multiplier((sigma, *others)) < joint:  # by a rounding
        sigma *= 1 + 1e-9
    return sigma


def accountant_version(accountant: str) -> str:
    """The accountant and its version, for a privacy statement."""
    return f"dp-accounting {version('dp-accounting')}, {accountant.upper()}"


def checked(charge: Charge) -> Charge:
    """Return ``charge`` if an accountant can compose it; refuse NaN, fractions and extremes.

    sigma is 0 (no privacy) or between 1e-6 and 1e9, 0 < q <= 1, and steps is a whole number from 0
    to 1e9: what lies outside overflows, or takes the accountant forever.

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
    if _validate.positive("sampling_rate", charge.sampling_rate) > 1:
        raise ArgumentError(f"sampling_rate must be at most 1, got {charge.sampling_rate}")
    if (steps := _validate.count("steps", charge.steps, least=0)) > _MOST_STEPS:
        raise ArgumentError(
            f"steps must be at most {_MOST_STEPS:,}, got 1e{int(math.log10(steps))}"
        )
    return charge


def _refined(charges: tuple[Charge, ...], delta: float, accountant: str) -> float:
    """Epsilon on the first grid that is fine enough for it.

    A finer grid only lowers epsilon, so a grid for larger ones than the last found is left out.
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
    """Whether a PLD would take minutes or more: many steps, or an epsilon that promises nothing."""
    if sum(c.steps for c in spent) > _MANY_STEPS:
        return True
    passes = sum(c.steps * c.sampling_rate / c.noise_multiplier for c in spent)
    if passes < 1e4 and all(c.noise_multiplier > 0.1 for c in spent):
        return False  # far from it: do not ask
    return _on_grid(tuple(spent), delta, "rdp", 0.0) > _HOPELESS


def _coarse_grid(target: float) -> float:
    """A grid that is cheap and near enough to start from."""
    return 1e-2 if target > 100 else 1e-3


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
        return _by_pld(spent, delta, grid) if accountant == "pld" else _by_rdp(spent, delta)


def _by_pld(spent: Sequence[Charge], delta: float, grid: float) -> float:
    losses = [_step_loss(sigma, q, grid).self_compose(steps) for sigma, q, steps in spent]
    whole = reduce(lambda one, other: one.compose(other), losses)
    return float(whole.get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def _step_loss(sigma: float, q: float, grid: float) -> PrivacyLossDistribution:
    """One step's privacy loss, between data sets that differ by one added or removed unit.

    It takes most of the time, and does not depend on the number of steps. Few are kept: one of a
    large loss takes tens of megabytes.
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

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    for sigma, q, steps in spent:
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(step, steps)
    return float(accountant.get_epsilon(delta))


@contextmanager
def quiet() -> Iterator[None]:
    """Hush RDP's note that it left out an order: the minimum over the others is as valid."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _gaussian_guess(before: Sequence[Charge], last: Charge, target: float, delta: float) -> float:
    """The sigma of ``last`` at which the central limit of all steps has epsilon ``target``.

    T subsampled steps tend to a Gaussian mechanism with mu^2 = q^2 T (e^(1 / sigma^2) - 1), and
    mu^2 adds up. A point to start a search from, and never an answer.
    """
    from scipy.optimize import brentq

    def excess(log_mu: float) -> float:
        return _gaussian_delta(math.exp(log_mu), target) - delta

    mu = math.exp(brentq(excess, math.log(1e-6), math.log(1e6), xtol=1e-3))
    used = sum(c.sampling_rate**2 * c.steps * math.expm1(c.noise_multiplier**-2) for c in before)
    left = max(mu**2 - used, 1e-2 * mu**2)
    return 1 / math.sqrt(math.log1p(left / (last.sampling_rate**2 * last.steps)))


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of the Gaussian mechanism: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    from scipy.special import log_ndtr, ndtr

    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def _coarse_sigma(
    spent: Callable[[float], float], target: float, guess: float
) -> tuple[float, float]:
    """A sigma a hair above that with spent(sigma) = target, and d epsilon / d log sigma there.

    Bracketed around ``guess``, then secants of log epsilon over log sigma, which is nearly a line.
    Small sigmas are dear, so the bracket opens by ever longer steps from a guess that is near.
    """
    low = high = min(max(guess, 1e-3), 1e6)
    factor = 1.1
    while spent(high) > target:
        low, high, factor = high, high * factor, factor**2
        if high > 1e6:
            raise ArgumentError(
                "no noise multiplier up to 1e6 meets this target: raise epsilon or delta, or "
                "train for fewer steps"
            )
    while spent(low) <= target:
        if low <= 1e-3:
            return low, -target
        low, high, factor = low / factor, low, factor**2
    return _between(spent, target, low, high)


def _between(
    spent: Callable[[float], float], target: float, low: float, high: float
) -> tuple[float, float]:
    """The sigma and slope of :func:`_coarse_sigma`, where spent(low) > target >= spent(high)."""

    def excess(sigma: float) -> float:
        return math.log(max(spent(sigma), 1e-9 * target) / target)

    width, left = math.inf, math.inf
    while abs(left) > 3e-3 and high > low * (1 + 1e-4):
        above, below, last, width = excess(low), excess(high), width, math.log(high / low)
        share = above / (above - below) if width < last / 2 else 0.5  # a secant that stalls: halve
        middle = low * math.exp(min(max(share, 0.01), 0.99) * width)
        left = excess(middle)
        end, low, high = (low, middle, high) if left > 0 else (high, low, middle)
        slope = (left - excess(end)) / math.log(middle / end)  # of log epsilon over log sigma
    return middle * math.exp(-left / min(slope, -0.1) + 2e-5), slope * target


def _polished_sigma(
    spent: Callable[[float], float], sigma: float, target: float, slope: float
) -> float:
    """The least sigma within the target, to a relative 1e-4: few calls, since each is dear.

    Newton's steps on log sigma, with ``slope`` (d epsilon / d log sigma) at first that of the
    coarse grid, then that of the last two points. What is returned was checked.
    """
    slope, last = min(slope, -1e-3 * target), None
    for _ in range(8):
        value = spent(sigma)
        if last is not None and value != last[1] and sigma != last[0]:
            slope = min((value - last[1]) / math.log(sigma / last[0]), -1e-3 * target)
        move = (target - value) / slope  # of log sigma; positive: more noise is needed
        if value <= target and -move < 1e-4:
            return sigma
        last = (sigma, value)
        sigma *= math.exp(move + 2e-5)  # aim a hair inside the target
    while spent(sigma) > target:
        sigma *= 1 + 1e-4
    return sigma


def _most_steps(within: Callable[[int], bool], low: int, stride: int) -> int:
    """The largest k with within(k): gallop up from ``low``, which is within, then bisect."""
    if not within(low):  # the finer grid never disagrees that way; stay safe if it should
        return _most_steps(within, 0, 1)
    high = low + stride
    while within(high):
        low, stride = high, stride * 2
        high = low + stride
        if high > 10**9:
            raise ArgumentError(
                "more than a billion steps stay within this target: check the values"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low
