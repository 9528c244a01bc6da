"""What privacy costs: (epsilon, delta) of Poisson-subsampled Gaussian steps, by dp-accounting.

Neighbours differ by one unit of privacy, added or removed. ``pld`` composes privacy loss
distributions and is tight (its discretisation only ever rounds up); ``rdp`` goes by Renyi
divergences and is looser. Neither knows the method: BAM's and DP-SAT's steps cost what DP-SGD's do.
No torch here: calculators start fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from dpbam import _validate

if TYPE_CHECKING:
    from dp_accounting import PrivacyAccountant

ACCOUNTANTS = ("pld", "rdp")
_FINE, _COARSE = (
    1e-4,
    1e-3,
)  # PLD grid of the loss: coarse to find the neighbourhood, fine to answer


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
    return _total_epsilon(tuple(_checked(c) for c in charges), delta, accountant, _FINE)


def noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, *, accountant: str = "pld"
) -> float:
    """The least sigma (to a relative 1e-4) whose epsilon does not exceed the target: never above.

    Example:
        >>> sigma = noise_multiplier(8.0, 1e-5, 4096 / 50_000, 1000)
        >>> round(sigma, 3)
        1.731
    """
    _validate.positive("epsilon", epsilon)
    _validate.probability("delta", delta)

    def spent(sigma: float, grid: float) -> float:
        return _total_epsilon(
            (_checked(Charge(sigma, sampling_rate, steps)),), delta, accountant, grid
        )

    def within(grid: float) -> Callable[[float], bool]:
        return lambda sigma: spent(sigma, grid) <= epsilon

    low, high = _bracket(within(_COARSE))
    coarse = _least_sigma(within(_COARSE), low, high, 1e-3)
    # The coarse grid rounds up, so its sigma is an upper end; the fine one lies a little below.
    return _least_sigma(within(_FINE), coarse * 0.99, coarse, 1e-4)


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

    def within(steps: int, grid: float) -> bool:
        charge = _checked(Charge(noise_multiplier, sampling_rate, steps))
        return _total_epsilon((charge,), delta, accountant, grid) <= epsilon

    coarse = _most_steps(lambda k: within(k, _COARSE), 0, 1)
    return _most_steps(lambda k: within(k, _FINE), coarse, max(1, coarse // 500))


def accountant_version(accountant: str) -> str:
    """The accountant and its version, for a privacy statement."""
    return f"dp-accounting {version('dp-accounting')}, {accountant.upper()}"


def _checked(charge: Charge) -> Charge:
    _validate.non_negative("noise_multiplier", charge.noise_multiplier)
    _validate.positive("sampling_rate", charge.sampling_rate)
    if charge.sampling_rate > 1:
        raise ValueError(f"sampling_rate must be at most 1, got {charge.sampling_rate}")
    _validate.count("steps", charge.steps, least=0)
    return charge


@lru_cache(maxsize=4096)
def _total_epsilon(
    charges: tuple[Charge, ...], delta: float, accountant: str, grid: float
) -> float:
    import dp_accounting

    spent = [c for c in charges if c.steps]
    if any(c.noise_multiplier == 0 for c in spent):
        return math.inf
    ledger = _fresh(accountant, grid)
    for sigma, q, count in spent:
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        ledger.compose(step, count)
    return float(ledger.get_epsilon(delta)) if spent else 0.0


def _fresh(accountant: str, grid: float) -> PrivacyAccountant:
    """A new accountant for neighbours that differ by one added or removed unit."""
    import dp_accounting

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if accountant == "rdp":
        return dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    return dp_accounting.pld.PLDAccountant(relation, value_discretization_interval=grid)


def _bracket(enough: Callable[[float], bool]) -> tuple[float, float]:
    """(low, high) with high enough and low not: doubling or halving from 1."""
    high = 1.0
    if enough(high):
        while high > 1e-3 and enough(high / 2):
            high /= 2
        return high / 2, high
    while not enough(high):
        high *= 2
        if high > 1e6:
            raise ValueError(
                "no noise multiplier up to 1e6 meets this target: raise epsilon or delta, or "
                "train for fewer steps"
            )
    return high / 2, high


def _least_sigma(
    enough: Callable[[float], bool], low: float, high: float, tolerance: float
) -> float:
    """Bisect for the least sigma that is enough; the result always is."""
    while not enough(high):  # only by a hair, where a bracket handed in was too tight
        high *= 1 + tolerance
    while enough(low):  # likewise
        high, low = low, low * 0.95
    while high - low > tolerance * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _most_steps(within: Callable[[int], bool], low: int, stride: int) -> int:
    """The largest k with within(k): gallop up from ``low``, which is within, then bisect."""
    if not within(low):  # the finer grid never disagrees that way; stay safe if it should
        return _most_steps(within, 0, 1)
    high = low + stride
    while within(high):
        low, stride = high, stride * 2
        high = low + stride
        if high > 10**9:
            raise ValueError("more than a billion steps stay within this target: check the values")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low
