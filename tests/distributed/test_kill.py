"""Ranks really killed: the others end and say who is gone; nothing is lost or under-counted."""

import json
import random
import time

import pytest

from distributed.driver import ASKED, INTERRUPTED, KILLED, applied, attempt
from end_to_end.kill_driver import SEEDED, STEPS
from end_to_end.test_kill_resume import STATEFUL, UNSEEDED, entries, outcome

ENDED = 2  # a rank that was left behind: one sentence, or silence


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of two ranks that are not killed, and how long they took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    attempt(SEEDED, folder / "warm", 2)  # starts the fork server
    began = time.monotonic()
    done = attempt(SEEDED, folder / "run", 2)
    assert done.codes == [0, 0], done.said
    result = outcome(folder / "run")
    assert result["steps"] == (STEPS, STEPS)
    return result, time.monotonic() - began


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        pytest.param("before the sums are reduced", 0, marks=pytest.mark.slow),
        ("before the sums are reduced", 1),
        pytest.param("between noise and ledger", 0, marks=pytest.mark.slow),
        ("between noise and ledger", 1),
        ("before the slices are gathered", 0),  # charged, and on no rank whole
        pytest.param("after the slices are gathered", 1, marks=pytest.mark.slow),
        pytest.param("while the others wait", 0, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_reported_once_and_the_run_resumes(undisturbed, tmp_path, point, victim):
    out = tmp_path / "run"
    done = attempt(SEEDED, out, 2, victim=victim, point=point, number=4)
    assert done.codes[victim] == KILLED
    assert done.codes[1 - victim] == ENDED
    lines = done.said[1 - victim].splitlines()
    assert [line.split(" (on ")[0] for line in lines] == [f"error: rank {victim}"]
    assert "--resume" in lines[0]
    assert attempt(SEEDED, out, 2, restarts=done).codes == [0, 0]
    assert outcome(out) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize("parts", STATEFUL, ids=str)
def test_the_state_of_filters_and_clippings_survives_the_kill_of_a_rank(tmp_path, parts):
    config, out = {**SEEDED, **parts}, tmp_path / "run"
    assert attempt(config, tmp_path / "whole", 2).codes == [0, 0]
    done = attempt(config, out, 2, victim=1, point="after the slices are gathered", number=4)
    assert sorted(done.codes) == [KILLED, ENDED]
    assert attempt(config, out, 2, restarts=done).codes == [0, 0]
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_ten_kills_at_random_moments(undisturbed, tmp_path):
    """Five of a seeded run on two ranks, five of an unseeded one on two and three by turns."""
    expected, seconds = undisturbed
    moments = random.Random(4)
    for name, config, worlds in (("seeded", SEEDED, (2,)), ("unseeded", UNSEEDED, (2, 3))):
        out, kills = tmp_path / f"{name}-0", 0
        while kills < 5:
            world = worlds[kills % len(worlds)]
            after = moments.uniform(0.1, 1.1) * seconds
            done = attempt(config, out, world, victim=moments.randrange(world), after=after)
            assert set(done.codes) <= {0, ENDED, KILLED, ASKED}, done.said
            assert sum("error" in said for said in done.said) <= 1
            kills += KILLED in done.codes
            if config is UNSEEDED:  # seeded, a step done again is the same release
                assert len(entries(out)) >= applied(out)
            if set(done.codes) == {0}:
                out = tmp_path / f"{name}-{kills}-again"
        assert attempt(config, out, worlds[0]).codes == [0, 0]
        check_end(out, expected if name == "seeded" else None)


def check_end(out, expected):
    if expected is not None:
        assert outcome(out) == expected
        return
    paid = entries(out)
    assert len(set(paid)) == len(paid) >= applied(out) >= STEPS
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert statement["charged_steps"] == len(paid)


def test_an_error_on_one_rank_ends_the_others_without_a_word(undisturbed, tmp_path):
    out = tmp_path / "run"
    done = attempt(SEEDED, out, 3, victim=1, point="while the others wait", number=4, act="fail")
    assert done.codes == [ENDED] * 3
    assert done.said == ["", "error: No space left on device\n", ""]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_asked_to_stop_stops_all_at_one_step(undisturbed, tmp_path, victim):
    out = tmp_path / "run"
    point = "before the sums are reduced"
    done = attempt(SEEDED, out, 2, victim=victim, point=point, number=4, act="ask")
    assert done.codes == [INTERRUPTED] * 2
    assert done.said == ["", ""]
    assert len(entries(out)) == 4  # the step was finished, and saved
    assert attempt(SEEDED, out, 2).codes == [0, 0]
    assert outcome(out) == undisturbed[0]


def test_an_unseeded_run_resumes_on_one_process(tmp_path):
    out = tmp_path / "run"
    done = attempt(UNSEEDED, out, 2, victim=1, point="between noise and ledger", number=4)
    assert done.codes == [ENDED, KILLED]
    assert len(entries(out)) >= applied(out)
    assert attempt(UNSEEDED, out, 1).codes == [0]
    check_end(out, None)


def test_a_seeded_run_needs_as_many_ranks(tmp_path):
    out = tmp_path / "run"
    attempt(SEEDED, out, 2, victim=1, point="before the sums are reduced", number=4)
    refused = attempt(SEEDED, out, 1)
    assert refused.codes == [ENDED]
    assert "began on 2 processes, here are 1" in refused.said[0]


def test_a_ledger_written_late_is_found_out(tmp_path):
    """The negative control of the count."""
    late, out = "the ledger is written a step late", tmp_path / "run"
    # ranks wait several times per step: the ninth time is after the first steps of the optimiser
    attempt(UNSEEDED, out, 2, victim=0, point="while the others wait", number=9, mistake=late)
    assert len(entries(out)) < applied(out)
