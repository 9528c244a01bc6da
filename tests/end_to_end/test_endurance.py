"""What happens to a long run: it is paused, its clock is set back, its disk is full."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from dpbam.app.runs.checkpoint import listed
from end_to_end.kill_driver import SEEDED, STEPS, halting, run
from end_to_end.test_kill_resume import KILLED, UNSEEDED, applied, entries, outcome
from tests.forked import wait_until

FUTURE = 4e9  # a time stamp in 2096


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(SEEDED, out) == 0
    return outcome(out)


def test_paused_and_continued(undisturbed: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with halting(SEEDED, out, 3) as process:
        before = _halted(process, out)
        time.sleep(0.5)
        assert entries(out) == before
        os.kill(process.pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == 0
    assert outcome(out) == undisturbed


def test_told_to_stop_as_a_scheduler_does(undisturbed: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with halting(SEEDED, out, 3) as process:
        before = _halted(process, out)
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == 1  # with the word how to resume
    taken = entries(out)
    assert len(taken) <= len(before) + 1  # the step that it was at
    assert listed(out / "checkpoints")[-1].name.startswith(f"step-{len(taken):08d}.")
    assert run(SEEDED, out) == 0
    assert outcome(out) == undisturbed


def _halted(process: BaseProcess, out: Path) -> list[tuple[str, int]]:
    """Wait until the process has halted; the ledger's entries by then."""
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", alive=process.is_alive)
    assert len(entries(out)) == 3
    return entries(out)


def from_the_future(out: Path) -> None:
    """What a process finds whose clock was set back: every file is younger than now."""
    for path in out.rglob("*"):
        os.utime(path, (FUTURE, FUTURE))


@pytest.mark.parametrize("point", ["before the optimiser's step", "before the rename"])
def test_the_clock_set_back(undisturbed: dict[str, object], tmp_path: Path, point: str) -> None:
    out = tmp_path / "run"
    assert run(SEEDED, out, point=point, number=6, mistake="the clock runs backwards") == KILLED
    from_the_future(out)
    assert run(SEEDED, out, mistake="the clock runs backwards") == 0
    assert outcome(out) == undisturbed


@pytest.mark.slow
def test_the_clock_set_back_never_under_counts(tmp_path: Path) -> None:
    out, back = tmp_path / "run", "the clock runs backwards"
    assert run(UNSEEDED, out, point="after the optimiser's step", number=4, mistake=back) == KILLED
    from_the_future(out)
    assert run(UNSEEDED, out, mistake=back) == 0
    paid = entries(out)
    assert len(set(paid)) == len(paid) >= applied(out) >= STEPS
    assert json.loads((out / "privacy-statement.json").read_text())["charged_steps"] == len(paid)


SCRIPT = """
set -e
mount -t tmpfs -o size=96k none disk
set +e
"$0" -m dpbam train "$@" --out disk/run 2> full.txt; echo $? > full.code
set -e
cp -r disk/run left
mount -o remount,size=64m disk
"$0" -m dpbam train --resume --quiet --out disk/run
cp -r disk/run ended
"""


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.slow  # test_run_folders.py has a full disk in this process
@pytest.mark.skipif(not _may_mount(), reason="no small disk may be mounted: run the tests as root")
def test_a_disk_filled_to_the_brim(tmp_path: Path) -> None:
    """A sentence, a whole ledger, and on with it when there is room."""
    (tmp_path / "disk").mkdir()
    flags = ["--data", "digits", "--model", "mlp", "--method", "dp-sgd", "--batch-size", "64",
             "--noise-multiplier", "4", "--accountant", "rdp", "--epochs", "20",
             "--model-option", "hidden=[4]", "--checkpoint-every", "1000", "--quiet"]  # fmt: skip
    command = ["unshare", "-rm", "sh", "-c", SCRIPT, sys.executable, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error = (tmp_path / "full.txt").read_text()
    assert (tmp_path / "full.code").read_text().strip() == "2", error
    assert error.count("\n") == 1, error
    assert "No space left on device" in error
    left, ended = entries(tmp_path / "left"), entries(tmp_path / "ended")
    assert (tmp_path / "left" / "ledger.jsonl").read_bytes().endswith(b"\n")
    assert left
    assert ended[: len(left)] == left  # nothing that was paid for is forgotten
    statement = json.loads((tmp_path / "ended" / "privacy-statement.json").read_text())
    assert statement["charged_steps"] == len(ended) >= statement["steps"]
