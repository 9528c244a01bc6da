"""Lower bounds on epsilon from one training with many canaries, each present with probability 1/2.

The attacker calls the highest scores present and the lowest absent: r guesses, r fixed before the
run, W of them right. Scores may depend on one another: neither bound assumes that they do not. Both
are p-values: the largest P[W >= v] under a hypothesis, refuted where that is at most the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from attacks.bounds import Bound, Scores, gaussian_epsilon
from dpbam import _validate

_FEWEST = 16  # guesses
Inverse = Callable[[float], float]
Present = Sequence[bool] | NDArray[np.bool_]


def one_run(
    scores: ArrayLike, present: Present, delta: float, confidence: float, guesses: int
) -> list[Bound]:
    """The bounds of f-DP and of Steinke, Nasr and Jagielski; ``guesses`` must not depend on scores.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> there = rng.random(1000) < 0.5
        >>> bounds = one_run(4.0 * there + rng.normal(size=1000), there, 1e-5, 0.95, guesses=1000)
        >>> [round(b.epsilon, 1) for b in bounds]  # mu = 4: the truth is above 20
        [5.2, 3.0]
    """
    _validate.probability("delta", delta)
    error = (1 - _validate.probability("confidence", confidence)) / 2
    m, right = len(present), right_guesses(scores, present, guesses)
    mu = _largest(lambda mu: _refuted(_gaussian_inverse(mu), m, guesses, right, error))
    epsilon = _largest(lambda eps: _p_value(m, guesses, right, eps, delta) <= error)
    return [
        Bound("one-run f-DP", gaussian_epsilon(mu, delta), delta, confidence),
        Bound("one-run", epsilon, delta, confidence),
    ]


def right_guesses(scores: ArrayLike, present: Present, guesses: int) -> int:
    """How many are right of ``guesses``, half of them on the highest scores."""
    there = np.asarray(present, bool)[np.argsort(np.asarray(scores, np.float64))]
    low = guesses // 2
    return int((~there[:low]).sum()) + int(there[len(there) - (guesses - low) :].sum())


def best_guesses(
    attacks: Sequence[tuple[Scores, NDArray[np.bool_]]], delta: float, confidence: float
) -> int:
    """The number of guesses that serves simulated attacks (scores, present) best, on average."""
    m, error = len(attacks[0][1]), (1 - confidence) / 2
    choices = [max(m >> k, min(m, _FEWEST)) for k in range(max(1, m.bit_length() - 4))]

    def shown(guesses: int) -> float:
        right = int(np.mean([right_guesses(*attack, guesses) for attack in attacks]))
        return _largest(lambda eps: _p_value(m, guesses, right, eps, delta) <= error)

    return max(choices, key=shown)


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest parameter that is refuted; 0 if none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(20):
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


def _gaussian_inverse(mu: float) -> Inverse:
    """F^-1 for F = 1 - f of mu-Gaussian DP: F(x) = Phi(Phi^-1(x) + mu)."""
    return lambda y: float(ndtr(ndtri(min(y, 1.0)) - mu))


def _refuted(inverse: Inverse, m: int, r: int, v: int, error: float) -> bool:
    """Whether P[W >= v] < ``error`` for every f-DP mechanism; ``inverse`` is F^-1, F = 1 - f.

    Mahloujifar, Melis, Chaudhuri 2024. Flipping one canary's coin turns its right guess into a
    wrong one and W = c into c - 1. F is concave, so averaged over canaries and coins (Jensen),
    with p_k = P[W = k] and for every c,

        (1/m) sum_(k >= c) k p_k  <=  F( (1/m) sum_(k >= c - 1) (r - k) p_k )

    With tails s_c = P[W >= c] the left is a_c = (c s_c + sum_(k > c) s_k) / m, and the argument of
    F is ((r - c + 1) s_(c-1) - sum_(k >= c) s_k) / m. So s_v >= error implies, downwards from v,

        s_(c-1) >= max(s_c, (m F^-1(a_c) + sum_(k >= c) s_k) / (r - c + 1))

    The right side grows with every s_k, so equality is the least; if it ends above 1, s_v < error.
    """
    s, above = error, 0.0  # s_c, and the sum of s_k over k > c
    for c in range(v, 0, -1):
        a = (c * s + above) / m
        above += s
        s = max(s, (m * inverse(a) + above) / (r - c + 1))
        if s > 1:
            return True
    return False
