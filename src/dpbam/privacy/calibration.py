"""What a target costs: the least noise, or the most steps, within (epsilon, delta).

A search on a coarse grid of the accountant comes first, since its fine grid takes long; what is
returned was checked on the fine one, and is never above the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.accounting import (
    ACCOUNTANTS,
    Charge,
    checked,
    joint_noise_multiplier,
    rough_epsilon,
    total_epsilon,
)
from dpbam.privacy.rounding import up

_MOST_EPSILON = 1e9
_LEAST_NOISE, _MOST_NOISE = 1e-6, 1e6  # sigma; an accountant takes no less


def noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    *,
    accountant: str = "pld",
    spent: Sequence[Charge] = (),
    phases: Sequence[tuple[float, int]] = (),
) -> float:
    """Return the least sigma, to a relative 1e-4, whose epsilon does not exceed the target.

    What was ``spent`` before on the same data counts: all together stay within the target. With
    ``phases``, pairs of a factor and a number of steps, the noise of a phase is factor * sigma.

    Guarantee: epsilon of the returned sigma, with what was spent, is at most the target.

    Assumptions: as for ``accounting.total_epsilon``.

    Proof: the sigma that is returned was checked by the accountant's fine grid.

    Example:
        >>> sigma = noise_multiplier(8.0, 1e-5, 4096 / 50_000, 1000)
        >>> round(sigma, 3)
        1.731
    """
    _validate.probability("delta", delta)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)
    _validate.count("steps", steps)
    if _validate.positive("epsilon", epsilon) > _MOST_EPSILON:
        raise ArgumentError(
            f"epsilon must be at most {_MOST_EPSILON:g}: a larger one promises nothing; "
            "training without privacy is PrivacyPlan.non_private(...)"
        )

    before = tuple(checked(c) for c in spent)
    checked(Charge(1.0, sampling_rate, steps))
    # -expm1(T log(1 - q)): a unit that is never drawn loses nothing, with or without noise
    chance = 1.0 if sampling_rate == 1 else -math.expm1(steps * math.log1p(-sampling_rate))
    if chance <= delta:
        raise ArgumentError(
            f"delta {delta:g} is not below {chance:.3g}, the probability that a unit is drawn at "
            "all, so it would be met without any noise: choose a delta well below 1/n"
        )
    if before and (already := total_epsilon(before, delta, accountant=accountant)) >= epsilon:
        raise ArgumentError(
            f"earlier steps have spent epsilon {up(already)} at this delta, which leaves nothing "
            f"of {up(epsilon)}: raise epsilon or delta, or stop here"
        )

    def charges(sigma: float) -> tuple[Charge, ...]:
        parts = [Charge(sigma * f, sampling_rate, k) for f, k in phases or [(1.0, steps)]]
        return (*before, *map(checked, parts))

    def rough(sigma: float) -> float:
        return rough_epsilon(charges(sigma), delta, accountant, near=epsilon)

    def exact(sigma: float) -> float:
        return total_epsilon(charges(sigma), delta, accountant=accountant)

    guess = _gaussian_guess(before, Charge(1.0, sampling_rate, steps), epsilon, delta)
    start, slope = _least_sigma(rough, epsilon, guess, slope=-1.5, tolerance=5e-5)
    return _least_sigma(exact, epsilon, start, slope, tolerance=1e-4)[0]


def max_steps(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    *,
    accountant: str = "pld",
) -> int:
    """Return the most steps whose epsilon does not exceed the target.

    Guarantee: epsilon of the returned number of steps is at most the target.

    Assumptions: as for ``accounting.total_epsilon``.

    Proof: it was checked; epsilon grows with the steps.

    Example:
        >>> max_steps(8.0, 1e-5, noise_multiplier=1.731, sampling_rate=4096 / 50_000)
        1000
    """
    _validate.positive("epsilon", epsilon)
    _validate.probability("delta", delta)
    _validate.one_of("accountant", accountant, ACCOUNTANTS)

    def charges(steps: int) -> tuple[Charge, ...]:
        return (checked(Charge(noise_multiplier, sampling_rate, steps)),)

    def roughly_within(k: int) -> bool:
        return rough_epsilon(charges(k), delta, accountant, near=epsilon) <= epsilon

    def within(k: int) -> bool:
        return total_epsilon(charges(k), delta, accountant=accountant) <= epsilon

    start = _most_steps(roughly_within, 0, 1)
    return _most_steps(within, start, max(1, start // 500))


def remaining_noise_multiplier(joint: float, others: Sequence[float]) -> float:
    """Return the sigma that together with ``others`` has a joint noise multiplier of ``joint``.

    Guarantee: the joint noise multiplier of sigma and the others is at least ``joint``.

    Assumptions: as for ``joint_noise_multiplier``.

    Proof: the last loop raises sigma until rounding does not lower it.
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
    while joint_noise_multiplier((sigma, *others)) < joint:  # by rounding
        sigma *= 1 + 1e-9
    return sigma


def _gaussian_guess(before: Sequence[Charge], last: Charge, target: float, delta: float) -> float:
    """Return the sigma of ``last`` at which the central limit of all steps has epsilon ``target``.

    T subsampled steps tend to a Gaussian mechanism with mu^2 = q^2 T (e^(1 / sigma^2) - 1), and
    mu^2 adds up. It is where the search starts, and never its result.
    """
    from scipy.optimize import brentq

    def excess(log_mu: float) -> float:
        return _gaussian_delta(math.exp(log_mu), target) - delta

    # beyond these ends a target is out of reach, which the search itself finds out
    least, most = math.log(1e-6), math.log(1e6)
    if excess(least) >= 0 or excess(most) <= 0:
        log_mu = least if excess(least) >= 0 else most
    else:
        log_mu = brentq(excess, least, most, xtol=1e-3)
    mu = math.exp(log_mu)
    used = sum(c.sampling_rate**2 * c.steps * math.expm1(c.noise_multiplier**-2) for c in before)
    left = max(mu**2 - used, 1e-2 * mu**2)
    return 1 / math.sqrt(math.log1p(left / (last.sampling_rate**2 * last.steps)))


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the Gaussian mechanism's Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    from scipy.special import log_ndtr, ndtr

    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


def _least_sigma(
    spent: Callable[[float], float], target: float, sigma: float, slope: float, tolerance: float
) -> tuple[float, float]:
    """Return the least sigma with spent(sigma) <= target, and the slope there.

    Secants from ``sigma`` on, of log epsilon over log sigma, which is nearly a line: three calls of
    ``spent`` where a bracketing method (scipy's brentq) takes eight. ``slope`` is that of the line.
    The sigma that is returned was checked, and is the least to a relative ``tolerance``.
    """
    above, within = 0.0, math.inf  # the largest sigma over the target, and the least within it
    last_sigma = last_excess = 0.0
    for _ in range(8):
        sigma = min(max(sigma, _LEAST_NOISE), _MOST_NOISE)
        value = spent(sigma)
        above, within = (above, min(within, sigma)) if value <= target else (sigma, within)
        if value == 0 and sigma > _LEAST_NOISE:
            break  # over a range of sigmas: a secant leads anywhere
        excess = math.log(min(max(value, 1e-9 * target), 1e9 * target) / target)
        if last_sigma not in (0.0, sigma) and excess != last_excess:
            slope = min((excess - last_excess) / math.log(sigma / last_sigma), -0.1)
        move = -excess / slope  # of log sigma; positive: more noise is needed
        if value <= target and (sigma == _LEAST_NOISE or -move < tolerance):
            return sigma, slope
        last_sigma, last_excess = sigma, excess
        # aim slightly inside the target
        sigma *= math.exp(min(max(move, -1.0), 1.0) + tolerance / 5)
    return _bisect_sigma(spent, target, above or sigma, within), slope


def _bisect_sigma(
    spent: Callable[[float], float], target: float, above: float, within: float
) -> float:
    """Return the least sigma within the target, to a relative 1e-4, where secants fail.

    ``above`` need not be over the target, nor ``within`` be known (infinite): both are found.
    """
    factor = 1.001  # steps grow, since small sigmas take an accountant long
    while above > _LEAST_NOISE and spent(above) <= target:
        above, within, factor = max(above / factor, _LEAST_NOISE), above, factor**2
    if within == math.inf:
        within = above
        while spent(within) > target:
            above, within, factor = within, factor * within, factor**2
            if within > _MOST_NOISE:
                raise ArgumentError(
                    f"no noise multiplier up to 1e6 is known to meet epsilon {target:g} at this "
                    "delta: raise epsilon or delta, train for fewer steps, or take a smaller batch"
                )
    while within > above * (1 + 1e-4):
        middle = math.sqrt(above * within)
        above, within = (above, middle) if spent(middle) <= target else (middle, within)
    return within


def _most_steps(within: Callable[[int], bool], low: int, stride: int) -> int:
    """Return the largest k with within(k): double the stride from ``low`` on, then bisect."""
    if not within(low):  # cannot happen on a finer grid; safe if it should
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
