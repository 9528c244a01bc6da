"""From records to tables and verdicts: planted effects are found, absent ones are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from reproduce import accuracy_claims, bias_claims, depth
from reproduce.index import EXPERIMENTS, PAPERS, chosen
from reproduce.recipes import SCALES
from reproduce.results_page import pages, write_outcome
from tests.reproduce.synthetic import (
    MACHINE,
    best_lambda,
    best_rate,
    best_trial,
    record,
    steps,
    study,
)

SEEDS = range(5)
EPSILONS = {"epsilon": [1.0, 2.0]}


def table1_study(gain, floor=0.1, noise=0.001):
    rng = np.random.default_rng(0)
    records = []
    for seed in SEEDS:
        for cell in ({"epsilon": 1.0}, {"epsilon": 2.0}):
            luck = 0.6 + rng.normal(0, 0.02)
            for arm, more in (("dp-sgd", 0.0), ("dp-sat", 0.0), ("bam", gain)):
                records.append(record(arm, seed, luck + more + rng.normal(0, noise), cell=cell))
    return study(records, grid=EPSILONS, floor=floor)


def verdicts(outcome):
    return {claim.text: claim.verdict for claim in outcome.claims}


def of_bam(outcome):
    """The verdicts on the claims that BAM is better."""
    return {text: found for text, found in verdicts(outcome).items() if "BAM is more" in text}


def test_table1_finds_a_gain_and_only_that():
    found = accuracy_claims.table1([table1_study(0.01)])
    assert len(found.tables[0].rows) == 6
    assert set(of_bam(found).values()) == {"reproduced"}
    assert "Test, all epsilons: BAM is more accurate than DP-SAT" in verdicts(found)
    others = {text: said for text, said in verdicts(found).items() if text not in of_bam(found)}
    assert others == {
        f"Test, {where}: DP-SAT is more accurate than DP-SGD": "inconclusive"
        for where in ("epsilon 1", "epsilon 2", "all epsilons")
    }
    lost = accuracy_claims.table1([table1_study(-0.01)])
    assert set(of_bam(lost).values()) == {"not reproduced"}
    unclear = accuracy_claims.table1([table1_study(0.0, noise=0.01)])
    assert "reproduced" not in verdicts(unclear).values()


def test_table1_needs_the_resolution_of_its_recipe():
    whole = table1_study(0.01, noise=0.002)  # intervals of some 0.3 points to either side
    assert set(of_bam(accuracy_claims.table1([whole])).values()) == {"reproduced"}
    finer = accuracy_claims.table1(
        [replace(whole, recipe=replace(whole.recipe, resolution=0.0005))]
    )
    assert set(of_bam(finer).values()) == {"inconclusive"}
    wide = [claim.sentence() for claim in finer.claims if claim.text in of_bam(finer)]
    assert all(said.endswith("needs more seeds, though it excludes 0") for said in wide)


@pytest.mark.parametrize(("gain", "verdict"), [(0.0, "reproduced"), (0.02, "not reproduced")])
def test_a_study_with_power_can_find_that_two_methods_are_the_same(gain, verdict):
    found = table1_study(gain)
    found = replace(found, recipe=replace(found.recipe, resolution=0.005))
    said = verdicts(accuracy_claims.table1([found]))
    words = "BAM and DP-SGD differ by less than 0.5 points"
    assert [v for text, v in said.items() if words in text] == [verdict, verdict]


def test_the_best_trial_of_a_method_is_its_own():
    rows = [record("a", 0, 0.4, method="bam"), record("b", 0, 0.5, method="bam"),
            record("c", 0, 0.6, method="dp-sgd")]  # fmt: skip
    tuned = study(rows)
    assert best_trial(tuned, "bam") is tuned.recipe.arms["b"]


def test_exact_is_judged_at_each_epsilon():
    rows = [
        record(arm, seed, 0.6 + 0.001 * seed + more, cell={"epsilon": epsilon}, method="bam")
        for seed in SEEDS
        for epsilon in EPSILONS["epsilon"]
        for arm, more in (("bam", 0.0), ("bam-exact", 0.0002 * seed + 0.02 * (epsilon == 2)))
    ]
    both = study(rows, grid=EPSILONS)
    assert list(verdicts(accuracy_claims.exact([both])).values()) == [
        "reproduced", "not reproduced"
    ]  # fmt: skip


def test_table1_says_nothing_at_the_floor():
    found = accuracy_claims.table1([table1_study(0.01, floor=0.7)])
    assert set(verdicts(found).values()) == {"inconclusive"}


def test_an_unfinished_table_still_comes_out():
    whole = table1_study(0.01)
    part = study(whole.records[:2], grid=EPSILONS, floor=0.1)  # no BAM yet
    found = accuracy_claims.table1([part])
    assert not of_bam(found)
    assert len(found.tables[0].rows) == 2
    text = pages({"desk": {"table1": found, "exact": None}})["reproduce/pages/desk.md"]
    assert "2 of 2 runs" in text
    assert "No record yet: `exact`." in text
    assert "python -m reproduce table1 --scale desk" in text


def test_records_of_full_scale_join_the_pages_and_replace_smaller_verdicts():
    full, desk = (accuracy_claims.table1([named(table1_study(gain))]) for gain in (0.01, -0.01))
    found = pages({"full": {"table1": full}, "desk": {"table1": desk}})
    assert "python -m reproduce table1 --scale full" in found["reproduce/pages/full.md"]
    first = found["docs/results.md"]
    assert "**reproduced**" in first
    assert "**not reproduced**" not in first
    none = pages({"full": {"table1": None}, "desk": {"table1": desk}})
    assert "reproduce/pages/full.md" not in none
    assert "**not reproduced**" in none["docs/results.md"]


def named(whole):
    """The same study under the name of a data set that the paper has."""
    return replace(whole, recipe=replace(whole.recipe, name="table1-cifar10"))


def test_the_papers_values_are_looked_up():
    assert accuracy_claims.paper_value("table1-imagenet32", 10.0, "bam") == "20.67"
    assert accuracy_claims.paper_value("table1-pneumonia", 1.0, "bam") == ""


def test_exact_bam_is_the_same_within_a_point_or_not():
    def judged(gain):
        gains = {"bam": 0.0, "bam-exact": gain}
        rows = [
            record(arm, s, 0.4 + 0.01 * s + more + 0.0005 * (s % 2), method="bam",
                   cell={"epsilon": 2.0})
            for s in SEEDS
            for arm, more in gains.items()
        ]  # fmt: skip
        one = study(rows, grid={"epsilon": [2.0]})
        return list(verdicts(accuracy_claims.exact([one])).values())

    assert judged(0.002) == ["reproduced"]
    assert judged(0.05) == ["not reproduced"]


def test_lambda_matters_where_it_does():
    rng = np.random.default_rng(1)
    gains = {"dp-sgd": (0.0, 0.0), "bam": (0.02, 0.0), "bam-0.1": (0.1, -0.05)}
    rows = [record(arm, s, 0.4 + gain + rng.normal(0, 0.004), lam=lam,
                   method="dp-sgd" if arm == "dp-sgd" else "bam")
            for s in SEEDS for arm, (lam, gain) in gains.items()]  # fmt: skip
    found = accuracy_claims.sweep([study(rows)])
    assert verdicts(found) == {
        "lambda matters: 0.02 differs from 0": "inconclusive",
        "lambda matters: 0.1 differs from 0": "reproduced",
    }
    assert [row[0] for row in found.tables[0].rows] == ["0", "0.02", "0.1"]


def test_what_is_done_so_far_can_be_shown():
    """Runs finish in any order: pairs may lack DP-SGD, or share no seed over the grid."""
    one, two = {"epsilon": 1.0}, {"epsilon": 2.0}
    rows = [record(arm, 0, 0.4, cell=one) for arm in ("dp-sat", "bam")]
    rows += [record(arm, 1, 0.4, cell=two) for arm in ("dp-sgd", "dp-sat", "bam")]
    found = accuracy_claims.table1([study(rows, grid={"epsilon": [1.0, 2.0]}, floor=0.3)])
    assert [c.text.partition(": ")[0] for c in found.claims] == [
        "Test, epsilon 2", "Test, epsilon 1", "Test, epsilon 2", "Test, epsilon 2",
    ]  # fmt: skip
    assert {c.verdict for c in found.claims} == {"inconclusive"}


def test_the_best_lambda_is_the_best():
    rows = [
        record(f"bam-{lam}", seed, accuracy + seed / 10, method="bam", lam=lam)
        for lam, accuracy in ((0.01, 0.3), (0.02, 0.5), (0.04, 0.5))
        for seed in (0, 1)
    ]
    tried = study(rows)
    for row in rows:
        tried.recipe.arms[row.arm]["lam"] = row.config["lam"]
    assert best_lambda(tried, "bam") == 0.02


def test_the_best_rate_is_the_best():
    rows = [
        record("bam", 0, acc, cell={"lr": lr}) for lr, acc in ((1.0, 0.3), (2.0, 0.5), (4.0, 0.5))
    ]
    assert best_rate(study(rows, grid={"lr": [1.0, 2.0, 4.0]}), "bam") == 2.0


def methods_study(sat_bias=3.0, jitter=0.01):
    rows = []
    for s in SEEDS:
        off = jitter * s
        rows += [
            record("dp-sgd", s, 0.4, bias=steps(bias=3.0 + off), eigenvalue=100.0 + s),
            record("dp-sat", s, 0.4, eigenvalue=100.0 + 3 * (s % 2),
                   bias=steps(bias=sat_bias + 2 * off, alignment=-0.01 - off / 99)),
            record("bam-0.02", s, 0.4, method="bam", eigenvalue=40.0 + 2 * s,
                   bias=steps(bias=1.0 + 2 * off, alignment=0.06 + off / 9)),
        ]  # fmt: skip
    return study(rows, name="methods")


def test_figure_2_judges_bam_and_dp_sat():
    found = verdicts(bias_claims.figure2([methods_study()]))
    assert found["resnet9, bam-0.02: BAM has less bias than DP-SGD"] == "reproduced"
    assert found["resnet9: DP-SAT has the same bias as DP-SGD, to within 10%"] == "reproduced"
    less = verdicts(bias_claims.figure2([methods_study(sat_bias=2.0)]))
    assert less["resnet9: DP-SAT has the same bias as DP-SGD, to within 10%"] == "not reproduced"


def test_figure_4_and_flatness():
    found = bias_claims.figure4([methods_study()])
    assert set(verdicts(found).values()) == {"reproduced"}
    assert len(found.claims) == 2
    flat = verdicts(bias_claims.flatness([methods_study()]))
    assert [v for text, v in flat.items() if text.startswith("bam")] == ["reproduced"]
    assert [v for text, v in flat.items() if text.startswith("dp-sat")] == ["inconclusive"]


@pytest.mark.parametrize(("power", "verdict"), [(-0.5, "reproduced"), (0.5, "not reproduced")])
def test_figures_5_and_6_judge_the_slope(power, verdict):
    rows = [
        record(f"dp-sgd-l{size}", s, 0.4, method="dp-sgd", batch_size=size,
               bias=steps(bias=(1 + 0.01 * s * (size > 100)) * size**power,
                          cosine=0.5 - power * size / 2000 + 0.001 * s * (size > 100)))
        for s in SEEDS for size in (50, 100, 200)
    ]  # fmt: skip
    sizes = [study(rows, name="batch-size")]
    assert list(verdicts(bias_claims.figure5(sizes)).values()) == [verdict]
    assert list(verdicts(bias_claims.figure6(sizes)).values()) == [verdict]


def test_figure_3_judges_times(tmp_path):
    rng = np.random.default_rng(0)

    def trials(factor, power):
        return {str(d): [factor * d**power * (1 + rng.normal(0, 0.01)) for _ in range(10)]
                for d in (4, 8, 16)}  # fmt: skip

    seconds = {"dp-sgd": trials(1, 1), "dp-sat": trials(1, 1), "bam": trials(2, 1),
               "bam-exact": trials(2, 2)}  # fmt: skip
    result = {"seconds": seconds, "settings": {"repetitions": 5}, "machine": MACHINE}
    found = verdicts(depth.figure3(result))
    assert found["BAM-SAM takes longer than DP-SGD (ln of the ratio)"] == "reproduced"
    linear = [v for text, v in found.items() if "linearly" in text]
    assert linear == ["reproduced", "not reproduced"]


def test_times_are_taken_once(tmp_path):
    path = tmp_path / "times.json"
    tiny = depth.Timing(depths=(1, 2), trials=2, repetitions=1, width=4, side=4, batch=2)
    first = depth.measure(tiny, path)
    assert {len(t) for by in first["seconds"].values() for t in by.values()} == {2}
    assert depth.measure(tiny, path)["seconds"] == first["seconds"]


def test_every_figure_is_drawn_and_written(tmp_path):
    found = bias_claims.figure7([methods_study()])
    paths = write_outcome(found, tmp_path)
    assert [p.name for p in paths] == ["fig7.json", "fig7.md", "fig7.svg", "fig7.png"]
    assert all(p.stat().st_size > 100 for p in paths)
    assert "operator only" not in (tmp_path / "fig7.svg").read_text()  # the data are public


def test_all_is_everything():
    assert chosen("all") == chosen("all", "pocket")
    for scale in SCALES:
        assert chosen("all", scale) == [n for n in PAPERS if scale in EXPERIMENTS[n].scales]
    assert {f"fig{k}" for k in range(1, 8)} < set(EXPERIMENTS)
