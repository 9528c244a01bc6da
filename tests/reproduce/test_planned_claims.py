"""The planned studies: a planted gain in one group or at one data set is found, there alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reproduce import encoder_claims, groups
from reproduce.index import outcome
from reproduce.when import RULE
from tests.reproduce.synthetic import record, steps, study

RESULTS = Path(__file__).parents[2] / "reproduce" / "results"
CLIP_NORMS = {"clip_norm": [1.0, 6.0]}


def grouped(gains):
    """Eight seeds of three methods at two values of C; BAM gains as planted, by group."""
    rng = np.random.default_rng(0)
    records = []
    for seed in range(8):
        for clip_norm in CLIP_NORMS["clip_norm"]:
            luck = rng.normal(0, 0.02)
            for arm in ("dp-sgd", "dp-sat", "bam"):
                by_group = {
                    name: level + luck + (arm == "bam") * gains.get(name, 0.0)
                    + rng.normal(0, 0.001)
                    for name, level in (("rare", 0.2), ("hard", 0.3), ("class a", 0.4),
                                        ("class b", 0.1))
                }  # fmt: skip
                one = record(arm, seed, 0.5 + luck, cell={"clip_norm": clip_norm})
                both = {"averaged": by_group, "last": by_group}
                records.append(replace(one, last_accuracy=0.5 + luck, group_accuracy=both))
    return study(records, name="imbalanced", grid=CLIP_NORMS)


def verdicts(outcome, phrase):
    return {claim.verdict for claim in outcome.claims if claim.text.endswith(phrase)}


def test_a_gain_on_rare_classes_is_found_there_alone():
    outcome = groups.whom([grouped({"rare": 0.02})])
    assert verdicts(outcome, "on rare classes") == {"reproduced"}
    assert "reproduced" not in verdicts(outcome, "on hard records")
    assert "reproduced" not in verdicts(outcome, "on the worst class")
    primary = [claim.text for claim in outcome.claims if "(primary)" in claim.text]
    assert len(primary) == 2  # as the plan says: C = 1, averaged weights, rare and hard
    assert all(text.startswith("C 1, averaged weights") for text in primary)
    assert len(outcome.tables[0].rows) == 2 * 2 * 3


def test_the_worst_class_is_the_lowest_of_the_classes_and_no_other_group():
    one = grouped({}).records[0]
    values = {"class a": 0.4, "class b": 0.1, "rare": 0.05}
    planted = replace(one, group_accuracy={"averaged": values, "last": values})
    assert groups.reading_of("worst class", "last")(planted) == 0.1


def heads(gains):
    """Eight seeds at three epsilons; each lambda of BAM gains as planted."""
    rng = np.random.default_rng(0)
    epsilons = ("epsilon-1", "epsilon-3", "epsilon-8")
    records = []
    for seed in range(8):
        for place in epsilons:
            for arm in ("dp-sgd", "bam", "bam-0.02", "bam-0.1"):
                level = 0.8 + gains.get(arm, 0.0) + rng.normal(0, 0.001)
                measured = steps(c_norm=0.03, private_c_norm=0.06)
                one = record(arm, seed, level, cell={"at": place}, bias=measured)
                records.append(replace(one, last_accuracy=level))
    whole = study(records, name="encoder-test")
    variants = {place: {} for place in epsilons}
    recipe = replace(whole.recipe, title="head on Encoder, Test", variants=variants)
    return replace(whole, recipe=recipe)


@pytest.mark.parametrize("arm", ["bam-0.02", "bam-0.1"])
def test_a_gain_of_one_lambda_is_found_for_that_lambda_alone(arm):
    outcome = encoder_claims.encoders([heads({arm: 0.01})])
    lam = arm.removeprefix("bam-")
    gained = {claim.text for claim in outcome.claims if claim.verdict == "reproduced"}
    assert len(gained) == 2  # by both readings
    assert all(f"lambda {lam}," in text for text in gained)
    assert {row[3] for row in outcome.tables[0].rows} == {"0.25"}  # (0.03 / 0.06)^2


def test_the_rule_says_what_the_planned_studies_found():
    """The sentence of the rule on groups and encoders, against the committed records."""
    assert "they gained from a larger C, and not from BAM" in " ".join(RULE.split())
    for name in ("groups", "encoders"):
        claims = outcome(name, "desk", RESULTS).claims
        primary = [claim for claim in claims if "(primary)" in claim.text]
        assert len(primary) in (2, 4, 6)
        assert "reproduced" not in {claim.verdict for claim in primary}
    clip_less = [
        claim.verdict
        for claim in outcome("groups", "desk", RESULTS).claims
        if claim.text == "DP-SGD, averaged weights, rare classes: C 6 is more accurate than C 1"
    ]
    assert clip_less == ["reproduced"]


def test_the_page_on_bias_says_what_the_runs_nearest_to_figure_2_show():
    """The sentences of docs/bias.md, "What we found", against the committed records."""
    result = outcome("fig2", "desk", RESULTS)
    verdicts = {claim.text: claim.verdict for claim in result.claims}
    assert verdicts["resnet9, bam-0.02: BAM has less bias than DP-SGD"] == "reproduced"
    assert verdicts["resnet9, bam-0.02: and it is more accurate than DP-SGD"] == "not reproduced"
    assert verdicts["resnet9, bam-0.005: and it is more accurate than DP-SGD"] == "inconclusive"
    assert verdicts["resnet9: DP-SAT has the same bias as DP-SGD, to within 10%"] in (
        "reproduced", "inconclusive"
    )  # fmt: skip
    table = result.tables[-1]
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    length = {arm: float(row["bias"]) for arm, row in rows.items()}
    assert length["bam-0.02"] < length["bam-0.005"] < length["dp-sgd"]
    assert 0.2 < length["bam-0.02"] / length["dp-sgd"] < 0.4  # a third
    for row in rows.values():
        assert float(row["bias / gradient"]) > 0.95
        assert float(row["length's share"]) > 0.99
        assert float(row["cosine with noise"]) < 0.1
