"""From an attack's scores to a lower bound on epsilon, at a stated confidence.

Many runs
: the attacker answers "present" where a score exceeds a threshold. FPR and FNR are its error rates.
  (epsilon, delta)-DP forbids FPR and FNR that are both small (Kairouz, Oh, Viswanath 2015); so does
  mu-Gaussian DP (Dong, Roth, Su 2022). Clopper-Pearson intervals turn counts into bounds on them.

One run
: m canaries, each present with probability 1/2, and r guesses, v of them right (Steinke, Nasr,
  Jagielski 2023).

========================  ==========================================  =============================
bound                     assumes                                     so it is
========================  ==========================================  =============================
``clopper_pearson``       nothing about the mechanism                 loose at small delta
``gaussian``              that the trade-off curve is a Gaussian's    nearly tight for one Gaussian
``one_run``               nothing about the mechanism                 loose, but costs one training
========================  ==========================================  =============================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr
from scipy.stats import beta, binom, norm

from dpbam import _validate
from dpbam.errors import ArgumentError

Scores = NDArray[np.float64]
_TUNED_ON = 0.1  # the share of trials that choose the threshold; the others are counted
_SHARES = (1.0, 0.5, 0.25, 0.125)  # of the canaries that one run's attacker dares to guess


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon.

    Attributes:
        name: how it was obtained.
        epsilon: the lower bound; 0 if nothing was shown.
        delta: its delta.
        confidence: the probability that epsilon of a true mechanism is not below it.
    """

    name: str
    epsilon: float
    delta: float
    confidence: float


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of mu-Gaussian DP: Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2).

    Example:
        >>> round(gaussian_delta(1.0, 1.0), 4)
        0.1269
    """
    if mu == 0:
        return 0.0
    first = float(norm.cdf(-epsilon / mu + mu / 2))
    return first - math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-Gaussian DP at ``delta``; mu = sensitivity / standard deviation.

    Example:
        >>> round(gaussian_epsilon(0.925, 1e-5), 2)
        4.0
    """
    _validate.probability("delta", delta)
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1
    return float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, high, xtol=1e-9))


def rate_at_most(count: float, trials: int, error: float) -> float:
    """Clopper-Pearson: a rate that the true one exceeds with probability ``error`` at most.

    Example:
        >>> round(rate_at_most(0, 100, 0.05), 4)  # the rule of three
        0.0295
    """
    return 1.0 if count >= trials else float(beta.ppf(1 - error, count + 1, trials - count))


def many_runs(
    present: Sequence[float], absent: Sequence[float], delta: float, confidence: float
) -> list[Bound]:
    """The Gaussian-DP and the Clopper-Pearson bound from scores with and without the canary.

    A tenth of the trials chooses the thresholds and is then left out, so that the choice does not
    flatter the count. FPR and FNR each may fail with half of 1 - confidence.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> bounds = many_runs(rng.normal(1, 1, 4000), rng.normal(0, 1, 4000), 1e-5, 0.95)
        >>> [(b.name, round(b.epsilon, 1)) for b in bounds]  # the truth is 4.4
        [('gaussian', 3.7), ('clopper-pearson', 2.0)]
    """
    _validate.probability("delta", delta)
    error = (1 - _validate.probability("confidence", confidence)) / 2
    one, zero = np.asarray(present, np.float64), np.asarray(absent, np.float64)
    least = min(len(one), len(zero))
    if least < 8:
        raise ArgumentError(f"an audit needs at least 8 trials of each kind, got {least}")
    tuned = max(min(20, least // 2), round(least * _TUNED_ON))
    forms: dict[str, Callable[[float, float], float]] = {
        "gaussian": lambda fpr, fnr: _gaussian(fpr, fnr, delta),
        "clopper-pearson": lambda fpr, fnr: _distribution_free(fpr, fnr, delta),
    }
    bounds = []
    for name, form in forms.items():
        threshold = _best_threshold(one[:tuned], zero[:tuned], form, error, least - tuned)
        value = form(*_rates(one[tuned:], zero[tuned:], threshold, error))
        bounds.append(Bound(name, value, delta, confidence))
    return bounds


def _gaussian(fpr: float, fnr: float, delta: float) -> float:
    """mu >= Phi^-1(1 - FPR) - Phi^-1(FNR)."""
    if fpr + fnr >= 1:
        return 0.0
    return gaussian_epsilon(float(norm.isf(fpr) - norm.ppf(fnr)), delta)


def _distribution_free(fpr: float, fnr: float, delta: float) -> float:
    """log((1 - delta - FNR) / FPR), or the same with the two exchanged."""
    ratios = [(1 - delta - b) / a for a, b in ((fpr, fnr), (fnr, fpr)) if a > 0]
    return max([0.0, *(math.log(r) for r in ratios if r > 0)])


def _rates(one: Scores, zero: Scores, threshold: float, error: float) -> tuple[float, float]:
    """Upper bounds on FPR and FNR of "present if score > threshold"."""
    false_positives, false_negatives = int((zero > threshold).sum()), int((one <= threshold).sum())
    return (
        rate_at_most(false_positives, len(zero), error),
        rate_at_most(false_negatives, len(one), error),
    )


def _best_threshold(
    one: Scores, zero: Scores, form: Callable[[float, float], float], error: float, trials: int
) -> float:
    """The threshold that promises the best bound from ``trials`` more trials of each kind.

    A normal fit to each kind of score foretells the counts: it is steadier than the counts of a few
    trials, and a poor fit costs strength only, since other trials are counted.
    """
    (m1, s1), (m0, s0) = ((float(x.mean()), float(x.std()) + 1e-9) for x in (one, zero))

    def promise(threshold: float) -> float:
        wrong = norm.sf((threshold - m0) / s0), norm.cdf((threshold - m1) / s1)
        return form(*(rate_at_most(trials * float(w), trials, error) for w in wrong))

    return max((float(t) for t in np.linspace(m0 - s0, m1 + 3 * s1, 25)), key=promise)


def one_run(
    scores: Sequence[float], present: Sequence[bool], delta: float, confidence: float
) -> Bound:
    """A bound from one training with many canaries, each of them present with probability 1/2.

    The attacker calls the highest scores present and the lowest absent, and guesses all canaries,
    or half of them, or fewer; each choice is given its share of 1 - confidence.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> there = rng.random(1000) < 0.5
        >>> bound = one_run(4.0 * there + rng.normal(size=1000), there, 1e-5, 0.95)
        >>> round(bound.epsilon, 1)  # mu = 4: the truth is above 20
        4.7
    """
    _validate.probability("delta", delta)
    error = (1 - _validate.probability("confidence", confidence)) / len(_SHARES)
    order = np.argsort(np.asarray(scores, np.float64))
    there = np.asarray(present, bool)[order]
    best = 0.0
    for share in _SHARES:
        half = int(len(there) * share / 2)
        if not half:
            continue
        right = int(there[-half:].sum()) + int((~there[:half]).sum())
        best = max(best, _one_run_epsilon(len(there), 2 * half, right, delta, error))
    return Bound("one-run", best, delta, confidence)


def _one_run_epsilon(m: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest epsilon that is refuted: p-value at most ``error``."""

    def refuted(epsilon: float) -> bool:
        return _p_value(m, guesses, right, epsilon, delta) <= error

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The most probable that ``right`` or more guesses are right, under (epsilon, delta)-DP.

    Steinke, Nasr, Jagielski 2023, Theorem 5.2: f(v) + 2 m delta max_i (f(v - i) - f(v)) / i with
    f(v) = P[Binomial(r, e^eps / (1 + e^eps)) >= v].
    """
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, q))
    if right == 0:
        return 1.0
    steps = np.arange(1, right + 1)
    gains = np.cumsum(binom.pmf(right - steps, guesses, q)) / steps
    return min(1.0, tail + 2 * m * delta * float(gains.max()))
