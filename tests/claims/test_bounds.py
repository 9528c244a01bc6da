"""Bounds from scores: right where the truth is known, and above it no more often than allowed."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from attacks import bounds, one_run
from scipy.optimize import linprog
from scipy.stats import binom, norm

JAX = json.loads((Path(__file__).parent / "jax_privacy.json").read_text())


def test_gaussian_epsilon_inverts_gaussian_delta() -> None:
    for mu, delta in product((0.1, 1.0, 5.0), (1e-6, 1e-3)):
        epsilon = bounds.gaussian_epsilon(mu, delta)
        assert bounds.gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-5)
    assert bounds.gaussian_epsilon(0.0, 1e-5) == 0.0
    assert bounds.gaussian_epsilon(1e-7, 1e-5) == 0.0  # delta alone allows it


def test_clopper_pearson_is_the_exact_binomial_bound() -> None:
    for count, trials in ((0, 10), (3, 10), (9, 10)):
        rate = bounds.rate_at_most(count, trials, 0.05)
        assert binom.cdf(count, trials, rate) == pytest.approx(0.05)
    assert bounds.rate_at_most(10, 10, 0.05) == 1.0


@pytest.mark.parametrize("case", JAX["many"], ids=lambda c: f"{c['threshold']}-{c['gaussian']:.2f}")
def test_bounds_agree_with_jax_privacy_on_the_same_scores(case: dict[str, object]) -> None:
    present, absent = np.array(case["present"]), np.array(case["absent"])
    rates = bounds._rates(present, absent, case["threshold"], case["significance"] / 2)
    delta = case["delta"]
    assert bounds._distribution_free(*rates, delta) == pytest.approx(case["clopper_pearson"])
    assert bounds._gaussian(*rates, delta) == pytest.approx(case["gaussian"], abs=1e-5)


@pytest.mark.parametrize("case", JAX["one"], ids=lambda c: f"{c['right']}of{c['guesses']}")
def test_one_run_agrees_with_jax_privacy(case: dict[str, float]) -> None:
    m, guesses, right = (int(case[k]) for k in ("m", "guesses", "right"))
    p = one_run._p_value(m, guesses, right, case["epsilon"], case["delta"])
    assert p == pytest.approx(case["p_value"], rel=1e-9)
    found = one_run._largest(
        lambda eps: one_run._p_value(m, guesses, right, eps, case["delta"]) <= 0.05
    )
    assert found == pytest.approx(case["lower_bound"], abs=1e-4)


def exceeding(truth: float, claimed: float, repeats: int = 25) -> int:
    """How many of ``repeats`` Gaussian audits with separation ``truth`` refute ``claimed``."""
    rng = np.random.default_rng(3)
    claim = bounds.gaussian_epsilon(claimed, 1e-5)
    found = [
        bounds.many_runs(rng.normal(truth, 1, 300), rng.normal(0, 1, 300), 1e-5, 0.9)
        for _ in range(repeats)
    ]
    return sum(any(b.epsilon > claim for b in pair) for pair in found)


def test_the_truth_is_refuted_no_more_often_than_allowed_and_a_lie_is() -> None:
    allowed = binom.ppf(0.999, 25, 0.1)
    assert exceeding(1.0, 1.0) <= allowed
    assert exceeding(2.0, 1.0) > 20  # twice the sensitivity


def test_perfect_separation_gives_what_the_counts_allow() -> None:
    gaussian, free = bounds.many_runs([1.0] * 1000, [0.0] * 1000, 1e-5, 0.95)
    rate = bounds.rate_at_most(0, 900, 0.05 / 4)  # two bounds, each with two rates
    assert free.epsilon == pytest.approx(math.log((1 - 1e-5 - rate) / rate))
    assert gaussian.epsilon == pytest.approx(bounds.gaussian_epsilon(2 * norm.isf(rate), 1e-5))


def test_scores_that_say_nothing_bound_nothing() -> None:
    rng = np.random.default_rng(0)
    assert [b.epsilon for b in bounds.many_runs(rng.normal(size=500), rng.normal(size=500),
                                                1e-5, 0.99)] == [0.0, 0.0]  # fmt: skip
    there = rng.random(400) < 0.5
    found = one_run.one_run(rng.normal(size=400), there, 1e-5, 0.99, guesses=100)
    assert [b.epsilon for b in found] == [0.0, 0.0]
    assert bounds.mean_difference(rng.normal(size=99), rng.normal(size=99), 1e-5, 0.99).epsilon == 0


def test_one_run_holds_for_randomised_response_and_refutes_half_of_it() -> None:
    """Guesses right with probability e^eps / (1 + e^eps), the most that eps-DP allows."""
    rng, epsilon = np.random.default_rng(1), 2.0
    there = rng.random(4000) < 0.5
    truthful = rng.random(4000) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(truthful, there, ~there) + 0.01 * rng.random(4000)
    _, bound = one_run.one_run(scores, there, 1e-9, 0.95, guesses=2000)
    assert epsilon / 2 < bound.epsilon <= epsilon


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 trials"):
        bounds.many_runs([1.0] * 7, [0.0] * 9, 1e-5, 0.95)


def above(claimed: float, separation: float, *, spread: float = 1.0, repeats: int = 300) -> int:
    """How many mean-difference bounds of confidence 0.9 lie above mu = ``claimed``, seeded."""
    rng = np.random.default_rng(4)
    claim = bounds.gaussian_epsilon(claimed, 1e-5)
    scores = ((rng.normal(separation, 1, 200), rng.normal(0, spread, 200)) for _ in range(repeats))
    return sum(bounds.mean_difference(*both, 1e-5, 0.9).epsilon > claim for both in scores)


def test_mean_difference_refutes_the_truth_as_seldom_as_it_says_and_half_the_noise_always() -> None:
    assert above(1.0, 1.0) <= binom.ppf(0.999, 300, 0.1)
    assert above(1.0, 2.0) == 300  # noise of half the deviation, in its own units


def test_mean_difference_holds_for_unequal_variances() -> None:
    """N(1, 1) against N(0, 2^2): epsilon is at least that of mu = 1/2, and no more is concluded."""
    assert above(0.5, 1.0, spread=2.0) <= binom.ppf(0.999, 300, 0.1)
    grid = np.linspace(-40, 40, 800_001)
    absent, present = norm.pdf(grid, 0, 2), norm.pdf(grid, 1, 1)
    epsilon = bounds.gaussian_epsilon(0.5, 1e-5)
    most = np.maximum(absent - math.exp(epsilon) * present, 0).sum() * (grid[1] - grid[0])
    assert most >= 1e-5  # delta of the pair at that epsilon


def test_a_known_variance_would_not_notice_too_little_noise() -> None:
    rng = np.random.default_rng(5)
    both = rng.normal(1, 0.5, 5000), rng.normal(0, 0.5, 5000)
    claim = bounds.gaussian_epsilon(1.0, 1e-5)
    known = (both[0].mean() - both[1].mean()) / 1.0
    assert bounds.gaussian_epsilon(known, 1e-5) < 1.1 * claim
    assert bounds.mean_difference(*both, 1e-5, 0.95).epsilon > 2 * claim


@pytest.mark.parametrize(("r", "v", "epsilon"), [(20, 15, 0.5), (60, 40, 0.5), (20, 20, 2.0)])
def test_f_dp_recursion_solves_the_linear_programme(r: int, v: int, epsilon: float) -> None:
    """F(x) = e^eps x: the largest P[W >= v] over all laws of W that keep the inequalities.

    Randomised response, Binomial(r, e^eps / (1 + e^eps)), is one of them.
    """
    k, blow_up = np.arange(r + 1), math.exp(epsilon)
    rows = [np.where(k >= c, k, 0) - blow_up * np.where(k >= c - 1, r - k, 0) for c in k[1:]]
    most = -linprog(-(k >= v).astype(float), np.array(rows), np.zeros(r), [np.ones(r + 1)], [1]).fun
    assert most >= binom.sf(v - 1, r, blow_up / (1 + blow_up)) * (1 - 1e-9)

    def refuted(error: float) -> bool:
        return one_run._refuted(lambda y: y / blow_up, 10 * r, r, v, error)

    assert refuted(most * (1 + 1e-6))
    assert not refuted(most * (1 - 1e-6))


def one_runs_above(separation: float, repeats: int = 60) -> list[int]:
    """How many f-DP and how many of Steinke's bounds of confidence 0.8 lie above mu = 1, seeded."""
    rng, claim = np.random.default_rng(6), bounds.gaussian_epsilon(1.0, 1e-5)
    count = [0, 0]
    for _ in range(repeats):
        there = rng.random(2000) < 0.5
        scores = separation * there + rng.normal(size=2000)
        found = one_run.one_run(scores, there, 1e-5, 0.8, guesses=200)
        count = [k + (b.epsilon > claim) for k, b in zip(count, found, strict=True)]
    return count


def test_one_run_refutes_the_truth_as_seldom_as_it_says_and_a_third_of_the_noise_always() -> None:
    assert max(one_runs_above(1.0)) <= binom.ppf(0.999, 60, 0.1)
    assert one_runs_above(3.0)[0] == 60


def test_the_number_of_guesses_is_taken_from_other_scores() -> None:
    rng = np.random.default_rng(7)
    there = rng.random(10_000) < 0.5
    few = one_run.best_guesses([(there + rng.normal(size=10_000), there)], 1e-5, 0.95)
    all_right = one_run.best_guesses([(there.astype(float), there)], 1e-5, 0.95)
    assert 16 <= few < 2500
    assert all_right == 10_000 or all_right >= 4 * few
