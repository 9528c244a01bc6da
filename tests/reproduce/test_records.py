"""Runs of a recipe: done once, recorded at once, resumed after a kill, refused if not paired."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.runs import ConfigError
from dpbam.app.runs.files import append_json_line
from reproduce import records as kept
from reproduce.outcome import Study
from reproduce.records import carry_out, missing, read_records, records_file
from reproduce.records import finished as done
from tests.forked import started
from tests.reproduce.tiny import dies, machine, tiny

STEPS = 13  # of a run of 0.6 epochs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce")
    recipe = tiny(folder, flatness=True)
    carry_out(missing([recipe], folder / "results", work=folder / "runs"), folder / "results")
    return folder, recipe


def test_each_run_leaves_one_small_record(finished):
    folder, recipe = finished
    records = done(recipe, folder / "results")
    assert len(records) == len(recipe.runs()) == 6
    (path,) = (folder / "results" / "pocket").iterdir()
    assert path == records_file(recipe, folder / "results")
    assert all(len(line) < 20_000 for line in path.read_text().splitlines())
    for record in records:
        assert record.config["seed"] == record.seed
        assert record.plan["noise_multiplier"] == 1.0
        assert record.pairing["data"]
        assert record.machine["torch"]
        assert 0 <= record.accuracy <= 1
        assert record.non_private_bias[-1]["non_private_against_plain"]["bias"] > 0
        assert record.non_private_flatness["non_private_top_eigenvalue"] > 0


def test_a_record_of_an_average_has_the_accuracy_of_the_last_weights_too(finished, tmp_path):
    _, recipe = finished
    (averaged,) = replace(recipe, setting={**recipe.setting, "swa": 0.0, "epochs": 2.0}).runs(
        1, tmp_path / "runs"
    )[:1]
    last = replace(averaged, config=averaged.config.replace(swa=None), out=tmp_path / "last")
    records = []
    for run in (averaged, last):
        groups = "tests.reproduce.test_groups:halves"
        recipe_of = replace(recipe, setting={}, arms={run.arm: {}}, groups=groups)
        carry_out([(recipe_of, run)], tmp_path / run.out.name)
        records += read_records(records_file(recipe_of, tmp_path / run.out.name)).values()
    assert records[0].last_accuracy == records[1].accuracy != records[0].accuracy
    assert records[1].last_accuracy is None
    # 359 test records: the accuracies in the two halves average to the accuracy on all of them
    for reading, whole in (("averaged", records[0].accuracy), ("last", records[1].accuracy)):
        first, second = records[0].group_accuracy[reading].values()
        assert (180 * first + 179 * second) / 359 == pytest.approx(whole, abs=1e-5)
    assert records[1].group_accuracy == {"last": records[0].group_accuracy["last"]}


@pytest.mark.parametrize("lens", [0, 1])
def test_the_bias_of_the_trained_model_is_measured_for_the_seeds_of_the_lens(
    finished, tmp_path, lens
):
    _, recipe = finished
    setting = {k: v for k, v in recipe.setting.items() if not k.startswith("measure_")}
    small = replace(recipe, setting=setting, arms={"bam": recipe.arms["bam"]}, lens=lens)
    carry_out([(small, run) for run in small.runs(2, tmp_path / "runs")], tmp_path)
    measured = [len(record.non_private_bias) for record in done(small, tmp_path)]
    assert measured == [2 * lens, 0]


def test_finished_runs_are_not_repeated(finished, monkeypatch):
    folder, recipe = finished
    assert missing([recipe, recipe], folder / "results") == []
    monkeypatch.setattr(kept, "train_all", None)  # would fail if it were called
    carry_out([], folder / "results")
    lacking = missing([recipe, recipe], folder / "results", seeds=3)
    assert [run.name for _, run in lacking] == [
        f"{arm}-clip_norm-1-seed-2" for arm in ("dp-sgd", "dp-sat", "bam")
    ]


def test_runs_of_one_seed_are_pairs_and_a_planted_one_is_refused(finished, tmp_path):
    folder, recipe = finished
    records = done(recipe, folder / "results")
    by_seed = [{json.dumps(r.pairing) for r in records if r.seed == seed} for seed in (0, 1)]
    assert [len(found) for found in by_seed] == [1, 1]
    assert by_seed[0] != by_seed[1]
    rows = map(json.loads, records_file(recipe, folder / "results").read_text().splitlines())
    here = records_file(recipe, tmp_path)
    here.parent.mkdir(parents=True)
    for values in rows:
        if values["run"] == "bam-clip_norm-1-seed-1":
            values["pairing"]["data"] = "better data"
        append_json_line(here, values)
    with pytest.raises(ConfigError, match="bam and dp-sgd of seed 1 do not share their training"):
        done(recipe, tmp_path)


def test_a_record_of_other_settings_is_refused(finished, tmp_path):
    folder, _ = finished
    other = tiny(tmp_path, epochs=0.3)
    with pytest.raises(ConfigError, match=r"run with epochs 0.2, but the recipe says 0.3"):
        missing([other], folder / "results")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"arm": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is no record"):
        read_records(broken)


def test_a_run_that_is_recorded_twice_is_refused(finished, tmp_path):
    """Two machines may have trained it: which of the two counts is not for us to choose."""
    folder, recipe = finished
    lines = records_file(recipe, folder / "results").read_text()
    twice = tmp_path / "twice.jsonl"
    twice.write_text(lines + lines.splitlines()[0] + "\n")
    with pytest.raises(ConfigError, match="dp-sgd-clip_norm-1-seed-0 twice, line 7 again"):
        read_records(twice)


def test_a_study_gathers_by_arm_and_place(finished):
    folder, recipe = finished
    records = done(recipe, folder / "results")
    study = Study(recipe, records, 6)
    assert list(study.arms({"clip_norm": 1.0})) == ["dp-sgd", "dp-sat", "bam"]
    assert study.arms({"clip_norm": 2.0}) == {}
    assert sorted(study.arms()["bam"]) == [0, 1]


def killed_in_the_middle(folder: Path) -> str:
    """Start, and die when the second run is some steps on; that run's name."""
    process = started(dies, folder, STEPS + 5)
    process.join()
    assert process.exitcode == -9
    (ledger,) = folder.glob("runs/pocket/tiny/dp-sat-*/ledger.jsonl")
    return ledger.parent.name


@pytest.mark.slow  # tests/end_to_end kills single runs
def test_a_killed_study_ends_like_an_undisturbed_one(tmp_path):
    """After SIGKILL the same call keeps what is done, resumes what was begun, ends alike."""
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        recipe = tiny(folder, epochs=0.6)
        assert recipe.runs()[0].config.plan(recipe.images).steps == STEPS
    run = killed_in_the_middle(disturbed)
    path = Path("results", "pocket", "tiny.jsonl")
    (first,) = (disturbed / path).read_text().splitlines()
    assert '"dp-sgd-clip_norm-1-seed-0"' in first
    ledger = disturbed / "runs" / "pocket" / "tiny" / run / "ledger.jsonl"
    begun = ledger.read_text()
    for folder in (disturbed, whole):
        machine(folder, 1)
    assert (disturbed / path).read_text().startswith(first + "\n")
    assert ledger.read_text().startswith(begun.rpartition("\n")[0])  # gone on with, not begun anew
    ended, undisturbed = (read_records(folder / path) for folder in (disturbed, whole))
    for name in ("dp-sgd", "dp-sat", "bam"):
        one, other = (records[f"{name}-clip_norm-1-seed-0"] for records in (ended, undisturbed))
        assert (one.accuracy, one.pairing) == (other.accuracy, other.pairing)
        assert one.non_private_bias == other.non_private_bias


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_shards_partition_the_runs(tmp_path, machines):
    recipe = tiny(tmp_path)
    shards = [
        [run.name for _, run in missing([recipe], tmp_path, 3, shard=(i + 1, machines))]
        for i in range(machines)
    ]
    whole = [run.name for _, run in missing([recipe], tmp_path, 3)]
    assert sorted(name for shard in shards for name in shard) == sorted(whole)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_records_of_another_version_are_no_pairs(finished, tmp_path):
    """BAM trained anew by other code: its seed is left out until the others are, too."""
    folder, recipe = finished
    path = records_file(recipe, tmp_path)
    path.parent.mkdir(parents=True)
    rows = [
        json.loads(line)
        for line in records_file(recipe, folder / "results").read_text().splitlines()
    ]
    assert {row["machine"]["version"] for row in rows} == {kept.VERSION}

    def versions(*newer: str) -> list[str]:
        for row in rows:
            append_json_line(path, {**row, "machine": {"version": 1 + (row["run"] in newer)}})
        found = [f"{r.arm}-{r.seed}" for r in done(recipe, tmp_path)]
        path.unlink()
        return sorted(found)

    every = sorted(f"{arm}-{seed}" for arm in ("bam", "dp-sat", "dp-sgd") for seed in (0, 1))
    bam, sat = "bam-clip_norm-1-seed-0", "dp-sat-clip_norm-1-seed-0"
    assert versions() == every
    assert versions(bam) == [name for name in every if name != "bam-0"]
    assert versions(bam, sat) == [name for name in every if name != "dp-sgd-0"]
