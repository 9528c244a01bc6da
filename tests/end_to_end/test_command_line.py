"""The command line as a user runs it, in processes of its own: train, evaluate, predict, resume."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from dpbam.data import load
from end_to_end.kill_driver import plant
from tests.forked import command, wait_until

DPBAM = [sys.executable, "-m", "dpbam"]
TRAIN = ["train", "--data", "digits", "--method", "dp-sgd", "--epsilon", "3", "--delta", "1e-4",
         "--lr", "0.01", "--accountant", "rdp", "--device", "cpu", "--model", "mlp"]  # fmt: skip
SHORT = ["train", "--data", "digits", "--model", "mlp", "--model-option", "hidden=[8]",
         "--method", "dp-sgd", "--noise-multiplier", "4", "--accountant", "rdp", "--batch-size",
         "180", "--epochs", "1", "--seed", "5", "--json-lines",
         "--physical-batch-size", "512"]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Done(NamedTuple):
    """What a command printed."""

    stdout: str
    stderr: str


def dpbam(*args, cwd, code=0):
    """``dpbam ARGS`` in a process forked from one that has imported torch."""
    out, err = cwd / "stdout.tmp", cwd / "stderr.tmp"
    process = command(*args, cwd=cwd, stdout=out, stderr=err)
    process.join()
    assert process.exitcode == code, err.read_text()
    return Done(out.read_text(), err.read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with a finished run in ``run``."""
    where = tmp_path_factory.mktemp("work")
    done = dpbam(*TRAIN, "--epochs", "8", "--seed", "0", "--out", "run", cwd=where)
    (where / "stdout.txt").write_text(done.stdout)
    (where / "stderr.txt").write_text(done.stderr)
    return where


def test_training_says_what_it_spent_and_what_may_be_published(place):
    said = (place / "stdout.txt").read_text()
    statement = json.loads((place / "run" / "privacy-statement.json").read_text())
    assert 2.9 < statement["epsilon"] <= 3
    assert f"epsilon {statement['epsilon']:.4g} of 3 at delta 0.0001" in " ".join(said.split())
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
    low, high = report["interval"]
    assert low < report["scores"]["accuracy"] < high
    assert low > 0.6
    assert report["scores"]["auc"] > 0.9
    assert sum(map(sum, report["confusion"])) == 359
    saved = json.loads((place / "run" / "non-private" / "evaluation-test.json").read_text())
    assert saved == report


def test_evaluation_agrees_with_what_training_measured(place, report):
    last = json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert report["scores"]["accuracy"] == pytest.approx(last["accuracy"])


def test_predictions_are_those_that_were_evaluated(place, report):
    test = load("digits", split="test")
    pixels = test.images.read(np.arange(len(test)))
    np.savez(place / "all.npz", images=pixels)
    Image.fromarray(pixels[0, 0]).save(place / "one.png")
    said = dpbam("predict", "run", "one.png", "all.npz", cwd=place).stdout
    one, *rows = csv.DictReader(io.StringIO(said))
    assert one["label"] == rows[0]["label"]
    right = sum(int(r["label"]) == y for r, y in zip(rows, test.labels, strict=True))
    assert right / len(rows) == pytest.approx(report["scores"]["accuracy"])
    assert sum(float(v) for k, v in one.items() if k.startswith("p(")) == pytest.approx(1, abs=1e-4)


def interrupted(step):
    """Plant Ctrl-C in a process, in the optimiser's ``step``-th step."""
    plant("before the optimiser's step", step, signal.SIGINT)


def test_ctrl_c_saves_and_resuming_ends_as_if_nothing_had_happened(tmp_path):
    dpbam(*SHORT, "--out", "whole", cwd=tmp_path)
    out, err = tmp_path / "broken.out", tmp_path / "broken.err"
    process = command(
        *SHORT, "--out", "broken", cwd=tmp_path, stdout=out, stderr=err,
        first=partial(interrupted, 4),
    )  # fmt: skip
    process.join()
    assert process.exitcode == 130, err.read_text()
    assert "dpbam train --resume --out broken" in err.read_text()
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    said = dpbam("train", "--resume", "--out", "broken", "--json-lines", cwd=tmp_path).stdout
    events = [json.loads(line) for line in said.splitlines()]
    start = next(e for e in events if e["event"] == "start")
    assert start["step"] == 4  # the step that it was at is finished and saved
    assert events[-1]["event"] == "end"
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def workers(folder):
    """The ids of processes at work in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").resolve() == folder:
                found.append(int(entry.name))
    return found


def at_work(process, cwd):
    """Wait until a comparison's first run has taken a step."""
    ledger = cwd / "both" / "dp-sgd" / "seed-0" / "ledger.jsonl"
    wait_until(ledger.exists, alive=lambda: process.poll() is None)


COMPARE = ["compare", "--data", "digits", "--model", "mlp", "--model-option", "hidden=[8]",
           "--noise-multiplier", "4", "--accountant", "rdp", "--batch-size", "180", "--epochs", "1",
           "--method", "dp-sgd", "--method", "bam", "--seeds", "2", "--out", "both",
           "--physical-batch-size", "512"]  # fmt: skip
LONG = [*COMPARE, "--epochs", "2000", "--jobs", "2"]  # it is killed; the last flag counts


def fork_workers():
    """Have this process fork its workers: no import of torch in each."""
    forks = multiprocessing.get_context("fork")
    mock.patch.object(multiprocessing, "get_context", return_value=forks).start()


class Forked:
    """A comparison with workers, all forked, with the part of Popen that a test needs."""

    def __init__(self, cwd):
        said = cwd / "said.tmp"
        self.process = command(*LONG, cwd=cwd, stdout=said, stderr=said, first=fork_workers)
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()


def real(cwd):
    return subprocess.Popen([*DPBAM, *LONG], cwd=cwd, stderr=subprocess.DEVNULL, env=ENVIRONMENT)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="no /proc: run it on Linux")
@pytest.mark.parametrize(
    ("start", "number"),
    [
        (Forked, signal.SIGKILL),
        pytest.param(real, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(real, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_comparison_that_is_killed_leaves_no_process_behind(start, number, tmp_path):
    """The parent alone is killed, by a signal to its process."""
    folder = tmp_path.resolve()
    process = start(folder)
    at_work(process, folder)
    assert len(workers(folder)) >= 2  # itself and those at work for it
    os.kill(process.pid, number)
    process.wait()
    wait_until(lambda: not workers(folder), alive=lambda: True)
    assert (folder / "both" / "dp-sgd" / "seed-0" / "checkpoints").is_dir()


def hear_ctrl_c():
    """As from a terminal: tests in a shell's background would hand on that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopped_alone(compare, cwd):
    """A comparison without workers, stopped in its third step; what it printed."""
    out, err = cwd / "stopped.out", cwd / "stopped.err"
    process = command(*compare, cwd=cwd, stdout=out, stderr=err, first=partial(interrupted, 3))
    process.join()
    return process.exitcode, err.read_text()


def stopped_with_workers(compare, cwd):
    """Real processes, stopped as a terminal does: all of them at once."""
    with subprocess.Popen(
        [*DPBAM, *compare, "--jobs", "2"], cwd=cwd, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, start_new_session=True, preexec_fn=hear_ctrl_c,
    ) as process:  # fmt: skip
        at_work(process, cwd)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "epochs"),
    [(stopped_alone, 1), (stopped_with_workers, 20)],  # 20: long after its first step
)
def test_a_stopped_comparison_resumes(stopped, epochs, tmp_path):
    compare = [*COMPARE, "--epochs", epochs]
    code, err = stopped([str(word) for word in compare], tmp_path)
    assert code == 130, err
    assert "the same command resumes" in err
    assert not (tmp_path / "both" / "comparison.json").exists()
    said = " ".join(dpbam(*compare, cwd=tmp_path).stdout.split())
    assert "2 paired seeds" in said
    assert "Verdict: better or worse where the 95% interval" in said
    result = json.loads((tmp_path / "both" / "comparison.json").read_text())
    assert {name: m["accuracy"]["count"] for name, m in result["contenders"].items()} == {
        "dp-sgd": 2,
        "bam": 2,
    }
    steps = [
        len((tmp_path / r["out"] / "ledger.jsonl").read_text().splitlines()) for r in result["runs"]
    ]
    assert steps == [r["charged"] for r in result["runs"]] == [steps[0]] * 4
