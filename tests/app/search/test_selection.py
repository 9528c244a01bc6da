"""The cost of choosing the best of several trainings: dp-accounting's, and K drawn as claimed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
    Selection,
    search_epsilon,
    search_noise_multiplier,
)
from dpbam.app.search.space import Domain, parse_space
from dpbam.privacy.accounting import Charge, epsilon

TRIAL = Charge(noise_multiplier=3.0, sampling_rate=0.05, steps=60)
ALL = [
    Selection(8.0),
    Selection(8.0, "negative-binomial", 1.0),
    Selection(8.0, "negative-binomial", 0.0),
    Selection(8.0, "negative-binomial", 0.5),
    Selection(8.0, "negative-binomial", 3.0),
]


@pytest.mark.parametrize("selection", ALL, ids=Selection.describe)
@pytest.mark.parametrize(("score_noise", "stages"), [(None, 1), (20.0, 1), (20.0, 3)])
def test_epsilon_is_that_of_dp_accounting_for_the_event(
    selection: Selection, score_noise: float | None, stages: int
) -> None:
    step = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(3.0))
    parts = [dp.SelfComposedDpEvent(step, 60)]
    if score_noise is not None:
        parts.append(dp.GaussianDpEvent(score_noise))
    shape = math.inf if selection.distribution == "poisson" else selection.shape
    whole = dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(parts), 8.0, shape)
    accountant = dp.rdp.RdpAccountant()
    for _ in range(stages):
        accountant.compose(whole)

    asked = replace(selection, stages=stages, score_noise=score_noise)
    ours = search_epsilon(TRIAL, 1e-5, asked)

    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert ours > epsilon(*TRIAL, 1e-5, accountant="rdp")  # a search is not free


def test_a_search_costs_more_with_every_addition() -> None:
    base = search_epsilon(TRIAL, 1e-5, Selection(8.0))
    assert search_epsilon(TRIAL, 1e-5, Selection(16.0)) > base
    assert search_epsilon(TRIAL, 1e-5, Selection(8.0, stages=2)) > base
    assert search_epsilon(TRIAL, 1e-5, Selection(8.0, score_noise=5.0)) > base


@pytest.mark.slow
def test_calibration_keeps_within_the_target_and_wastes_little() -> None:
    selection = Selection(5.0, stages=2, score_noise=20.0)
    sigma = search_noise_multiplier(2.0, 1e-5, 0.05, 60, selection)
    assert search_epsilon(Charge(sigma, 0.05, 60), 1e-5, selection) <= 2.0
    assert search_epsilon(Charge(sigma * 0.999, 0.05, 60), 1e-5, selection) > 2.0


def test_a_score_that_costs_more_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="noise the score more"):
        search_noise_multiplier(0.5, 1e-5, 0.05, 60, Selection(5.0, score_noise=0.1))


def probabilities(selection: Selection, most: int) -> np.ndarray:
    """P(K = 0 .. most - 1) by Papernot and Steinke's definition, with dp-accounting's gamma."""
    if selection.distribution == "poisson":
        return stats.poisson.pmf(np.arange(most), selection.mean)
    eta = selection.shape
    gamma = reference._gamma_truncated_negative_binomial(eta, selection.mean)
    mass = [0.0]
    for k in range(1, most):
        if eta == 0:
            mass.append((1 - gamma) ** k / (k * math.log(1 / gamma)))
        else:
            ways = math.prod((j + eta) / (j + 1) for j in range(k))
            mass.append((1 - gamma) ** k * ways / (gamma**-eta - 1))
    return np.array(mass)


def fits(draw: Callable[[np.random.Generator], int], selection: Selection) -> bool:
    """Whether 2000 draws have the claimed distribution, by a chi-squared test at 1e-4."""
    generator, most = np.random.default_rng(7), 60
    drawn = np.array([draw(generator) for _ in range(2000)])
    expected = 2000 * probabilities(selection, most)
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


@pytest.mark.parametrize("selection", ALL, ids=Selection.describe)
def test_the_number_of_trials_is_drawn_as_claimed(selection: Selection) -> None:
    assert fits(selection.draw, selection)


@pytest.mark.parametrize("selection", ALL, ids=Selection.describe)
def test_the_test_of_the_draws_sees_a_wrong_number(selection: Selection) -> None:
    others = [other for other in ALL if other != selection]
    assert not fits(lambda generator: 8, selection)  # a fixed number of trials
    assert not any(fits(other.draw, selection) for other in others)
    # a search that is begun again where its number was small
    assert not fits(lambda g: max(selection.draw(g), selection.draw(g)), selection)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(mean=st.floats(1.05, 500.0), shape=st.just(0.0) | st.floats(1e-3, 8.0))
def test_gamma_gives_the_mean_that_is_accounted(mean: float, shape: float) -> None:
    gamma = Selection(mean, "negative-binomial", shape).gamma()
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
        ((5.0, "negative-binomial", 5e-324), "shape must be 0 or at least 0.001"),
        ((1.0, "negative-binomial", 1.0), "nothing to choose"),
    ],
)
def test_wrong_selection_are_refused(arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Selection(*arguments)


def test_whole_numbers_stay_whole() -> None:
    assert Domain.parse("batch_size", "64..256").integer
    assert Domain.parse("augment_multiplicity", "0..4").ends == (0, 4)
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
