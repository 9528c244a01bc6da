"""The cost of choosing the best of several trainings: dp-accounting's, and K drawn as claimed."""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from dpbam.app.runs import ConfigError
from dpbam.app.search.search import Domain, parse_space
from dpbam.app.search.selection import search_epsilon, search_noise_multiplier
from dpbam.privacy.accounting import Charge, epsilon

TRIAL = Charge(noise_multiplier=3.0, sampling_rate=0.05, steps=60)


@pytest.mark.parametrize("score_noise", [None, 20.0])
def test_epsilon_is_that_of_dp_accounting_for_the_event(score_noise: float | None) -> None:
    step = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(3.0))
    parts = [dp.SelfComposedDpEvent(step, 60)]
    if score_noise is not None:
        parts.append(dp.GaussianDpEvent(score_noise))
    whole = dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(parts), 8.0, math.inf)
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(whole)

    ours = search_epsilon(TRIAL, 1e-5, 8, score_noise)

    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert ours > epsilon(*TRIAL, 1e-5, accountant="rdp")  # a search is not free


def test_a_search_costs_more_with_every_addition() -> None:
    base = search_epsilon(TRIAL, 1e-5, 8)
    assert search_epsilon(TRIAL, 1e-5, 16) > base
    assert search_epsilon(TRIAL, 1e-5, 8, 5.0) > base


@pytest.mark.slow
def test_calibration_keeps_within_the_target_and_wastes_little() -> None:
    sigma = search_noise_multiplier(2.0, 1e-5, 0.05, 60, 5, 20.0)
    assert search_epsilon(Charge(sigma, 0.05, 60), 1e-5, 5, 20.0) <= 2.0
    assert search_epsilon(Charge(sigma * 0.999, 0.05, 60), 1e-5, 5, 20.0) > 2.0


def test_a_score_that_costs_more_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="noise the score more"):
        search_noise_multiplier(0.5, 1e-5, 0.05, 60, 5, 0.1)


def fits(draw: Callable[[], int], mean: float) -> bool:
    """Whether 2000 draws are of Poisson's distribution, by a chi-squared test at 1e-4."""
    most = 60
    drawn = np.array([draw() for _ in range(2000)])
    expected = 2000 * stats.poisson.pmf(np.arange(most), mean)
    expected = np.append(expected, 2000 - expected.sum())
    observed = np.bincount(np.minimum(drawn, most), minlength=most + 1)
    if observed[expected < 1e-6].any():  # what cannot happen has happened
        return False
    rare = expected < 8
    seen = np.append(observed[~rare], observed[rare].sum())
    claimed = np.append(expected[~rare], expected[rare].sum())
    return bool(stats.chisquare(seen, claimed * seen.sum() / claimed.sum()).pvalue > 1e-4)


@pytest.mark.parametrize("mean", [0.5, math.nan, math.inf])
def test_a_mean_that_leaves_nothing_to_choose_is_refused(mean: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        search_epsilon(TRIAL, 1e-5, mean)


def test_whole_numbers_stay_whole() -> None:
    assert Domain.parse("batch_size", "64..256").integer
    assert Domain.parse("augment_multiplicity", "0..4").ends == (0, 4)
    assert not Domain.parse("epochs", "5..20").integer


def test_choices_are_read_as_toml_else_as_text() -> None:
    assert Domain.parse("optimizer", "sgd, nadam").choices == ("sgd", "nadam")
    assert Domain.parse("clip_norm", "0.5,1").choices == (0.5, 1)
    paths = ("hf:../a", "hf:../b")  # no ranges
    assert Domain.parse("model", ",".join(paths)).choices == paths


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
        ("data_root=a,b", "cannot be varied"),
        ("method=dp-sgd,bam", "cannot be varied"),
        ("momentm=0..1", "did you mean 'momentum'"),
    ],
)
def test_wrong_texts_are_refused_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_space([text])
