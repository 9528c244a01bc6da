"""Bounds from scores: right where the truth is known, and above it no more often than allowed."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpbam.app.audit import bounds

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
    p = bounds._p_value(m, guesses, right, case["epsilon"], case["delta"])
    assert p == pytest.approx(case["p_value"], rel=1e-9)
    found = bounds._one_run_epsilon(m, guesses, right, case["delta"], 0.05)
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
    rate = bounds.rate_at_most(0, 900, 0.025)
    assert free.epsilon == pytest.approx(math.log((1 - 1e-5 - rate) / rate))
    assert gaussian.epsilon == pytest.approx(bounds.gaussian_epsilon(2 * norm.isf(rate), 1e-5))


def test_scores_that_say_nothing_bound_nothing() -> None:
    rng = np.random.default_rng(0)
    assert [b.epsilon for b in bounds.many_runs(rng.normal(size=500), rng.normal(size=500),
                                                1e-5, 0.99)] == [0.0, 0.0]  # fmt: skip
    there = rng.random(400) < 0.5
    assert bounds.one_run(rng.normal(size=400), there, 1e-5, 0.99).epsilon == 0.0


def test_one_run_holds_for_randomised_response_and_refutes_half_of_it() -> None:
    """Guesses right with probability e^eps / (1 + e^eps), the most that eps-DP allows."""
    rng, epsilon = np.random.default_rng(1), 2.0
    there = rng.random(4000) < 0.5
    truthful = rng.random(4000) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(truthful, there, ~there) + 0.01 * rng.random(4000)
    bound = bounds.one_run(scores, there, 1e-9, 0.95)
    assert epsilon / 2 < bound.epsilon <= epsilon


def test_too_few_trials_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 trials"):
        bounds.many_runs([1.0] * 7, [0.0] * 9, 1e-5, 0.95)
