"""Runs of a recipe: done once, recorded at once, gone on with after a kill, refused if no pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbam.app.runs import ConfigError
from reproduce import jobs
from reproduce.jobs import carry_out, done, missing, records_folder
from reproduce.outcome import Study
from reproduce.records import read_record
from tests.forked import started
from tests.reproduce.tiny import dies, machine, tiny

STEPS = 13  # of a run of 0.6 epochs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce")
    recipe = tiny(folder, flatness=True)
    carry_out(missing([recipe], folder / "results"), folder / "runs")
    return folder, recipe


def test_one_small_record_a_run_with_all_that_is_needed(finished):
    folder, recipe = finished
    records = done(recipe, folder / "results")
    assert len(records) == len(recipe.runs()) == 6
    for path in records_folder(recipe, folder / "results").iterdir():
        assert path.suffix == ".json"
        assert path.stat().st_size < 20_000
    for record in records:
        assert record.config["seed"] == record.seed
        assert record.plan["noise_multiplier"] == 1.0
        assert record.pairing["data"]
        assert record.machine["torch"]
        assert 0 <= record.accuracy <= 1
        assert record.non_private_bias[-1]["non_private_against_plain"]["bias"] > 0
        assert record.non_private_flatness["non_private_top_eigenvalue"] > 0


def test_nothing_is_done_twice(finished, monkeypatch):
    folder, recipe = finished
    assert missing([recipe, recipe], folder / "results") == []
    monkeypatch.setattr(jobs, "run_all", None)  # would fail if it were called
    carry_out([], folder / "runs")
    lacking = missing([recipe, recipe], folder / "results", seeds=3)
    assert [job.run.name for job in lacking] == [
        f"{arm}-clip_norm-1-seed-2" for arm in ("dp-sgd", "dp-sat", "bam")
    ]


def test_runs_of_one_seed_are_pairs_and_a_planted_one_is_refused(finished, tmp_path):
    folder, recipe = finished
    records = done(recipe, folder / "results")
    by_seed = [{json.dumps(r.pairing) for r in records if r.seed == seed} for seed in (0, 1)]
    assert [len(found) for found in by_seed] == [1, 1]
    assert by_seed[0] != by_seed[1]
    there = records_folder(recipe, folder / "results")
    here = records_folder(recipe, tmp_path)
    here.mkdir(parents=True)
    for path in there.iterdir():
        values = json.loads(path.read_text())
        if path.name == "bam-clip_norm-1-seed-1.json":
            values["pairing"]["data"] = "better data"
        (here / path.name).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="bam and dp-sgd of seed 1 do not share their training"):
        done(recipe, tmp_path)


def test_a_record_of_other_settings_is_refused(finished, tmp_path):
    folder, _ = finished
    other = tiny(tmp_path, epochs=0.3)
    with pytest.raises(ConfigError, match=r"run with epochs 0.2, but the recipe says 0.3"):
        missing([other], folder / "results")
    broken = tmp_path / "broken.json"
    broken.write_text('{"arm": 1}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(broken)


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
def test_a_kill_loses_nothing_but_time(tmp_path):
    """After SIGKILL the same call keeps what is done, resumes what was begun, ends alike."""
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for folder in (disturbed, whole):
        recipe = tiny(folder, epochs=0.6)
        assert recipe.runs()[0].config.plan(recipe.images).steps == STEPS
    run = killed_in_the_middle(disturbed)
    first = disturbed / "results" / "pocket" / "tiny" / "dp-sgd-clip_norm-1-seed-0.json"
    kept = first.stat().st_mtime_ns
    ledger = disturbed / "runs" / "pocket" / "tiny" / run / "ledger.jsonl"
    begun = ledger.read_text()
    assert not first.with_name("dp-sat-clip_norm-1-seed-0.json").exists()
    for folder in (disturbed, whole):
        machine(folder, 1)
    assert first.stat().st_mtime_ns == kept
    assert ledger.read_text().startswith(begun.rpartition("\n")[0])  # gone on with, not begun anew
    for name in ("dp-sgd", "dp-sat", "bam"):
        path = Path("results", "pocket", "tiny", f"{name}-clip_norm-1-seed-0.json")
        one, other = read_record(disturbed / path), read_record(whole / path)
        assert (one.accuracy, one.pairing) == (other.accuracy, other.pairing)
        assert one.non_private_bias == other.non_private_bias


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_shards_are_every_run_once(tmp_path, machines):
    recipe = tiny(tmp_path)
    shards = [
        [job.run.name for job in missing([recipe], tmp_path, 3, shard=(i + 1, machines))]
        for i in range(machines)
    ]
    whole = [job.run.name for job in missing([recipe], tmp_path, 3)]
    assert sorted(name for shard in shards for name in shard) == sorted(whole)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
