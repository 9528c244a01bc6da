from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpbam.app.cli.compare import _points, _within
from dpbam.app.compare.statistics import Estimate, estimate, paired_difference

values = st.lists(st.floats(0, 1), min_size=2, max_size=12).filter(lambda x: np.std(x) > 1e-6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(values)
def test_interval_is_students(x):
    low, high = stats.t.interval(0.95, len(x) - 1, loc=np.mean(x), scale=stats.sem(x))
    got = estimate(x)
    assert (got.low, got.high) == pytest.approx((low, high), rel=1e-9, abs=1e-12)
    assert got.deviation == pytest.approx(np.std(x, ddof=1))


def test_one_seed_has_no_interval():
    got = estimate([0.9])
    assert got.mean == 0.9
    assert math.isnan(got.low)
    assert math.isnan(got.deviation)


def test_nothing_has_no_mean():
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_pairing_takes_out_what_the_seeds_share():
    """Seeds differ by far more than the methods; only the paired interval sees the difference."""
    rng = np.random.default_rng(0)
    luck = rng.normal(0, 0.05, 6)
    one = {s: 0.80 + luck[s] for s in range(6)}
    other = {s: 0.79 + luck[s] + rng.normal(0, 0.001) for s in range(6)}
    paired = paired_difference(one, other)
    assert 0 < paired.low < 0.01 < paired.high
    apart = stats.ttest_ind(list(one.values()), list(other.values())).confidence_interval(0.95)
    assert apart.low < 0 < apart.high


def test_only_shared_seeds_are_paired():
    assert paired_difference({0: 0.5, 1: 0.7}, {1: 0.6, 2: 0.1}).mean == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shared seeds"):
        paired_difference({0: 0.5}, {1: 0.5})


def test_effect_size_is_the_mean_in_deviations():
    assert estimate([1.0, 3.0, 5.0]).effect_size == pytest.approx(1.5)
    assert math.isnan(estimate([0.5]).effect_size)
    assert math.isnan(estimate([0.5, 0.5]).effect_size)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_smallest_detectable_difference_is_detected_four_times_in_five(seeds):
    rng = np.random.default_rng(seeds)
    samples = rng.normal(0, 1, (20_000, seeds))
    needed = Estimate(0.0, 1.0, 0.0, 0.0, seeds).smallest_detectable  # of a true deviation of 1
    t = stats.ttest_1samp(samples + needed, 0, axis=1)
    assert np.mean((t.pvalue < 0.05) & (t.statistic > 0)) == pytest.approx(0.8, abs=0.01)


def test_a_higher_level_is_a_wider_interval():
    wide, narrow = estimate([1.0, 2.0, 4.0], 0.99), estimate([1.0, 2.0, 4.0])
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(
    ("scores", "metric", "shown"),
    [
        ([0.96, 0.99, 1.0], "accuracy", "98.3 [93.2, 100.0]"),
        ([0.0, 0.01, 0.05], "accuracy", "2.0 [0.0, 8.6]"),
        ([0.0, 0.01, 0.05], "r2", "2.0 [-4.6, 8.6]"),
    ],
)
def test_a_printed_interval_ends_at_the_bounds_of_its_score(scores, metric, shown):
    assert _points(_within(estimate(scores), metric)) == shown
