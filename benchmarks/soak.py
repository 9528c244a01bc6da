"""A long run, watched and maltreated: memory, handles and throughput flat; nothing under-counted.

    python benchmarks/soak.py --minutes 30

Two thirds of the time the training is left alone and watched: its memory, its open handles, its
steps a second. Then, in turn: paused and continued, told to stop as a scheduler does (SIGTERM) and
resumed, killed and resumed, and run with a bound on file sizes, which fails its writes as a full
disk does, and resumed. After each, the ledger must hold at least the steps of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dpbam.runs.checkpoint import listed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder) / "run")
        rows = soak.watch(60 * options.minutes * 2 / 3)
        _print_flatness(rows)
        end = time.monotonic() + 60 * options.minutes / 3
        while time.monotonic() < end:
            for act in (soak.pause, soak.terminate, soak.kill, soak.full_disk):
                act()
                soak.check_count(act.__name__)
        soak.terminate(resume=False)
        soak.check_count("end")
    print(f"maltreated {soak.acts} times; steps charged but lost: {soak.lost} (never the reverse)")
    return 0


class Soak:
    """The training process and its folder."""

    def __init__(self, out: Path) -> None:
        self.out, self.acts, self.lost = out, 0, 0
        self.child = self._start(resume=False)

    def _start(self, *, resume: bool, most_bytes: int | None = None) -> subprocess.Popen:
        flags = (["--resume"] if resume else
                 ["--data", "digits", "--model", "mlp", "--method", "bam", "--gradient", "exact",
                  "--noise-multiplier", "4", "--epochs", "100000", "--batch-size", "64",
                  "--eval-every", "200", "--checkpoint-every", "5"])  # fmt: skip

        def bounded() -> None:
            if most_bytes is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

        command = [
            sys.executable,
            "-m",
            "dpbam",
            "train",
            *flags,
            "--quiet",
            "--out",
            str(self.out),
        ]
        child = subprocess.Popen(command, preexec_fn=bounded, stderr=subprocess.PIPE, text=True)
        before = self.charged()
        while self.charged() == before and child.poll() is None:
            time.sleep(0.2)
        return child

    def charged(self) -> int:
        ledger = self.out / "ledger.jsonl"
        return ledger.read_bytes().count(b"\n") if ledger.exists() else 0

    def watch(self, seconds: float) -> np.ndarray:
        """[time, resident MiB, handles, steps] every five seconds."""
        rows, began = [], time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(5)
            if self.child.poll() is not None:
                sys.exit(f"the training ended by itself: {self.child.stderr.read()}")
            status = Path(f"/proc/{self.child.pid}/status").read_text()
            memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
            handles = len(os.listdir(f"/proc/{self.child.pid}/fd"))
            rows.append((time.monotonic() - began, memory, handles, self.charged()))
        return np.array(rows)

    def pause(self) -> None:
        self.child.send_signal(signal.SIGSTOP)
        before = self.charged()
        time.sleep(3)
        assert self.charged() == before
        self.child.send_signal(signal.SIGCONT)
        while self.charged() == before:
            time.sleep(0.2)

    def terminate(self, *, resume: bool = True) -> None:
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(120) == 130, self.child.returncode
        if resume:
            self.child = self._start(resume=True)

    def kill(self) -> None:
        time.sleep(3)
        self.child.kill()
        self.child.wait()
        self.child = self._start(resume=True)

    def full_disk(self) -> None:
        """Writes fail once the ledger has grown by some lines more."""
        self.terminate(resume=False)
        size = (self.out / "ledger.jsonl").stat().st_size
        self.child = self._start(resume=True, most_bytes=size + 20_000)
        assert self.child.wait(300) == 2, self.child.returncode
        error = self.child.stderr.read()
        assert "cannot be written" in error, error
        assert (self.out / "ledger.jsonl").read_bytes().endswith(b"\n")  # no half line is left
        self.child = self._start(resume=True)

    def check_count(self, what: str) -> None:
        """The ledger holds at least every step that a checkpoint has seen."""
        self.acts += 1
        steps = [int(p.name.split(".")[0].removeprefix("step-"))
                 for p in listed(self.out / "checkpoints")]  # fmt: skip
        entries = [json.loads(x) for x in (self.out / "ledger.jsonl").read_text().splitlines()]
        distinct = {e["step"] for e in entries}
        assert set(range(max(steps, default=0))) <= distinct, f"under-counted after {what}"
        self.lost = len(entries) - len(distinct)


def _print_flatness(rows: np.ndarray) -> None:
    late = rows[len(rows) // 5 :]  # after it has warmed up
    minutes = late[:, 0] / 60
    print(f"watched {rows[-1, 0] / 60:.1f} minutes, {int(rows[-1, 3])} steps")
    for name, column in (("memory, MiB", late[:, 1]), ("open handles", late[:, 2])):
        slope = np.polyfit(minutes, column, 1)[0]
        print(f"{name}: {column.min():.1f} to {column.max():.1f}, {slope:+.3f} a minute")
    speed = np.diff(late[:, 3]) / np.diff(late[:, 0])
    first, last = np.array_split(speed, 2)
    print(f"steps a second: {first.mean():.1f} in the first half, {last.mean():.1f} in the second")


if __name__ == "__main__":
    sys.exit(main())
