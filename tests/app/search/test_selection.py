"""The cost of choosing the best of several trainings: dp-accounting's, and K drawn as claimed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpbam.app.runs import ConfigError
from dpbam.app.search.selection import (
    Repetitions,
    search_epsilon,
    search_noise_multiplier,
)
from dpbam.app.search.space import Domain, parse_space
from dpbam.privacy.accounting import Charge, epsilon

TRIAL = Charge(noise_multiplier=3.0, sampling_rate=0.05, steps=60)
ALL = [
    Repetitions(8.0),
    Repetitions(8.0, "negative-binomial", 1.0),
    Repetitions(8.0, "negative-binomial", 0.0),
    Repetitions(8.0, "negative-binomial", 0.5),
    Repetitions(8.0, "negative-binomial", 3.0),
]


@pytest.mark.parametrize("repetitions", ALL, ids=Repetitions.describe)
@pytest.mark.parametrize(("score_noise", "stages"), [(None, 1), (20.0, 1), (20.0, 3)])
def test_epsilon_is_that_of_dp_accounting_for_the_event(
    repetitions: Repetitions, score_noise: float | None, stages: int
) -> None:
    step = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(3.0))
    parts = [dp.SelfComposedDpEvent(step, 60)]
    if score_noise is not None:
        parts.append(dp.GaussianDpEvent(score_noise))
    shape = math.inf if repetitions.distribution == "poisson" else repetitions.shape
    whole = dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(parts), 8.0, shape)
    accountant = dp.rdp.RdpAccountant()
    for _ in range(stages):
        accountant.compose(whole)

    ours = search_epsilon(TRIAL, 1e-5, repetitions, stages=stages, score_noise=score_noise)

    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert ours > epsilon(*TRIAL, 1e-5, accountant="rdp")  # a search is not free


def test_a_search_costs_more_with_every_addition() -> None:
    base = search_epsilon(TRIAL, 1e-5, Repetitions(8.0))
    assert search_epsilon(TRIAL, 1e-5, Repetitions(16.0)) > base
    assert search_epsilon(TRIAL, 1e-5, Repetitions(8.0), stages=2) > base
    assert search_epsilon(TRIAL, 1e-5, Repetitions(8.0), score_noise=5.0) > base


@pytest.mark.slow
def test_calibration_keeps_within_the_target_and_wastes_little() -> None:
    how = {"stages": 2, "score_noise": 20.0}
    repetitions = Repetitions(5.0)
    sigma = search_noise_multiplier(2.0, 1e-5, 0.05, 60, repetitions, **how)
    assert search_epsilon(Charge(sigma, 0.05, 60), 1e-5, repetitions, **how) <= 2.0
    assert search_epsilon(Charge(sigma * 0.999, 0.05, 60), 1e-5, repetitions, **how) > 2.0


def test_a_score_that_costs_more_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="noise the score more"):
        search_noise_multiplier(0.5, 1e-5, 0.05, 60, Repetitions(5.0), score_noise=0.1)


def probabilities(repetitions: Repetitions, most: int) -> np.ndarray:
    """P(K = 0 .. most - 1) by Papernot and Steinke's definition, with dp-accounting's gamma."""
    if repetitions.distribution == "poisson":
        return stats.poisson.pmf(np.arange(most), repetitions.mean)
    eta = repetitions.shape
    gamma = reference._gamma_truncated_negative_binomial(eta, repetitions.mean)
    mass = [0.0]
    for k in range(1, most):
        if eta == 0:
            mass.append((1 - gamma) ** k / (k * math.log(1 / gamma)))
        else:
            ways = math.prod((j + eta) / (j + 1) for j in range(k))
            mass.append((1 - gamma) ** k * ways / (gamma**-eta - 1))
    return np.array(mass)


def fits(draw: Callable[[np.random.Generator], int], repetitions: Repetitions) -> bool:
    """Whether 2000 draws have the claimed distribution, by a chi-squared test at 1e-4."""
    generator, most = np.random.default_rng(7), 60
    drawn = np.array([draw(generator) for _ in range(2000)])
    expected = 2000 * probabilities(repetitions, most)
    expected = np.append(expected, 2000 - expected.sum())
    observed = np.bincount(np.minimum(drawn, most), minlength=most + 1)
    if observed[expected < 1e-6].any():  # what cannot happen has happened
        return False
    rare = expected < 8
    seen = np.append(observed[~rare], observed[rare].sum())
    claimed = np.append(expected[~rare], expected[rare].sum())
    if claimed[-1] < 1e-6:
        seen, claimed = seen[:-1], claimed[:-1]
    return bool(stats.chisquare(seen, claimed * seen.sum() / claimed.sum()).pvalue > 1e-4)


@pytest.mark.parametrize("repetitions", ALL, ids=Repetitions.describe)
def test_the_number_of_trials_is_drawn_as_claimed(repetitions: Repetitions) -> None:
    assert fits(repetitions.draw, repetitions)


@pytest.mark.parametrize("repetitions", ALL, ids=Repetitions.describe)
def test_the_test_of_the_draws_sees_a_wrong_number(repetitions: Repetitions) -> None:
    others = [other for other in ALL if other != repetitions]
    assert not fits(lambda generator: 8, repetitions)  # a fixed number of trials
    assert not any(fits(other.draw, repetitions) for other in others)
    # a search that is begun again where its number was small
    assert not fits(lambda g: max(repetitions.draw(g), repetitions.draw(g)), repetitions)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(mean=st.floats(1.05, 500.0), shape=st.floats(0.0, 8.0))
def test_gamma_gives_the_mean_that_is_accounted(mean: float, shape: float) -> None:
    gamma = Repetitions(mean, "negative-binomial", shape).gamma()
    assert reference._truncated_negative_binomial_mean(gamma, shape) == pytest.approx(
        mean, rel=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0.5,), "at least 1"),
        ((math.nan,), "at least 1"),
        ((5.0, "binomial"), "distribution"),
        ((5.0, "negative-binomial", -1.0), "shape"),
        ((1.0, "negative-binomial", 1.0), "nothing to choose"),
    ],
)
def test_wrong_repetitions_are_refused(arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Repetitions(*arguments)


def test_whole_numbers_stay_whole() -> None:
    assert Domain.parse("batch_size", "64..256").integer
    assert Domain.parse("augment_multiplicity", "0..4").end(-1) == 4
    assert not Domain.parse("epochs", "5..20").integer


def test_choices_are_read_as_toml_else_as_text() -> None:
    assert Domain.parse("optimizer", "sgd, nadam").choices == ("sgd", "nadam")
    assert Domain.parse("clip_norm", "0.5,1").choices == (0.5, 1)


def test_texts_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text('lr = "1e-4..1e-2:log"\nbatch_size = [64, 128]\n')
    space = parse_space(["lr=0.1..0.2", "clip-norm=1,2"], file)
    assert list(space) == ["lr", "batch_size", "clip_norm"]
    assert space["lr"].low == 0.1
    assert space["batch_size"].choices == (64, 128)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr", "must be like"),
        ("lr=abc..1", "must vary like"),
        ("lr=1..0.1", "must rise"),
        ("lr=0..1:log", "above 0"),
        ("lr=1..2:lin", ":log"),
        ("lr=-1..1", "lr must be"),
        ("optimizer=sdg", "did you mean 'sgd'"),
        ("seed=1,2", "cannot be varied"),
        ("momentm=0..1", "did you mean 'momentum'"),
    ],
)
def test_wrong_texts_are_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_space([text])
