"""A long run, watched and maltreated: memory, handles and throughput flat; nothing under-counted.

    OMP_NUM_THREADS=1 nice -n 8 python benchmarks/soak.py --minutes 30

First the training is watched: its memory, its open handles, the processor time of its steps. It is
halted and continued twice a second, so that it takes a share of one core only. Then, in turn:
paused and continued; told to stop as a scheduler does (SIGTERM); killed; its disk filled to the
brim (a small one of its own, where the system lets us mount one, else a bound on file sizes); its
clock set back a day (with ``pip install libfaketime``); each time resumed. After each, the ledger
must hold every step of the checkpoint, and no noise stream twice. Figures: ``results/soak.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dpbam.app.runs.checkpoint import listed

RESULTS = Path(__file__).with_name("results") / "soak.json"
INSIDE = "DPBAM_SOAK_INSIDE"  # set in the process that has a disk of its own
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="to watch; 0: do not")
    parser.add_argument("--rounds", type=int, default=3, help="of maltreatment")
    parser.add_argument("--share", type=float, default=0.4, help="of one core while watched")
    options = parser.parse_args()
    if INSIDE not in os.environ and _may_mount():
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a mount stays
        soak = Soak(_disk(Path(folder)))
        if options.minutes:
            rows = soak.watch(60 * options.minutes, options.share)
            _keep("watched", {**_flatness(rows), "share of a core": options.share})
        for _ in range(options.rounds):
            for act in (soak.pause, soak.terminate, soak.kill, soak.full_disk, soak.clock_back):
                act()
                soak.check_count(act.__name__)
        soak.terminate(resume=False)
        soak.check_count("end")
    return 0


def _keep(part: str, figures: dict[str, Any]) -> None:
    """Print the figures of one part, and put them next to those of the other."""
    command = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} nice -n {os.nice(0)} "
    figures = {**figures, "command": command + " ".join(["python", *sys.argv])}
    print(part, json.dumps(figures, indent=2), flush=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**kept, part: figures}, indent=2) + "\n")


def _may_mount() -> bool:
    """Whether a namespace of our own lets us mount a disk."""
    with contextlib.suppress(OSError):
        script = "mount -t tmpfs -o size=1m none /mnt"
        done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True)
        return done.returncode == 0
    return False


def _disk(folder: Path) -> Path:
    """The run folder, on a small disk of its own if there is one."""
    if INSIDE in os.environ:
        options = ["-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
        subprocess.run(["mount", *options], check=True)
    return folder / "run"


def _clock_back() -> dict[str, str]:
    """The environment of a process whose clock runs a day behind."""
    try:
        import libfaketime
    except ImportError:
        return {}
    return {**libfaketime.get_reload_information()[1], "FAKETIME": "-1d"}


def _clock_kind() -> str:
    return "set back a day by libfaketime" if _clock_back() else "not set back: no libfaketime"


class Soak:
    """The training process and its folder."""

    def __init__(self, out: Path) -> None:
        self.out, self.acts, self.lost = out, list[str](), 0
        self.child = self._start(resume=False)

    def _start(
        self, *, resume: bool, most_bytes: int | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        flags = (["--resume"] if resume else
                 ["--data", "digits", "--model", "mlp", "--method", "bam", "--gradient", "exact",
                  "--noise-multiplier", "4", "--epochs", "100000", "--batch-size", "64",
                  "--eval-every", "200", "--checkpoint-every", "5"])  # fmt: skip

        def bounded() -> None:
            if most_bytes is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

        flags += ["--quiet", "--out", str(self.out)]
        command = [sys.executable, "-m", "dpbam", "train", *flags]
        child = subprocess.Popen(command, preexec_fn=bounded, stderr=subprocess.PIPE, text=True,
                                 env={**os.environ, **(env or {})})  # fmt: skip
        before = self.charged()
        while self.charged() == before and child.poll() is None:
            time.sleep(0.2)
        return child

    def charged(self) -> int:
        ledger = self.out / "ledger.jsonl"
        return ledger.read_bytes().count(b"\n") if ledger.exists() else 0

    def watch(self, seconds: float, share: float) -> np.ndarray:
        """[minutes, resident MiB, handles, steps, processor seconds] every five seconds."""
        rows, began = [], time.monotonic()
        while time.monotonic() - began < seconds:
            for _ in range(10):
                self.child.send_signal(signal.SIGSTOP)
                time.sleep(0.5 * (1 - share))
                self.child.send_signal(signal.SIGCONT)
                time.sleep(0.5 * share)
            if self.child.poll() is not None:
                sys.exit(f"the training ended by itself: {self.child.stderr.read()}")
            rows.append(((time.monotonic() - began) / 60, *self._looked_at()))
        return np.array(rows)

    def _looked_at(self) -> tuple[float, float, int, float]:
        process = Path(f"/proc/{self.child.pid}")
        memory = int((process / "status").read_text().split("VmRSS:")[1].split()[0]) / 1024
        user, system = (process / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
        handles = len(os.listdir(process / "fd"))
        return memory, handles, self.charged(), (int(user) + int(system)) / TICKS

    def pause(self) -> None:
        self.child.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        before = self.charged()
        time.sleep(3)
        assert self.charged() == before
        self.child.send_signal(signal.SIGCONT)
        self._goes_on()

    def terminate(self, *, resume: bool = True) -> None:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(600) == 130, self.child.stderr.read()
        if resume:
            self.child = self._start(resume=True)

    def kill(self) -> None:
        time.sleep(3)
        self.child.kill()
        self.child.wait()
        self.child = self._start(resume=True)

    def full_disk(self) -> None:
        """Writes fail: the training ends with a sentence, and resumes once there is space."""
        if INSIDE in os.environ:
            self._fill()
        else:
            self.terminate(resume=False)
            size = (self.out / "ledger.jsonl").stat().st_size
            self.child = self._start(resume=True, most_bytes=size + 20_000)
        code, error = self.child.wait(600), self.child.stderr.read()
        assert code == 2, error
        assert error.count("\n") == 1, error  # one sentence, and no traceback
        assert "cannot be written" in error or "File too large" in error, error
        assert (self.out / "ledger.jsonl").read_bytes().endswith(b"\n")  # no half line is left
        (self.out.parent / "ballast").unlink(missing_ok=True)
        self.child = self._start(resume=True)

    def _fill(self) -> None:
        """To the last byte, as a neighbour on the disk would."""
        with (self.out.parent / "ballast").open("ab", buffering=0) as ballast:
            for size in (2**20, 2**12, 1):
                with contextlib.suppress(OSError):
                    while self.child.poll() is None:
                        ballast.write(bytes(size))

    def clock_back(self) -> None:
        """The process is told to stop, and its successor believes that it is yesterday."""
        self.terminate(resume=False)
        self.child = self._start(resume=True, env=_clock_back())
        self._goes_on()
        self.terminate()

    def _goes_on(self) -> None:
        before = self.charged()
        while self.charged() == before and self.child.poll() is None:
            time.sleep(0.2)
        assert self.child.poll() is None, self.child.stderr.read()

    def check_count(self, what: str) -> None:
        """The ledger holds at least every step that a checkpoint has seen, and no noise twice."""
        self.acts.append(what)
        steps = [int(p.name.split(".")[0].removeprefix("step-"))
                 for p in listed(self.out / "checkpoints")]  # fmt: skip
        whole = (self.out / "ledger.jsonl").read_bytes().split(b"\n")[:-1]
        entries = [json.loads(line) for line in whole]
        distinct = {e["step"] for e in entries}
        assert set(range(max(steps, default=0))) <= distinct, f"under-counted after {what}"
        assert len({(e["stream"], e["step"]) for e in entries}) == len(entries), f"reused: {what}"
        self.lost = len(entries) - len(distinct)
        _keep("maltreated", {
            "acts": self.acts, "a real disk filled": INSIDE in os.environ, "clock": _clock_kind(),
            "steps charged": len(entries), "charged but lost": self.lost, "under-counted": 0,
        })  # fmt: skip


def _flatness(rows: np.ndarray) -> dict[str, Any]:
    """Least, most and slope of what was watched, after it has warmed up."""
    late = rows[len(rows) // 6 :]
    cost = 1000 * np.diff(late[:, 4]) / np.diff(late[:, 3])  # milliseconds a step
    first, last = (float(np.median(half)) for half in np.array_split(cost, 2))
    figures: dict[str, Any] = {"minutes": round(rows[-1, 0], 1), "steps": int(rows[-1, 3])}
    for name, column in (("memory, MiB", late[:, 1]), ("open handles", late[:, 2])):
        figures[name] = {
            "least": column.min(), "most": column.max(),
            "slope a minute": round(float(np.polyfit(late[:, 0], column, 1)[0]), 4),
        }  # fmt: skip
    figures["processor ms a step"] = {"first half": round(first, 2), "second half": round(last, 2)}
    return figures


if __name__ == "__main__":
    sys.exit(main())
