"""Real processes, really killed, then resumed: nothing is lost, and nothing is under-counted."""

import json
import math
import random
import time
from pathlib import Path

import pytest

from dpbam.privacy import accounting
from end_to_end.kill_driver import SEEDED, STEPS, run

KILLED = -9
UNSEEDED = {k: v for k, v in SEEDED.items() if k != "seed"}
STATEFUL = [
    {"filter": "doppler", "clipping": "slaclip"},
    {"method": "disk", "clipping": "quantile"},
]
POINTS = [
    ("before the ledger write", 4),
    ("in the middle of the ledger write", 4),
    ("after the ledger write", 4),
    ("in the middle of a step", 1),
    ("in the middle of a step", 5),
    ("before the optimiser's step", 3),
    ("after the optimiser's step", 6),
    ("in the middle of a checkpoint write", 3),
    ("before the rename", 1),  # of the run's first file
    ("before the rename", 7),
    ("after the rename", 7),
    ("in evaluation", 2),
    ("in evaluation", STEPS),
    ("before the model is handed out", 1),
    ("before the statement", 1),
]


def some(*quick: int) -> list[object]:
    """All points; those but the ``quick`` ones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(*p, marks=() if i in quick else slow) for i, p in enumerate(POINTS)]


def outcome(out: Path) -> dict[str, object]:
    """What a run gives: parameters, metrics, what was spent."""
    statement = json.loads((out / "privacy-statement.json").read_text())
    return {
        "parameters": (out / "model.safetensors").read_bytes(),
        "metrics": (out / "metrics.jsonl").read_text(),
        "epsilon": statement["epsilon"],
        "steps": (statement["steps"], statement["charged_steps"]),
        "ledger": sorted((out / "ledger.jsonl").read_text().splitlines()),
    }


def entries(out: Path) -> list[tuple[str, int]]:
    """The whole lines of the ledger, as (stream, step)."""
    path = out / "ledger.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [(e["stream"], e["step"]) for e in map(json.loads, lines)]


def applied(out: Path) -> int:
    """How many steps reached the parameters, in all processes."""
    path = out.with_suffix(".applied")
    return path.stat().st_size if path.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of a run that is not killed, and how long its process took."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    run(SEEDED, out.with_name("warm"))  # starts the fork server
    began = time.monotonic()
    assert run(SEEDED, out) == 0
    result = outcome(out)
    assert result["steps"] == (STEPS, STEPS)
    return result, time.monotonic() - began


@pytest.mark.parametrize(("point", "number"), some(1, 7, 10))
def test_a_seeded_run_ends_as_if_it_had_not_been_killed(undisturbed, tmp_path, point, number):
    out = tmp_path / "run"
    assert run(SEEDED, out, point=point, number=number) == KILLED
    assert run(SEEDED, out) == 0
    assert outcome(out) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after the ledger write", "after the optimiser's step"])
@pytest.mark.parametrize("parts", STATEFUL, ids=str)
def test_the_state_of_filters_and_clippings_survives_a_kill(tmp_path, parts, point):
    config, out = {**SEEDED, **parts}, tmp_path / "run"
    assert run(config, tmp_path / "whole") == 0
    assert run(config, out, point=point, number=5) == KILLED
    assert run(config, out) == 0
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_at_random_moments(undisturbed, tmp_path, times):
    expected, seconds = undisturbed
    moments = random.Random(3)
    out, kills, finished = tmp_path / "run-0", 0, 0
    while kills < times:
        code = run(SEEDED, out, after=moments.uniform(0, 1.1 * seconds))
        kills += code == KILLED
        if code == 0:
            assert outcome(out) == expected
            finished += 1
            out = tmp_path / f"run-{finished}"
    assert run(SEEDED, out) == 0
    assert outcome(out) == expected


@pytest.mark.parametrize(("point", "number"), some(0, 4, 6))
def test_an_unseeded_run_never_under_counts(tmp_path, point, number):
    out = tmp_path / "run"
    assert run(UNSEEDED, out, point=point, number=number) == KILLED
    assert len(entries(out)) >= applied(out)
    assert run(UNSEEDED, out) == 0
    paid = entries(out)
    assert len(set(paid)) == len(paid) >= applied(out) >= STEPS  # no noise stream twice
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert statement["charged_steps"] == len(paid)
    sigma, q = statement["noise_multiplier"], statement["sampling_rate"]
    assert statement["epsilon"] == accounting.epsilon(sigma, q, len(paid), 1e-4, accountant="rdp")


@pytest.mark.slow
def test_a_killed_run_stops_where_its_budget_ends(tmp_path):
    config = {k: v for k, v in UNSEEDED.items() if k != "noise_multiplier"}
    config |= {"epsilon": 2.0, "checkpoint_every": 1000, "schedule": "constant"}
    out = tmp_path / "run"
    assert run(config, out, point="before the optimiser's step", number=5) == KILLED
    assert run(config, out) == 0
    statement = json.loads((out / "privacy-statement.json").read_text())
    first = math.ceil(STEPS / 10)  # the step of the first checkpoint
    assert statement["charged_steps"] == len(entries(out)) == STEPS
    assert statement["steps"] == STEPS - (5 - first)  # those after it were lost
    assert statement["epsilon"] <= 2.0


def test_a_ledger_written_late_is_found_out(tmp_path):
    """The negative control of the counting test."""
    out = tmp_path / "run"
    late = "the ledger is written a step late"
    assert run(UNSEEDED, out, point="in evaluation", number=3, mistake=late) == KILLED
    assert len(entries(out)) < applied(out)


def test_a_forgetful_resume_is_found_out(undisturbed, tmp_path):
    """The negative control of the seeded test: without the optimiser's state it ends elsewhere."""
    out = tmp_path / "run"
    assert run(SEEDED, out, point="in evaluation", number=3) == KILLED
    forgets = "the optimiser's state is forgotten"
    assert run(SEEDED, out, mistake=forgets) != 0 or outcome(out) != undisturbed[0]
