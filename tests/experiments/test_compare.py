"""Comparisons: what paired runs share, what they must not share, and going on after a stop."""

from __future__ import annotations

import json
import shutil

import pytest

from dpbam.accounting import Charge, total_epsilon
from dpbam.experiments.compare import Comparison, Contender, compare, noise_seed, plan_runs
from dpbam.experiments.pool import FinishedRun
from dpbam.runs import ConfigError

SETTINGS = {"noise_multiplier": 1.0, "accountant": "rdp", "model": "mlp", "batch_size": 64,
            "epochs": 0.2, "device": "cpu", "num_workers": 0}  # fmt: skip
BOTH = [Contender("dp-sgd"), Contender("bam", 0.05)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison")
    runs = plan_runs(SETTINGS, BOTH, [0, 1], out, include_non_private=True)
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
    assert [(r.method, r.seed) for r in result.runs] == [(r.method, r.seed) for r in runs]
    assert [str(r.out) for r in runs] == [r.out for r in result.runs]
    assert all((r.out / "privacy-statement.md").exists() for r in runs)
    assert result.methods == ("dp-sgd", "bam", "sgd")


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


def test_the_file_says_what_the_result_says(done):
    out, _, result = done
    saved = json.loads((out / "comparison.json").read_text())
    assert saved["methods"]["bam"]["accuracy"]["mean"] == result.mean("bam").mean
    assert saved["methods"]["bam"]["difference_to_first"]["count"] == 2
    assert [r["epsilon"] for r in saved["runs"] if r["method"] == "sgd"] == ["infinite"] * 2


def test_all_runs_together_cost_more_than_one(done):
    _, _, result = done
    private = [r for r in result.runs if r.method != "sgd"]
    charges = [Charge(1.0, 64 / 1438, r.charged) for r in private]
    assert result.total_epsilon() == total_epsilon(charges, private[0].delta, accountant="rdp")
    assert result.total_epsilon() > private[0].epsilon


def test_going_on_keeps_finished_runs_and_makes_up_lost_ones(done, tmp_path):
    out, _, before = done
    again = shutil.copytree(out, tmp_path / "again")
    shutil.rmtree(again / "bam" / "seed-1")
    kept = (again / "bam" / "seed-0" / "ledger.jsonl").stat().st_mtime_ns
    runs = plan_runs(SETTINGS, BOTH, [0, 1], again, include_non_private=True)
    after = compare(runs, again, jobs=1)
    assert [r.accuracy for r in after.runs] == [r.accuracy for r in before.runs]
    assert (again / "bam" / "seed-0" / "ledger.jsonl").stat().st_mtime_ns == kept


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


def finished(method, seed, accuracy):
    return FinishedRun(method, seed, accuracy, 3.0, 1e-4, 1.0, 0.1, "pld", 10, 1.0, "out")


def test_means_and_differences():
    runs = [finished("a", 0, 0.8), finished("b", 0, 0.9), finished("a", 1, 0.6),
            finished("b", 1, 0.8)]  # fmt: skip
    result = Comparison(("a", "b"), tuple(runs))
    assert result.mean("a").mean == pytest.approx(0.7)
    assert result.difference("b").mean == pytest.approx(0.15)
    assert result.difference("b").low < 0 < result.difference("b").high
