"""What choosing the best of several private trainings costs, and how many there may be.

Papernot and Steinke (2022): train K times, with hyper-parameters drawn anew each time, and release
the best model alone. If K is fixed, the choice can cost as much as releasing all K. If K is random,
drawn independently of the data and never published, it costs little more than one training:

====================================  ========================================================
K is drawn from                       then, with a trial's RDP eps(alpha) at order alpha,
====================================  ========================================================
Poisson of mean m                     eps(a) + m delta + log(m) / (a - 1), delta that of the
                                      trial at epsilon log(1 + 1 / (a - 1))
truncated negative binomial of        eps(a) + (1 + eta) min_b ((1 - 1/b) eps(b) +
mean m and shape eta (1: geometric)   log(1/gamma) / b) + log(m) / (a - 1)
====================================  ========================================================

dp-accounting's RDP accountant computes both, as its ``RepeatAndSelectDpEvent``. The theorem
assumes, and a search enforces, that trials are independent and identically distributed
(drawn at random before the first training), that K is not published, and that the score by which
the best is chosen is public or protected itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.accounting import Charge, quiet
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from numpy.random import Generator

DISTRIBUTIONS = ("poisson", "negative-binomial")
_NOISE = (1e-2, 2.0**17)  # the noise multipliers that calibration tries
_LEAST_SHAPE = 1e-3  # below it, a draw of the negative binomial above 0 takes forever
_MOST = 10**6  # a draw above it means that the shape is a mistake


@dataclass(frozen=True)
class Selection:
    """Stages that each release the best of K trials, and the distribution of K.

    Guarantee: K is drawn as stated, independently of the data.

    Assumptions: K is not published.

    Proof: standard distributions; tests/app/search/test_selection.py.

    Attributes:
        mean: E[K] = m, at least 1.
        distribution: "poisson" (K may be 0: then nothing is released), or "negative-binomial",
            truncated to K >= 1.
        shape: eta of the latter: 1 is the geometric distribution, 0 the logarithmic one. A smaller
            one costs less privacy and makes K vary more.
        stages: selections, one after the other.
        score_noise: the deviation of the noise on the number of test records that a trial gets
            right, which one record changes by at most 1; None if those records are public.
    """

    mean: float
    distribution: str = "poisson"
    shape: float = 1.0
    stages: int = 1
    score_noise: float | None = None

    def __post_init__(self) -> None:
        _validate.one_of("distribution", self.distribution, DISTRIBUTIONS)
        if not (math.isfinite(self.mean) and self.mean >= 1):
            raise ArgumentError(f"the mean number of trials must be at least 1, got {self.mean!r}")
        if 0 < _validate.non_negative("shape", self.shape) < _LEAST_SHAPE:
            raise ArgumentError(
                f"shape must be 0 or at least {_LEAST_SHAPE:g}, got {self.shape!r}: use 0"
            )
        if self.distribution != "poisson" and self.mean == 1:
            raise ArgumentError("a mean of 1 leaves nothing to choose from: use more trials")
        if self.score_noise is not None:
            _validate.positive("score_noise", self.score_noise)

    def draw(self, generator: Generator) -> int:
        """Draw K, the number of trials of one stage."""
        if self.distribution == "poisson":
            return int(generator.poisson(self.mean))
        gamma = self.gamma()
        if self.shape == 0:
            return int(generator.logseries(1 - gamma))
        count = 0
        while count == 0:  # the negative binomial, given that it is not 0
            count = int(generator.negative_binomial(self.shape, gamma))
        if count > _MOST:
            raise ArgumentError(
                f"{count} trials were drawn: choose a larger --shape or fewer --trials"
            )
        return count

    def gamma(self) -> float:
        """Solve E[K] = m for the gamma of the negative binomial.

        E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta)),
        at eta = 0: (1 / gamma - 1) / log(1 / gamma)
        """
        from scipy.optimize import brentq

        if self.shape == 1:
            return 1 / self.mean

        def excess(log_gamma: float) -> float:
            gamma, decay = math.exp(log_gamma), -math.expm1(self.shape * log_gamma)
            factor = self.shape / decay if self.shape else -1 / log_gamma
            return factor * (1 - gamma) / gamma - self.mean

        return math.exp(brentq(excess, -50.0, -1e-9, xtol=1e-14))

    def describe(self) -> str:
        """Name the distribution of K: what may be published about it."""
        if self.distribution == "poisson":
            return f"Poisson, mean {self.mean:g}"
        return f"truncated negative binomial, shape {self.shape:g}, mean {self.mean:g}"


@lru_cache(maxsize=1024)  # dp-accounting's Renyi divergences take a tenth of a second
def search_epsilon(trial: Charge, delta: float, selection: Selection) -> float:
    """Return the epsilon of a whole search, by RDP.

    Guarantee: the released winner is (epsilon, delta)-DP, the whole search included.

    Assumptions: trials are independent and identically distributed, K is drawn as stated and
    secret, the score is public or noised, and nothing but the winner is released.

    Proof: Papernot and Steinke 2022, by dp-accounting's RDP accountant.

    Args:
        trial: sigma, q and the steps of one trial.
        delta: the failure probability of the guarantee.
        selection: how the best trials are chosen.
    """
    import dp_accounting as dp

    _validate.probability("delta", delta)
    noise = dp.GaussianDpEvent(trial.noise_multiplier)
    event = dp.SelfComposedDpEvent(
        dp.PoissonSampledDpEvent(trial.sampling_rate, noise), trial.steps
    )
    if selection.score_noise is not None:
        event = dp.ComposedDpEvent([event, dp.GaussianDpEvent(selection.score_noise)])
    # dp-accounting writes Poisson's distribution as the limit of an infinite shape
    shape = math.inf if selection.distribution == "poisson" else selection.shape
    event = dp.dp_event.RepeatAndSelectDpEvent(event, selection.mean, shape)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with quiet():
        accountant.compose(event, selection.stages)
        return float(accountant.get_epsilon(delta))


def search_noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, selection: Selection
) -> float:
    """Return the least sigma of a trial, to a relative 1e-4, that keeps a search within epsilon.

    Guarantee: epsilon of the search with the returned sigma is at most the target.

    Assumptions: as for ``search_epsilon``.

    Proof: the value that is returned was checked.
    """
    from scipy.optimize import brentq

    _validate.positive("epsilon", epsilon)

    def excess(log_sigma: float) -> float:
        trial = Charge(math.exp(log_sigma), sampling_rate, steps)
        spent = search_epsilon(trial, delta, selection)
        return min(spent, 2 * epsilon) - epsilon  # finite at any sigma

    low, high = map(math.log, _NOISE)
    if excess(high) > 0:
        noise_the_score = "noise the score more, or " if selection.score_noise is not None else ""
        raise ArgumentError(
            f"no noise keeps this search within epsilon {up(epsilon)}: {noise_the_score}"
            "use fewer trials or methods, or a larger epsilon"
        )
    if excess(low) <= 0:
        return math.exp(low)
    least = float(brentq(excess, low, high, xtol=5e-5))
    while excess(least) > 0:
        least += 2e-5
    return math.exp(least)
