"""A whole run on two ranks: the folder, the statement and the weights of a single process."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from distributed.test_slices import numbers
from dpbam.app.runs import RunConfig, execute, prepare
from dpbam.app.runs.execution import _begun
from dpbam.app.runs.facts import new_facts
from dpbam.app.runs.folder import RunFolder
from dpbam.distributed import Ranks
from end_to_end.kill_driver import SEEDED, STEPS
from together import together


def statement(out) -> dict[str, object]:
    found = json.loads((out / "privacy-statement.json").read_text())
    del found["run"]  # a number drawn for every run
    del found["identity"]["files"]  # digests of the weights, which differ in the last bits
    return found


def test_two_ranks_leave_what_one_process_leaves(tmp_path):
    config = RunConfig(**SEEDED)
    alone = execute(config, tmp_path / "one")
    for result in together(2, lambda ranks: execute(config, tmp_path / "two", ranks=ranks)):
        assert (result.steps, result.charged, result.epsilon) == (STEPS, STEPS, alone.epsilon)
    one, two = tmp_path / "one", tmp_path / "two"
    assert statement(one) == statement(two)
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
    assert len((two / "ledger.jsonl").read_text().splitlines()) == STEPS
    sizes = [
        [json.loads(line)["non_private_batch_size"] for line in log.read_text().splitlines()]
        for log in (one / "non-private" / "training.jsonl", two / "non-private" / "training.jsonl")
    ]
    assert sizes[0] == sizes[1]
    left, right = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for name in left:  # float32: sums of other parts differ in the last bits
        assert np.abs(left[name] - right[name]).max() < 1e-5, name


def test_two_ranks_measure_and_release_what_one_process_does(tmp_path):
    config = RunConfig(**SEEDED, measure_bias=3, release_norms=20.0)
    execute(config, tmp_path / "one")
    together(2, lambda ranks: execute(config, tmp_path / "two", ranks=ranks))
    for name, lines in (("non-private/bias.jsonl", 3), ("statistics.jsonl", STEPS)):
        one, two = (
            [json.loads(line) for line in (tmp_path / side / name).read_text().splitlines()]
            for side in ("one", "two")
        )
        assert len(one) == len(two) == lines
        for left, right in zip(one, two, strict=True):  # float32: the last bits differ
            assert numbers(left) == pytest.approx(numbers(right), rel=1e-3, abs=1e-4, nan_ok=True)
    assert statement(tmp_path / "one") == statement(tmp_path / "two")


def test_what_is_refused_on_two_ranks_writes_nothing(tmp_path):
    config = RunConfig(**SEEDED, budget=tmp_path / "missing.json")
    with pytest.raises(ValueError):  # on one rank with a sentence, on the other without a word
        together(2, lambda ranks: execute(config, tmp_path / "run", ranks=ranks))
    assert not (tmp_path / "run").exists()


def test_every_rank_takes_the_leaders_sigma(tmp_path):
    """Each host calibrates by itself, and may find other last bits."""
    config = RunConfig(**SEEDED)
    facts = new_facts(prepare(config), 2)
    sigma = facts.noise_multiplier * (1 + 1e-12)
    facts = facts.model_copy(update={"noise_multiplier": sigma})

    class Follower(Ranks):
        rank, world = 1, 2

        def from_leader(self, make):
            return facts

    _, prepared = _begun(RunFolder(tmp_path / "run"), config, Follower())
    assert prepared.plan.noise_multiplier == sigma
