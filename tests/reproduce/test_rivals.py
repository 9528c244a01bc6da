"""The comparison of methods against clipping bias: its settings, and its page, from the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reproduce.index import outcome
from reproduce.outcome import Study
from reproduce.recipes import load_recipe
from reproduce.records import finished
from reproduce.rivals import LABELS, best_trials, bias_methods, by_contender, page, ranked, whole
from tests.reproduce.rival_rule import TRIALS, combined, following

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "reproduce" / "results"


@pytest.fixture(scope="module")
def studies() -> list[Study]:
    recipes = [load_recipe(name, "desk") for name in ("tune-bias-methods", "bias-methods")]
    return [Study(r, finished(r, RESULTS), len(r.runs())) for r in recipes]


def test_every_contender_has_seven_trials_and_the_settings_of_the_best(
    studies: list[Study],
) -> None:
    trials, study = studies
    tried, _ = by_contender(trials)
    assert list(study.recipe.arms) == list(tried)
    assert [name for name in tried if name in LABELS] == list(LABELS)
    assert {len(found) for found in tried.values()} == {TRIALS}
    assert len(trials.arms()) == trials.asked
    for name, arm in best_trials(trials).items():
        assert study.recipe.arms[name] == trials.recipe.arms[arm]


def test_every_trial_follows_from_those_before_by_one_rule(studies: list[Study]) -> None:
    tried, accuracies = by_contender(studies[0])
    for name, own in tried.items():
        for k in range(4, TRIALS):
            assert own[k] == following(name, own[:k], accuracies[name][:k]), (name, k)


def test_bam_is_combined_with_the_two_rivals_that_held_out_images_choose(
    studies: list[Study],
) -> None:
    tried, accuracies = by_contender(studies[0])
    made = combined(tried, accuracies)
    assert len(made) == 2
    assert set(tried) - set(LABELS) == set(made)
    for name, first in made.items():
        assert tried[name][:4] == first


def test_the_rule_extends_the_edge_and_then_varies_the_own_setting() -> None:
    rates = [{"method": "bam", "lam": 0.02, "lr": 2.0**k} for k in range(4)]
    assert following("bam", rates, [1, 2, 3, 4]) == {**rates[0], "lr": 16.0}
    assert following("bam", rates, [4, 3, 2, 1]) == {**rates[0], "lr": 0.5}
    inner = following("bam", rates, [1, 3, 2, 1])
    assert inner == {"method": "bam", "lam": 0.1, "lr": 2.0}
    assert following("bam", [*rates, inner], [1, 3, 2, 1, 9])["lam"] == 0.005
    step = following("dp-sgd", [{"clip_norm": 1.0, "lr": 2.0**k} for k in range(4)], [1, 3, 2, 1])
    assert step == {"clip_norm": 0.5, "lr": 4.0}  # the same lr C


def test_the_page_is_generated_from_the_records() -> None:
    found = outcome("bias-methods", "desk", RESULTS)
    assert found is not None
    assert (ROOT / "reproduce/pages/bias-methods.md").read_text(encoding="utf-8") == page(found)


def test_a_changed_record_would_be_noticed(studies: list[Study]) -> None:
    """Negative control: one accuracy is a point higher."""
    trials, study = studies
    first, *others = study.records
    planted = replace(study, records=[replace(first, accuracy=first.accuracy + 0.01), *others])
    text = (ROOT / "reproduce/pages/bias-methods.md").read_text(encoding="utf-8")
    assert page(bias_methods([trials, planted])) != text


def test_only_seeds_that_all_contenders_have_are_ranked(studies: list[Study]) -> None:
    study = studies[1]
    first, *others = study.records
    arms = whole(replace(study, records=others))
    assert all(first.seed not in by_seed for by_seed in arms.values())
    assert len({tuple(by_seed) for by_seed in arms.values()}) == 1
    means = [sum(r.accuracy for r in arms[arm].values()) for arm in ranked(arms)]
    assert means == sorted(means, reverse=True)
