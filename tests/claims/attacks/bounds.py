"""From an attack's scores to lower bounds on epsilon, jointly at a stated confidence.

Many runs
: the attacker answers "present" where a score exceeds a threshold. FPR and FNR are its error rates.
  (epsilon, delta)-DP forbids FPR and FNR that are both small (Kairouz, Oh, Viswanath 2015); so does
  mu-Gaussian DP (Dong, Roth, Su 2022). Clopper-Pearson intervals turn counts into bounds on them.

Mean difference
: where scores are Gaussian, their means and variances suffice, and no threshold is needed.

One run with many canaries
: :mod:`attacks.one_run`.

Several bounds from the same scores share 1 - confidence equally: all hold together (union bound).

========================  ==========================================  =============================
bound                     assumes                                     so it is
========================  ==========================================  =============================
``mean-difference``       independent Gaussian scores                 tight for Gaussian steps
``gaussian``              that the trade-off curve is a Gaussian's    nearly tight for one Gaussian
``clopper-pearson``       nothing about the mechanism                 loose at small delta
``one-run f-DP``          that the trade-off curve is a Gaussian's    tighter than the next
``one-run``               nothing about the mechanism                 loose, but costs one training
========================  ==========================================  =============================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import chi2

from dpbam import _validate
from dpbam.app.audit.membership import rate_at_most
from dpbam.errors import ArgumentError

Scores = NDArray[np.float64]
_TUNED_ON = 0.1  # the share of trials that choose the threshold; the others are counted
_MOST_MU = 1e3  # epsilon above 500,000: no noise to speak of


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon.

    Attributes:
        name: how it was obtained.
        epsilon: the lower bound; 0 if nothing was shown.
        delta: its delta.
        confidence: the probability that no bound of the audit exceeds the true epsilon.
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
    first = float(ndtr(-epsilon / mu + mu / 2))
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


def many_runs(
    present: ArrayLike,
    absent: ArrayLike,
    delta: float,
    confidence: float,
    *,
    normal: bool = False,
) -> list[Bound]:
    """Bounds from independent scores with and without the canary; ``normal``: they are Gaussian.

    A tenth of the trials chooses the thresholds and is then left out, so that the choice does not
    flatter the count. FPR and FNR each may fail with half of a bound's share of 1 - confidence.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores = rng.normal(1, 1, 4000), rng.normal(0, 1, 4000)
        >>> bounds = many_runs(*scores, 1e-5, 0.95, normal=True)
        >>> [(b.name, round(b.epsilon, 1)) for b in bounds]  # the truth is 4.4
        [('mean-difference', 3.8), ('gaussian', 3.6), ('clopper-pearson', 1.8)]
    """
    _validate.probability("delta", delta)
    failure = 1 - _validate.probability("confidence", confidence)
    one, zero = np.asarray(present, np.float64), np.asarray(absent, np.float64)
    least = min(len(one), len(zero))
    if least < 8:
        raise ArgumentError(f"an audit needs at least 8 trials of each kind, got {least}")
    tuned = max(min(20, least // 2), round(least * _TUNED_ON))
    forms: dict[str, Callable[[float, float], float]] = {
        "gaussian": lambda fpr, fnr: _gaussian(fpr, fnr, delta),
        "clopper-pearson": lambda fpr, fnr: _distribution_free(fpr, fnr, delta),
    }
    error = failure / (len(forms) + normal)
    bounds = []
    if normal:
        bounds.append(replace(mean_difference(one, zero, delta, 1 - error), confidence=confidence))
    for name, form in forms.items():
        threshold = _best_threshold(one[:tuned], zero[:tuned], form, error / 2, least - tuned)
        value = form(*_rates(one[tuned:], zero[tuned:], threshold, error / 2))
        bounds.append(Bound(name, value, delta, confidence))
    return bounds


def mean_difference(
    present: ArrayLike, absent: ArrayLike, delta: float, confidence: float
) -> Bound:
    """The bound from means and estimated variances, if scores are independent Gaussians.

    Present scores are N(m1, s1^2), absent ones N(m0, s0^2); nothing is known of m and s. With
    probability ``confidence`` all of these hold (union bound; half of the error for the third):

        s_k^2 <= S_k^2 = sum (x - mean)^2 / chi2_(n_k - 1)^-1(error / 4),  k = 0, 1
        m1 - m0 >= D = mean(present) - mean(absent) - z(error / 2) sqrt(S_1^2 / n1 + S_0^2 / n0)

    Then epsilon is at least that of mu-Gaussian DP for mu = D / max(S_1, S_0), even if s1 != s0:
    let s0 be the larger, and A = {x < t} the best event between N(m1, s0^2) and N(m0, s0^2), so
    t < m1. N(m1, s1^2) gives A no more probability than N(m1, s0^2), so A separates at least as
    well. With s1 the larger, A = {x > t} does. Both directions are neighbours.

    The variance is not taken from the plan: noise of half the deviation doubles mu.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> there, gone = rng.normal(0.925, 1, 60_000), rng.normal(0, 1, 60_000)
        >>> round(mean_difference(there, gone, 1e-5, 0.95).epsilon, 2)  # the truth is 4.00
        3.92
    """
    error = 1 - _validate.probability("confidence", confidence)
    one, zero = np.asarray(present, np.float64), np.asarray(absent, np.float64)
    if min(len(one), len(zero)) < 2:
        return Bound("mean-difference", 0.0, delta, confidence)
    squares = [
        float(np.square(x - x.mean()).sum() / chi2.ppf(error / 4, len(x) - 1)) for x in (one, zero)
    ]
    spread = math.sqrt(squares[0] / len(one) + squares[1] / len(zero))
    least = float(one.mean() - zero.mean()) - float(-ndtri(error / 2)) * spread
    largest = math.sqrt(max(squares))
    mu = min(_MOST_MU, least / largest) if largest else _MOST_MU * (least > 0)
    return Bound("mean-difference", gaussian_epsilon(mu, delta), delta, confidence)


def _gaussian(fpr: float, fnr: float, delta: float) -> float:
    """mu >= Phi^-1(1 - FPR) - Phi^-1(FNR)."""
    if fpr + fnr >= 1:
        return 0.0
    return gaussian_epsilon(float(-ndtri(fpr) - ndtri(fnr)), delta)


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

    A normal fit to each kind of score predicts the counts: it varies less than the counts of a few
    trials, and a poor fit costs strength only, since other trials are counted.
    """
    (m1, s1), (m0, s0) = ((float(x.mean()), float(x.std()) + 1e-9) for x in (one, zero))

    def promise(threshold: float) -> float:
        wrong = ndtr((m0 - threshold) / s0), ndtr((threshold - m1) / s1)
        return form(*(rate_at_most(trials * float(w), trials, error) for w in wrong))

    return max((float(t) for t in np.linspace(m0 - s0, m1 + 3 * s1, 25)), key=promise)
