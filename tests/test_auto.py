"""The choice of settings: total, from public facts alone, and sane in its trends."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpbam.auto import TASKS, Facts, choose, first_release, path_length, single_release_sigma
from dpbam.errors import ArgumentError

SHAPES = st.tuples(st.integers(1, 16), st.integers(1, 2000), st.integers(1, 2000))
FACTS = st.builds(
    Facts, n=st.integers(1, 10**9), epsilon=st.floats(1e-3, 1e3), image_shape=SHAPES,
    classes=st.integers(1, 10**4), delta=st.one_of(st.none(), st.floats(1e-30, 0.5)),
    task=st.sampled_from(TASKS), head=st.sampled_from([None, "closed-form"]),
    encoder=st.sampled_from([None, "hf:google/vit-base", "onnx:net.onnx"]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(FACTS)
def test_every_fact_has_a_choice(facts: Facts) -> None:
    choice = choose(facts)
    assert choice.features == (facts.encoder or "scattering")
    assert choice.batch_size == facts.n
    assert choice.steps >= 1
    assert 0 < choice.delta < 1
    in_closed_form = facts.head == "closed-form" or facts.task == "regression"
    assert choice.head == ("closed-form" if in_closed_form else "descent")
    assert (choice.average is None) == in_closed_form
    assert 0 < choice.lr < math.inf
    assert 0 < choice.clip_norm < math.inf
    assert len(choice.reason) == 2
    assert all("\n" not in line and len(line) < 200 for line in choice.reason)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**9), st.floats(1e-3, 1e3), st.sampled_from(["lora", "norms"]))
def test_a_part_of_an_encoder_has_settings_for_every_n_and_epsilon(
    n: int, epsilon: float, trained: str
) -> None:
    facts = Facts(n=n, epsilon=epsilon, image_shape=(3, 8, 8), classes=5, encoder="hf:x",
                  trained=trained)  # fmt: skip
    choice = choose(facts)
    assert 1 <= choice.batch_size <= n
    assert choice.optimizer == "nadam"
    assert 0 < choice.lr < 1
    assert choice.release_counts is choice.release_centre is None  # they are of fixed features
    assert all("\n" not in line and len(line) < 200 for line in choice.reason)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**7), st.floats(0.01, 100), st.floats(1.01, 10))
def test_more_units_and_epsilon_never_shorten_the_path(n: int, epsilon: float, k: float) -> None:
    base = path_length(n, epsilon, 1e-6, 10)
    assert path_length(math.ceil(n * k), epsilon, 1e-6, 10) >= base * (1 - 1e-9)
    assert path_length(n, epsilon, 1e-6, 11) >= base
    assert path_length(n, epsilon * k, 1e-6, 10) >= base * (1 - 2e-3)  # sigma is known to 1e-3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**7), st.floats(0.01, 100), st.integers(2, 1000))
def test_what_is_released_first_takes_at_most_a_tenth_of_the_budget_and_less_of_many_units(
    n: int, epsilon: float, classes: int
) -> None:
    sigma = single_release_sigma(epsilon, 1e-6)
    release = first_release(n, classes, sigma)
    share = (sigma / release.counts) ** 2 + (sigma / release.centre) ** 2
    assert share <= 0.104  # sigmas are rounded to three digits
    more = first_release(10 * n, classes, sigma)
    assert more.counts >= release.counts
    assert more.centre >= release.centre


@pytest.mark.parametrize("n", [1, 2, 20, 100])
def test_a_few_images_are_not_refused(n: int) -> None:
    assert choose(Facts(n=n, epsilon=1, image_shape=(1, 28, 28), classes=2)).lr


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-7, 1e-12])
def test_sigma_of_a_single_release_is_the_exact_one(epsilon: float, delta: float) -> None:
    sigma = single_release_sigma(epsilon, delta)
    a, b = 0.5 / sigma, epsilon * sigma
    reached = norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b))
    assert reached <= delta * (1 + 1e-6)
    lower = sigma / 1.002
    a, b = 0.5 / lower, epsilon * lower
    assert norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b)) > delta


def test_a_regression_with_gradients_is_refused_in_one_sentence() -> None:
    with pytest.raises(ArgumentError, match="closed form, which has no gradients"):
        Facts(
            n=9, epsilon=1, image_shape=(1, 8, 8), classes=1, task="regression", gradients=True
        )  # fmt: skip


def test_the_closed_form_with_gradients_is_refused_in_one_sentence() -> None:
    with pytest.raises(ArgumentError, match="has no gradients"):
        Facts(
            n=9, epsilon=1, image_shape=(1, 8, 8), classes=2, head="closed-form", gradients=True
        )  # fmt: skip


def test_a_method_is_never_served_in_closed_form() -> None:
    for n in (20, 2000, 200_000):
        facts = Facts(n=n, epsilon=1, image_shape=(1, 28, 28), classes=2, gradients=True)
        assert choose(facts).head == "descent"


def test_the_choice_does_not_import_torch() -> None:
    code = "import sys, dpbam.auto; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
