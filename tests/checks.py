"""Checks of privacy claims. Each passes on the real code and fails on its planted mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom, chi2, kstest, norm

LEVEL = 1e-3  # a right implementation fails a check this often; every test here is seeded
RARE = 1e-10  # likewise for what cannot be seeded: 100 such tests fail once in 10^8 runs


def check_gaussian(values: ArrayLike, std: float, level: float = LEVEL) -> None:
    """Independent draws of N(0, std^2), by Kolmogorov and Smirnov; false alarms: ``level``."""
    result = kstest(np.asarray(values, dtype=float) / std, "norm")
    assert result.pvalue > level, f"not N(0, {std:g}^2): p = {result.pvalue:.2g}"


def check_normal(values: ArrayLike, std: float) -> None:
    """Variance and tails of independent draws of N(0, std^2); false alarms: 3 RARE.

    The sum of squares is std^2 times a chi-square; the number beyond a multiple of std is binomial.
    Of 200,000 draws at 0.98 std the sum of squares is 12.5 standard errors too low, of which the
    level takes 6.5: missed once in 10^8 times. None beyond 3.5 std has probability exp(-93).
    """
    sizes = np.abs(np.asarray(values, dtype=float)) / std
    p = _two_sided(chi2, np.square(sizes).sum(), len(sizes))
    assert p > RARE, f"variance {np.square(sizes).mean():.4f} std^2: p = {p:.2g}"
    for edge in (3.01, 3.5):
        check_beyond(sizes, edge)


def check_beyond(sizes: NDArray[np.float64], edge: float) -> None:
    """How many sizes of standard normal draws exceed ``edge``; false alarms: RARE."""
    beyond = int((sizes > edge).sum())
    p = _two_sided(binom, beyond, len(sizes), 2 * norm.sf(edge))
    assert p > RARE, f"{beyond} of {len(sizes)} beyond {edge} std: p = {p:.2g}"


def _two_sided(law: Any, value: float, *parameters: float) -> float:
    """Twice the probability of the smaller tail that ``value`` is in, itself included."""
    below, above = law.cdf(value, *parameters), law.sf(value, *parameters)
    return float(2 * min(below, above + (law.pmf(value, *parameters) if law is binom else 0.0)))


def _standard_errors(level: float) -> float:
    """How many a standard normal exceeds with probability ``level`` at most, and 3.5 at least."""
    return max(3.5, float(norm.isf(level / 2)))


def check_uncorrelated(a: ArrayLike, b: ArrayLike, level: float = LEVEL) -> None:
    """sqrt(N) times the correlation is standard normal for independent draws."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    z = np.sqrt(len(a)) * np.corrcoef(a, b)[0, 1]
    assert abs(z) < _standard_errors(level), f"correlated: z = {z:.1f}"


def check_poisson(batches: list[ArrayLike], n: int, q: float, level: float = LEVEL) -> None:
    """Every index on its own with probability q in each of T batches, and at most once.

    Four facts: no repeats; inclusions of an index are Binomial(T, q); batch sizes are
    Binomial(n, q); whether an index is in a batch says nothing about the next one.
    """
    included = np.zeros((len(batches), n))
    for row, batch in zip(included, batches, strict=True):
        batch = np.asarray(batch, dtype=int)
        assert len(np.unique(batch)) == len(batch), "an index twice in one batch"
        row[batch] = 1
    _check_counts(included.sum(0), len(batches), q, level, "inclusions of an index")
    _check_counts(included.sum(1), n, q, level, "batch sizes")
    check_uncorrelated(included[1:].flatten(), included[:-1].flatten(), level)


def _check_counts(
    counts: NDArray[np.float64], trials: int, q: float, level: float, what: str
) -> None:
    """Mean and variance of Binomial(trials, q): a mean's z and a dispersion's chi-square."""
    mean, variance = binom.stats(trials, q)
    z = (counts.mean() - mean) / np.sqrt(variance / len(counts))
    assert abs(z) < _standard_errors(level), (
        f"{what}: mean {counts.mean():.2f}, expected {mean:.2f}"
    )
    dispersion = ((counts - mean) ** 2).sum() / variance
    p = 2 * min(chi2.cdf(dispersion, len(counts)), chi2.sf(dispersion, len(counts)))
    assert p > level, f"{what}: variance {counts.var():.2f}, expected {variance:.2f}"
