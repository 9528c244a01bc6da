"""The meta-analysis, against closed forms, simulations, and the committed records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpbam.errors import ArgumentError
from dpbam.estimates import estimate
from reproduce.index import outcome
from reproduce.pooled import ALL_SETTINGS, pool, pooled
from reproduce.summary import headlines, question_table
from tests.reproduce.synthetic import record, study

RESULTS = Path(__file__).resolve().parents[2] / "reproduce" / "results"


def test_equal_variances_give_the_plain_mean_and_its_t_interval():
    values, variance = [0.1, 0.9, -0.4, 1.6], 0.05
    found, plain = pool(values, [variance] * 4), estimate(values)
    assert found.mean == pytest.approx(plain.mean)
    assert found.tau**2 == pytest.approx(plain.deviation**2 - variance)
    assert (found.low, found.high) == (pytest.approx(plain.low), pytest.approx(plain.high))


def test_settings_that_agree_are_weighted_by_inverse_variance():
    values, variances = [1.0, 2.0], [1.0, 4.0]
    found = pool(values, variances)
    assert found.tau == 0
    assert found.mean == pytest.approx((1 / 1 + 2 / 4) / (1 + 1 / 4))
    # Q is below m - 1: the interval must not become shorter than that of known variances
    assert (found.high - found.low) / 2 >= 1.959 * math.sqrt(1 / (1 + 1 / 4))


def test_tau_solves_its_equation():
    values, variances = [0.0, 1.0, 5.0, -3.0], [0.1, 0.5, 1.0, 0.2]
    found = pool(values, variances)
    weights = [1 / (v + found.tau**2) for v in variances]
    mean = np.average(values, weights=weights)
    q = sum(w * (d - mean) ** 2 for w, d in zip(weights, values, strict=True))
    assert found.mean == pytest.approx(mean)
    assert q == pytest.approx(3)


@pytest.mark.parametrize("tau", [0.0, 0.5])
def test_the_interval_covers_the_mean_as_often_as_it_says(tau):
    """Of 2,000 simulations fewer than 1,836 would occur with probability below 1e-7 at 95%."""
    rng = np.random.default_rng(0)
    variances = np.geomspace(0.01, 1.0, 12)
    covered = 0
    for _ in range(2000):
        values = 0.2 + rng.normal(scale=np.sqrt(variances + tau**2))
        found = pool(list(values), list(variances))
        covered += found.low <= 0.2 <= found.high
    assert covered >= 1836


def test_an_interval_that_ignores_heterogeneity_covers_too_seldom():
    """The negative control of the test above: weights by 1 / v alone."""
    rng = np.random.default_rng(0)
    variances = np.geomspace(0.01, 1.0, 12)
    weights = 1 / variances
    half = 1.96 / math.sqrt(weights.sum())
    means = (
        np.average(0.2 + rng.normal(scale=np.sqrt(variances + 0.25)), weights=weights)
        for _ in range(2000)
    )
    assert sum(abs(mean - 0.2) <= half for mean in means) < 1836


@pytest.mark.parametrize(
    ("differences", "variances"), [([1.0], [1.0]), ([1.0, 2.0], [1.0, 0.0]), ([1.0, 2.0], [1.0])]
)
def test_what_cannot_be_pooled_is_refused(differences, variances):
    with pytest.raises(ArgumentError, match="two or more settings"):
        pool(differences, variances)


def test_every_setting_of_the_committed_records_is_pooled():
    found = outcome("pooled", "desk", RESULTS)
    by_reading, by_setting = found.tables
    assert {row[-1] for row in by_reading.rows} == {"128"}  # pairs
    assert sum("steps" not in row[0] for row in by_setting.rows) == 14
    assert all("exploratory" in claim.text for claim in found.claims if "All" in claim.text)


def trained(recipe, steps, gain, cell, seeds=8):
    """DP-SGD and BAM of an MLP; BAM gains as planted by the last weights, 0 by averaged ones."""
    rng = np.random.default_rng(steps)
    records = []
    for seed in range(seeds):
        luck = rng.normal(0, 0.01)
        for arm, more in (("dp-sgd", 0.0), ("bam", gain)):
            level = 0.5 + luck + rng.normal(0, 0.001)
            plan = {"n": 1000, "batch_size": 64, "steps": steps}
            one = replace(record(arm, seed, level, cell=cell), plan=plan)
            records.append(replace(one, last_accuracy=level + more))
    each = study(records, name=recipe)
    setting = {"model": "mlp", "data": "reproduce.small_data:cifar10_8x8", "epsilon": 10.0}
    variants = {"centre": {}} if cell else {}
    return replace(each, recipe=replace(each.recipe, setting=setting, variants=variants))


@pytest.mark.parametrize(("late", "verdict"), [(0.02, "reproduced"), (0.002, "not reproduced")])
def test_a_gain_that_grows_with_the_length_is_found_by_the_last_weights_alone(late, verdict):
    short = trained("when-mlp", 150, 0.01, {"at": "centre"})
    result = pooled([short, trained("long-mlp", 600, late, {})])
    growth = {c.text: c.verdict for c in result.claims if "more than after 150 steps" in c.text}
    assert growth == {
        "MLP, CIFAR-10 8x8, 600 steps, last weights: BAM gains more than after 150 steps": verdict,
        "MLP, CIFAR-10 8x8, 600 steps, averaged weights: BAM gains more than after 150 steps":
            "inconclusive",
    }  # fmt: skip


@pytest.mark.parametrize(("pairs", "rows"), [(2, 1), (8, 2)])
def test_the_first_page_has_a_planned_study_once_it_has_three_pairs(pairs, rows):
    short = [trained(name, 150, 0.01, {"at": "centre"}) for name in ("when-a", "when-b", "when-c")]
    result = pooled([*short, trained("long-mlp", 600, 0.02, {}, pairs)])
    table = question_table(headlines([{"pooled": result}]))
    assert [row[0] for row in table.rows] == [
        ALL_SETTINGS, "MLP, CIFAR-10 8x8, 600 steps"
    ][:rows]  # fmt: skip
    assert all(row[1].startswith("**gains**") for row in table.rows)
    assert all(row[2].startswith("**not shown**") for row in table.rows)


def test_a_rate_that_decays_is_compared_with_averaging_at_a_constant_one():
    """The last weights of one, 2 points above, against the averaged weights of the other."""
    constant = trained("long-mlp", 600, 0.0, {})
    decaying = trained("long-mlp-more", 600, 0.0, {"at": "decaying-rate"})
    better = [replace(r, last_accuracy=r.last_accuracy + 0.02) for r in decaying.records]
    variants = {"decaying-rate": {}}
    recipe = replace(decaying.recipe, variants=variants)
    for records, verdict in ((decaying.records, "reproduced"), (better, "not reproduced")):
        result = pooled([constant, replace(decaying, recipe=recipe, records=records)])
        assert [c.verdict for c in result.claims if "decaying rate are as" in c.text] == [verdict]
