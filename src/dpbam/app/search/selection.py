"""What choosing the best of several private trainings costs.

Papernot and Steinke (2022): train K times, with hyper-parameters drawn anew each time, and release
the best model alone. If K is fixed, the choice can cost as much as releasing all K. If K is random,
drawn independently of the data and never published, it costs little more than one training: with K
of a Poisson distribution of mean m, and eps(a) the Renyi divergence of a trial at order a,

    eps(a) + m delta + log(m) / (a - 1),  delta that of the trial at epsilon log(1 + 1 / (a - 1)).

dp-accounting's RDP accountant computes it, as its ``RepeatAndSelectDpEvent``. The theorem assumes,
and a search enforces, that trials are independent and identically distributed (drawn at random
before the first training), that K is not published, and that the score by which the best is chosen
is public or protected itself.
"""

from __future__ import annotations

import math
from functools import lru_cache

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.accounting import Charge, quiet
from dpbam.privacy.rounding import up

_NOISE = (1e-2, 2.0**17)  # the noise multipliers that calibration tries


@lru_cache(maxsize=1024)  # dp-accounting's Renyi divergences take a tenth of a second
def search_epsilon(
    trial: Charge, delta: float, mean: float, score_noise: float | None = None
) -> float:
    """Return the epsilon of a whole search, by RDP.

    Guarantee: the released winner is (epsilon, delta)-DP, the whole search included.

    Assumptions: trials are independent and identically distributed, K is drawn as stated and
    secret, the score is public or noised, and nothing but the winner is released.

    Proof: Papernot and Steinke 2022, by dp-accounting's RDP accountant.

    Args:
        trial: sigma, q and the steps of one trial.
        delta: the failure probability of the guarantee.
        mean: E[K] = m, at least 1.
        score_noise: the deviation of the noise on the number of test records that a trial gets
            right, which one record changes by at most 1; None if those records are public.
    """
    import dp_accounting as dp

    _validate.probability("delta", delta)
    if not (math.isfinite(mean) and mean >= 1):
        raise ArgumentError(f"the mean number of trials must be at least 1, got {mean!r}")
    noise = dp.GaussianDpEvent(trial.noise_multiplier)
    event = dp.SelfComposedDpEvent(
        dp.PoissonSampledDpEvent(trial.sampling_rate, noise), trial.steps
    )
    if score_noise is not None:
        score = dp.GaussianDpEvent(_validate.positive("score_noise", score_noise))
        event = dp.ComposedDpEvent([event, score])
    # dp-accounting writes Poisson's distribution as the limit of an infinite shape
    event = dp.dp_event.RepeatAndSelectDpEvent(event, mean, math.inf)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with quiet():
        accountant.compose(event)
        return float(accountant.get_epsilon(delta))


def search_noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, mean: float,
    score_noise: float | None = None,
) -> float:  # fmt: skip
    """Return the least sigma of a trial, to a relative 1e-4, that keeps a search within epsilon.

    Guarantee: epsilon of the search with the returned sigma is at most the target.

    Assumptions: as for ``search_epsilon``.

    Proof: the value that is returned was checked.
    """
    from scipy.optimize import brentq

    _validate.positive("epsilon", epsilon)

    def excess(log_sigma: float) -> float:
        trial = Charge(math.exp(log_sigma), sampling_rate, steps)
        spent = search_epsilon(trial, delta, mean, score_noise)
        return min(spent, 2 * epsilon) - epsilon  # finite at any sigma

    low, high = map(math.log, _NOISE)
    if excess(high) > 0:
        noise_the_score = "noise the score more, or " if score_noise is not None else ""
        raise ArgumentError(
            f"no noise keeps this search within epsilon {up(epsilon)}: {noise_the_score}"
            "use fewer trials, or a larger epsilon"
        )
    if excess(low) <= 0:
        return math.exp(low)
    least = float(brentq(excess, low, high, xtol=5e-5))
    while excess(least) > 0:
        least += 2e-5
    return math.exp(least)
