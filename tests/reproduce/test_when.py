"""When BAM helps: the page, and the rule that the advisor repeats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.runs import RunConfig
from dpbam.bias import method_advice
from reproduce.index import EXPERIMENTS
from reproduce.outcome import Study, accuracy
from reproduce.pooled import Setting
from reproduce.records import finished
from reproduce.results_page import section
from reproduce.when import averaging, by_net, gain, others, places, share_of_bias, when

ROOT = Path(__file__).parents[2]
PAGE, DETAILS = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("docs/results.md", "reproduce/pages/desk.md")
)


@pytest.fixture(scope="module")
def studies() -> list[Study]:
    recipes = EXPERIMENTS["when"].recipes("desk")
    return [Study(r, finished(r, ROOT / "reproduce" / "results"), len(r.runs())) for r in recipes]


@pytest.fixture(scope="module")
def found(studies: list[Study]) -> list[Setting]:
    return places(studies)


def test_a_changed_record_would_be_noticed(studies: list[Study]) -> None:
    """Negative control: one accuracy is a point higher."""
    k = next(i for i, study in enumerate(studies) if study.recipe.name == "when-mlp")
    first, *others = studies[k].records
    records = [replace(first, accuracy=first.accuracy + 0.01), *others]
    planted = [*studies[:k], replace(studies[k], records=records), *studies[k + 1 :]]
    true, false = (section(when(found), "desk/", "desk") for found in (studies, planted))
    assert true in DETAILS
    assert false not in DETAILS


def test_batch_size_epsilon_and_width_have_three_values_each(found: list[Setting]) -> None:
    variants = {place.cell["at"] for place in by_net(found)["mlp"]}
    assert len(variants) == 7
    for axis in ("batch", "epsilon", "width"):
        assert sum(name.startswith(axis) for name in variants) == 2  # and the centre
    shares = [share_of_bias(place) for place in found]
    assert min(shares) < 0.1
    assert max(shares) > 0.5  # noise dominates, and bias does


def test_the_rule_holds_in_the_records(found: list[Setting]) -> None:
    for mine in by_net(found).values():
        gained = averaging(mine)
        assert gained.low > 0
        assert gained.low > gain(mine, accuracy).high
        assert not gain(mine, accuracy).low > 0  # no gain of BAM is shown


def test_the_rule_holds_where_it_was_not_found(studies: list[Study]) -> None:
    other = others(studies)
    shares = [share_of_bias(place) for place in other]
    assert min(shares) < 0.1
    assert max(shares) > 0.5
    assert not [place for place in other if place.gain(accuracy).low > 0]  # no gain of BAM


def test_the_default_lambda_loses_nowhere(studies: list[Study], found: list[Setting]) -> None:
    """No interval lies below -0.3 points."""
    for place in (*found, *others(studies)):
        assert place.gain(accuracy).high > -0.003


def test_the_advisor_says_what_the_page_says() -> None:
    assert RunConfig(epsilon=1).method == "dp-sgd"
    assert "--swa 0.5" in PAGE
    assert "--swa 0.5" in method_advice("bam", averaged=False)
    assert "dp-sgd" in method_advice("bam", averaged=True)
    assert not method_advice("dp-sgd", averaged=True)
