"""Comparisons: paired runs, their statistics, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpbam.app.cli.compare import show
from dpbam.app.compare.comparison import (
    Comparison,
    Contender,
    choose_once,
    compare,
    noise_seed,
    plan_runs,
)
from dpbam.app.compare.pairing import WHAT, check_pairs
from dpbam.app.report.groups import mean_score
from dpbam.app.runs import ConfigError
from dpbam.data import load_pair
from dpbam.estimates import Estimate, estimate, paired_difference
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.tasks.scores import Compared
from tests.forked import forked_workers
from tests.results import finished

SETTINGS = {"noise_multiplier": 1.0, "accountant": "rdp", "model": "mlp", "batch_size": 64,
            "epochs": 0.2, "device": "cpu", "num_workers": 0,
            "physical_batch_size": 64}  # fmt: skip
BOTH = [Contender("dp-sgd"), Contender("bam", 0.05)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison")
    runs = plan_runs(SETTINGS, BOTH, [0, 1], out, include_non_private=True)
    with forked_workers():
        return out, runs, compare(runs, out, jobs=2)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def noise_streams(runs):
    """(stream, step) of every release of every run."""
    return [(e["stream"], e["step"]) for run in runs for e in lines(run.out / "ledger.jsonl")]


def batches(run):
    return [
        entry["non_private_batch_size"]
        for entry in lines(run.out / "non-private" / "training.jsonl")
        if "non_private_batch_size" in entry
    ]


def test_every_run_has_its_folder_and_its_place(done):
    _, runs, result = done
    assert [(r.arm, r.seed) for r in result.runs] == [(r.arm, r.seed) for r in runs]
    assert [r.out for r in runs] == [r.out for r in result.runs]
    assert all((r.out / "privacy-statement.md").exists() for r in runs)
    assert result.names == ("dp-sgd", "bam-0.05", "sgd")


def test_auto_chooses_once_for_all_methods(tmp_path):
    """Asked per method it could choose others for dp-sgd, and has no rule for the reference."""
    settings = {"data": "digits", "epsilon": 3.0, "model": "auto"}
    runs = plan_runs(choose_once(settings), BOTH, [0], tmp_path, include_non_private=True)
    chosen = ("model", "batch_size", "epochs", "lr", "optimizer", "clip_norm")
    (values,) = {tuple(getattr(run.config, name) for name in chosen) for run in runs}
    assert values[0] == "scattering"
    assert choose_once({"epsilon": 3.0}) == {"epsilon": 3.0}  # small-cnn, as the help says


def test_runs_of_one_seed_share_their_batches_and_runs_of_another_do_not(done):
    _, runs, _ = done
    by_seed = {seed: [batches(r) for r in runs if r.seed == seed] for seed in (0, 1)}
    assert len(by_seed[0][0]) == runs[0].config.plan(1438).steps
    for same in by_seed.values():
        assert all(sizes == same[0] for sizes in same)
    assert by_seed[0][0] != by_seed[1][0]


def test_no_noise_is_drawn_twice(done):
    _, runs, _ = done
    streams = noise_streams([run for run in runs if run.config.private])
    assert len(set(streams)) == len(streams)


def test_shared_noise_would_be_noticed(tmp_path):
    """Negative control: asked for, the two methods do share their noise streams."""
    runs = plan_runs(SETTINGS, BOTH, [0], tmp_path, share_noise=True)
    compare(runs, tmp_path)
    streams = noise_streams(runs)
    assert len(set(streams)) == len(streams) // 2


def test_comparison_json_has_the_results(done):
    out, _, result = done
    saved = json.loads((out / "comparison.json").read_text())
    mine = saved["contenders"]["bam-0.05"]
    assert mine["accuracy"]["mean"] == result.mean("bam-0.05").mean
    assert mine["difference_to_first"]["count"] == 2
    assert mine["verdict"] == result.difference("bam-0.05").verdict
    assert [r["epsilon"] for r in saved["runs"] if r["name"] == "sgd"] == ["infinite"] * 2


def test_all_runs_together_cost_more_than_one(done):
    _, _, result = done
    private = [r for r in result.runs if r.arm != "sgd"]
    charges = [Charge(1.0, 64 / 1438, r.charged) for r in private]
    assert result.total_epsilon() == total_epsilon(charges, private[0].delta, accountant="rdp")
    assert result.total_epsilon() > private[0].epsilon


def test_statistics_released_with_the_gradients_count(tmp_path):
    runs = plan_runs({**SETTINGS, "release_norms": 2.0}, BOTH[:1], [0], tmp_path)
    result = compare(runs, tmp_path, jobs=1)
    assert result.total_epsilon() == pytest.approx(result.runs[0].epsilon)
    alone = Charge(1.0, 64 / 1438, result.runs[0].charged)
    assert result.total_epsilon() > 1.1 * total_epsilon([alone], 1e-4, accountant="rdp")


def test_resuming_keeps_finished_runs_and_repeats_lost_ones(done, tmp_path):
    out, _, before = done
    again = shutil.copytree(out, tmp_path / "again")
    shutil.rmtree(again / "bam-0.05" / "seed-1")
    kept = (again / "bam-0.05" / "seed-0" / "ledger.jsonl").stat().st_mtime_ns
    runs = plan_runs(SETTINGS, BOTH, [0, 1], again, include_non_private=True)
    after = compare(runs, again, jobs=1)
    assert [r.score for r in after.runs] == [r.score for r in before.runs]
    assert (again / "bam-0.05" / "seed-0" / "ledger.jsonl").stat().st_mtime_ns == kept


def test_other_settings_are_refused(done):
    out, _, _ = done
    runs = plan_runs({**SETTINGS, "lr": 0.5}, BOTH, [0, 1], out)
    with pytest.raises(ConfigError, match="another lr"):
        compare(runs, out)


def test_the_reference_has_no_noise_and_no_epsilon(tmp_path):
    settings = {"epsilon": 3.0}
    runs = plan_runs(settings, [Contender("bam")], [4], tmp_path, include_non_private=True)
    assert [r.config.private for r in runs] == [True, False]
    assert [r.config.seed for r in runs] == [4, 4]
    assert runs[1].config.epsilon is None


def test_noise_seeds_differ():
    seeds = {noise_seed(s, m) for s in range(50) for m in ("dp-sgd", "dp-sat", "bam")}
    assert len(seeds) == 150


def test_lambda_is_the_contenders_own(tmp_path):
    runs = plan_runs({"epsilon": 3.0, "lam": 0.3}, [*BOTH, Contender("dp-sat")], [0], tmp_path)
    assert [r.config.lam for r in runs] == [0.3, 0.05, 0.3]


def test_one_method_may_occur_with_several_lambdas(tmp_path):
    texts = ("bam:0.02", "bam:0.05", "bam-exact:0.02", "bam")
    runs = plan_runs({"epsilon": 3.0}, [Contender.parse(t) for t in texts], [0], tmp_path)
    assert [r.arm for r in runs] == ["bam-0.02", "bam-0.05", "bam-exact-0.02", "bam"]
    assert [r.config.gradient for r in runs] == [
        "approximate",
        "approximate",
        "exact",
        "approximate",
    ]
    assert len({r.out for r in runs}) == len({r.config.noise_seed for r in runs}) == 4
    with pytest.raises(ConfigError, match="each contender may occur only once"):
        plan_runs({"epsilon": 3.0}, [Contender("bam", 0.02)] * 2, [0], tmp_path)


def test_a_planted_result_is_caught(done, tmp_path):
    """One method is given better data, the test images among its own: refused, not ranked."""
    train, test = load_pair("digits")
    images, labels = train.batch(np.arange(len(train)))
    extra, known = test.batch(np.arange(len(test)))
    n = len(test)
    better = {"train_images": np.concatenate([images[n:], extra])[:, 0],
              "train_labels": np.concatenate([labels[n:], known]),
              "test_images": extra.numpy()[:, 0], "test_labels": known.numpy()}  # fmt: skip
    np.savez(tmp_path / "better.npz", **better)
    honest, other = plan_runs(SETTINGS, BOTH, [0], tmp_path / "runs")
    planted = replace(other, config=other.config.replace(data=str(tmp_path / "better.npz")))
    with pytest.raises(ConfigError, match="do not share their training data"):
        compare([honest, planted], tmp_path / "runs")


def test_means_and_differences():
    runs = [finished("a", 0, 0.8), finished("b", 0, 0.9), finished("a", 1, 0.6),
            finished("b", 1, 0.8)]  # fmt: skip
    result = Comparison(("a", "b"), tuple(runs))
    assert result.mean("a").mean == pytest.approx(0.7)
    assert result.difference("b").mean == pytest.approx(0.15)
    assert result.difference("b").low < 0 < result.difference("b").high


def diverging(arm, seed, *, loss=1.0, r2=0.5):
    run = finished(arm, seed, 0.5)
    report = replace(
        run.evaluations[-1], scores={"r2": r2}, loss=loss, compared={"r2": Compared(r2, 0.0, 0.01)}
    )
    return replace(run, evaluations=(report,))


@pytest.mark.parametrize("numbers", [{"r2": -1e30}, {"r2": math.nan}, {"loss": math.inf}])
def test_an_arm_that_diverged_has_no_size_of_its_difference(numbers, capsys, tmp_path):
    runs = [diverging(arm, seed) for arm in "ab" for seed in (0, 1)]
    runs += [diverging("c", 0), diverging("c", 1, **numbers)]
    result = Comparison(("a", "b", "c"), tuple(runs))
    show(result, tmp_path)
    means, paired = capsys.readouterr().out.split("Paired, against a")
    for part in (means, paired):
        (row,) = [line for line in part.splitlines() if "│ c " in line]
        assert "diverged (1 of 2 seeds)" in row
        assert not re.search(r"\d\.\d|e\+|nan", row.partition("diverged")[2])
    assert "50.0" in means
    assert result.to_dict()["contenders"]["c"]["diverged"] == 1
    assert result.to_dict()["contenders"]["b"]["diverged"] == 0


def test_against_a_baseline_that_diverged_nothing_has_a_size(capsys, tmp_path):
    runs = [diverging("a", 0, r2=-1e30), diverging("b", 0)]
    show(Comparison(("a", "b"), tuple(runs)), tmp_path)
    paired = capsys.readouterr().out.split("Paired, against a")[1]
    assert "a diverged (1 of 1 seeds)" in paired
    assert "e+" not in paired


def test_no_winner_without_an_interval_that_says_so():
    def judged(*differences):
        pairs = enumerate(differences)
        runs = [r for s, d in pairs for r in (finished("a", s, 0.5), finished("b", s, 0.5 + d))]
        return Comparison(("a", "b"), tuple(runs)).difference("b").verdict

    assert judged(0.02) == "no winner"  # one seed has no interval
    assert judged(0.05, 0.01, -0.01) == "no winner"  # the mean is above, the interval holds 0
    assert judged(0.02, 0.021, 0.022) == "better"
    assert judged(-0.02, -0.021, -0.022) == "worse"


def simulated(rng, shift=0.0, seeds=5):
    """A method against itself, as paired runs vary: by the seed, by the noise, by 10,000 images."""
    luck = rng.normal(0.6, 0.01, seeds)
    runs = []
    for name, add in (("a", 0.0), ("b", shift)):
        p = luck + add + rng.normal(0, 0.006, seeds)
        accuracies = rng.binomial(10_000, p) / 10_000
        runs += [finished(name, seed, float(x)) for seed, x in enumerate(accuracies)]
    return Comparison(("a", "b"), tuple(runs))


def covered(shift):
    rng = np.random.default_rng(0)
    return np.mean(
        [simulated(rng, shift).difference("b").verdict == "no winner" for _ in range(2000)]
    )


def test_a_method_is_not_better_than_itself():
    assert 0.935 <= covered(0.0) <= 0.965


def test_a_real_difference_would_be_noticed():
    """Negative control: with a method that is a point better the same simulation fails."""
    assert covered(0.01) < 0.8


SHARED = {"data": "d", "test_data": "t", "initial_weights": "w", "batches": "b", "batch_size": "64"}


def run(arm, seed, **changes):
    return SimpleNamespace(arm=arm, seed=seed, pairing={**SHARED, **changes})


def test_pairs_pass():
    check_pairs([run("a", 0), run("b", 0), run("a", 1, batches="c"), run("b", 1, batches="c")])


@pytest.mark.parametrize("key", WHAT)
def test_each_difference_is_named(key):
    with pytest.raises(ConfigError, match=f"b and a of seed 0 do not share their {WHAT[key]}"):
        check_pairs([run("a", 0), run("b", 0, **{key: "other"})])


def test_other_batch_sizes_have_other_batches():
    check_pairs([run("a", 0), run("b", 0, batch_size="128", batches="other")])
    with pytest.raises(ConfigError, match="initial weights"):
        check_pairs([run("a", 0), run("b", 0, batch_size="128", initial_weights="other")])


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
    """In points, as the command prints it."""
    assert mean_score(scores, metric, lambda score: f"{100 * score:.1f}") == shown


def test_a_difference_of_lists_is_refused_with_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"of two dicts, the score of each seed, and got a list"):
        paired_difference([0.9], {0: 0.9})  # type: ignore[arg-type]
