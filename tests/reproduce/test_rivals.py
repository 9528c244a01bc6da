"""The comparison of methods against clipping bias: its settings, and its page, from the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reproduce.index import outcome
from reproduce.outcome import Study
from reproduce.recipes import load_recipe
from reproduce.records import finished
from reproduce.rivals import LABELS, best_trials, bias_methods, page, ranked, whole

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def studies() -> list[Study]:
    recipes = [load_recipe(name, "desk") for name in ("tune-bias-methods", "bias-methods")]
    return [Study(r, finished(r, RESULTS), len(r.runs())) for r in recipes]


def test_every_contender_has_four_trials_and_the_settings_of_the_best(
    studies: list[Study],
) -> None:
    trials, study = studies
    assert list(study.recipe.arms) == list(LABELS)
    assert len(trials.arms()) == trials.asked == 4 * len(LABELS)
    for name, arm in best_trials(trials).items():
        assert study.recipe.arms[name] == trials.recipe.arms[arm]


def test_the_page_is_generated_from_the_records() -> None:
    found = outcome("bias-methods", "desk", RESULTS)
    assert found is not None
    assert (ROOT / "docs/bias-methods.md").read_text(encoding="utf-8") == page(found)


def test_a_changed_record_would_be_noticed(studies: list[Study]) -> None:
    """Negative control: one accuracy is a point higher."""
    trials, study = studies
    first, *others = study.records
    planted = replace(study, records=[replace(first, accuracy=first.accuracy + 0.01), *others])
    text = (ROOT / "docs/bias-methods.md").read_text(encoding="utf-8")
    assert page(bias_methods([trials, planted])) != text


def test_only_seeds_that_all_contenders_have_are_ranked(studies: list[Study]) -> None:
    study = studies[1]
    first, *others = study.records
    arms = whole(replace(study, records=others))
    assert all(first.seed not in by_seed for by_seed in arms.values())
    assert len({tuple(by_seed) for by_seed in arms.values()}) == 1
    means = [sum(r.accuracy for r in arms[arm].values()) for arm in ranked(arms)]
    assert means == sorted(means, reverse=True)
