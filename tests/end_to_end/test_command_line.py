"""The command line as a user runs it, in processes of its own: train, evaluate, predict, resume."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpbam.data import load

DPBAM = [sys.executable, "-m", "dpbam"]
TRAIN = ["train", "--data", "digits", "--method", "dp-sgd", "--epsilon", "3", "--delta", "1e-4",
         "--lr", "0.01", "--accountant", "rdp", "--device", "cpu"]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def dpbam(*args, cwd, code=0):
    done = subprocess.run(
        [*DPBAM, *map(str, args)], cwd=cwd, capture_output=True, text=True, check=False,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with a finished run in ``run``."""
    where = tmp_path_factory.mktemp("work")
    done = dpbam(*TRAIN, "--epochs", 8, "--out", "run", cwd=where)
    (where / "stdout.txt").write_text(done.stdout)
    (where / "stderr.txt").write_text(done.stderr)
    return where


def test_training_says_what_it_spent_and_what_may_be_published(place):
    said = (place / "stdout.txt").read_text()
    statement = json.loads((place / "run" / "privacy-statement.json").read_text())
    assert 2.9 < statement["epsilon"] <= 3
    assert f"epsilon   {statement['epsilon']:.4g} of 3 at delta 0.0001" in said
    for name in statement["may_be_published"]:
        assert name in " ".join(said.split())
        assert (place / "run" / name).is_file()
    assert "a release of its own" in said
    assert "epsilon" in (place / "stderr.txt").read_text()


@pytest.fixture(scope="module")
def report(place):
    """What ``dpbam evaluate`` says of the run."""
    return json.loads(dpbam("evaluate", "run", "--json", "--save", cwd=place).stdout)


def test_the_model_is_of_use(place, report):
    """Chance is 10%; eight epochs at epsilon 3 are enough for far more."""
    low, high = report["accuracy"]["interval"]
    assert low < report["accuracy"]["value"] < high
    assert low > 0.6
    assert report["auc"] > 0.9
    assert sum(map(sum, report["confusion"])) == 359
    saved = json.loads((place / "run" / "non-private" / "evaluation-test.json").read_text())
    assert saved == report


def test_evaluation_agrees_with_what_training_measured(place, report):
    last = json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert report["accuracy"]["value"] == pytest.approx(last["accuracy"])


def test_predictions_are_those_that_were_evaluated(place, report):
    test = load("digits", split="test")
    pixels = test.images.read(np.arange(len(test)))
    np.savez(place / "all.npz", images=pixels)
    Image.fromarray(pixels[0, 0]).save(place / "one.png")
    said = dpbam("predict", "run", "one.png", "all.npz", cwd=place).stdout
    one, *rows = csv.DictReader(io.StringIO(said))
    assert one["label"] == rows[0]["label"]
    right = sum(int(r["label"]) == y for r, y in zip(rows, test.labels, strict=True))
    assert right / len(rows) == pytest.approx(report["accuracy"]["value"])
    assert sum(float(v) for k, v in one.items() if k.startswith("p(")) == pytest.approx(1, abs=1e-4)


def test_ctrl_c_saves_and_resuming_ends_as_if_nothing_had_happened(place):
    seeded = [*TRAIN, "--model", "mlp", "--epochs", "8", "--seed", "5", "--json-lines"]
    dpbam(*seeded, "--out", "whole", cwd=place)
    steps = _interrupt([*seeded, "--out", "broken"], after=4, cwd=place)
    assert not (place / "broken" / "model.safetensors").exists()
    said = dpbam("train", "--resume", "--out", "broken", "--json-lines", cwd=place).stdout
    events = [json.loads(line) for line in said.splitlines()]
    start = next(e for e in events if e["event"] == "start")
    assert 4 <= start["step"] <= steps + 1
    assert events[-1]["event"] == "end"
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (place / "broken" / name).read_bytes() == (place / "whole" / name).read_bytes()


def _interrupt(args, after, cwd):
    """Send Ctrl-C once ``after`` steps are done; the steps seen by then."""
    with subprocess.Popen(
        [*DPBAM, *args], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, start_new_session=True,
    ) as process:  # fmt: skip
        step = 0
        for line in process.stdout:
            event = json.loads(line)
            step = event.get("step", step) if event["event"] == "step" else step
            if step >= after:
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "dpbam train --resume --out broken" in err
    return step


def workers(folder):
    """The ids of processes at work in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").resolve() == folder:
                found.append(int(entry.name))
    return found


def stopped_by(stop, command, cwd):
    """Start a comparison, call ``stop`` when a run is at work, and give its code and stderr."""
    process = subprocess.Popen(
        [*DPBAM, *command, "--jobs", "2"], cwd=cwd, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    ledger = cwd / "both" / "dp-sgd" / "seed-0" / "ledger.jsonl"
    deadline = time.monotonic() + 120
    while not ledger.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    stop(process.pid)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


COMPARE = ["compare", "--data", "digits", "--model", "mlp", "--noise-multiplier", "1",
           "--accountant", "rdp", "--batch-size", "256", "--epochs", "30", "--method", "dp-sgd",
           "--method", "bam", "--seeds", "2", "--out", "both"]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_killed_leaves_no_process_behind(number, tmp_path):
    folder = tmp_path.resolve()
    stopped_by(lambda pid: os.kill(pid, number), COMPARE, folder)  # the parent process alone
    deadline = time.monotonic() + 60
    while workers(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers(folder) == []
    assert (folder / "both" / "dp-sgd" / "seed-0" / "checkpoints").is_dir()


def test_a_comparison_that_is_stopped_goes_on(place):
    # as a terminal does: to all its processes
    code, err = stopped_by(lambda pid: os.killpg(pid, signal.SIGINT), COMPARE, place)
    assert code == 130, err
    assert "the same command goes on" in err
    assert not (place / "both" / "comparison.json").exists()
    said = " ".join(dpbam(*COMPARE, cwd=place).stdout.split())
    assert "2 paired seeds" in said
    assert "Verdict: better or worse where the 95% interval" in said
    result = json.loads((place / "both" / "comparison.json").read_text())
    assert {name: m["accuracy"]["count"] for name, m in result["contenders"].items()} == {
        "dp-sgd": 2,
        "bam": 2,
    }
    steps = [
        len((place / r["out"] / "ledger.jsonl").read_text().splitlines()) for r in result["runs"]
    ]
    assert steps == [r["charged"] for r in result["runs"]] == [steps[0]] * 4
