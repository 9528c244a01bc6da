"""Run ``make test`` several times more, in other orders.

    python tools/test_runs.py [--runs 10] [--first SEED] [--target test-all] [--out FILE]

It appends a record of each run as it ends, to ``benchmarks/results/test_runs.json``: commit, order,
hash seed, make's target, whether it began with an installation, what pytest said, elapsed and
processor seconds, and last prints what all runs of this commit took. Processor seconds
are of make and everything it started: on Linux also of fork servers and browsers, which their
parents do not wait for (the field ``counts``).

The exit code is 1 if one of these runs failed. ``tools/test_files.py`` runs each file by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ERRORS = 20  # lines of pytest about failures that are kept
_PATIENCE = 120.0  # seconds for processes to end that outlive make


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends, as init would; Linux only."""
    if not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def wait_for_orphans() -> None:
    """Wait for all children: the kernel counts the time of those alone that were waited for."""
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        print(f"a process still runs {_PATIENCE:.0f} s after make: not counted", file=sys.stderr)


def spent() -> float:
    """Processor seconds, user and system, of the children that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_command(command: list[str], **variables: str) -> dict[str, Any]:
    """Run the tests by this command; return what it said and what it took."""
    before, begun = spent(), time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    elapsed = time.monotonic() - begun
    wait_for_orphans()
    said = re.findall(r"^.*\b(?:passed|failed|errors?)\b.* in [\d.]+s.*$", done.stdout, re.M)
    return {
        "green": done.returncode == 0,
        "said": said[-1].strip("= ") if said else (done.stdout + done.stderr)[-200:],
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M),
        "errors": re.findall(r"^E  +(.+)", done.stdout, flags=re.M)[:_ERRORS],
        "elapsed_seconds": round(elapsed, 1),
        "processor_seconds": round(spent() - before, 1),
    }


def one_run(seed: int, commit: str, target: str, *, adopts: bool) -> dict[str, Any]:
    """Run all tests of a target of make in the order of ``seed``."""
    installs = not (ROOT / ".venv/installed-dev").exists()
    order = {"PYTHONHASHSEED": str(seed), "PYTEST_ADDOPTS": f"--randomly-seed={seed}"}
    counts = "all processes" if adopts else "processes that were waited for"
    return {
        "commit": commit,
        "seed": seed,
        "target": target,
        "installs": installs,
        **run_command(["make", target], **order),
        "counts": counts,
    }


def summary(records: list[dict[str, Any]], commit: str, target: str) -> str:
    """What the runs of one commit took."""
    of_target = [record for record in records if record.get("target", "test") == target]
    own = [record for record in of_target if record["commit"] == commit]
    green = sum(record["green"] for record in own)
    elapsed, processor = (
        max(record[f"{kind}_seconds"] for record in own) for kind in ("elapsed", "processor")
    )
    return (
        f"{commit}: {green} of {len(own)} runs green; "
        f"at most {elapsed:.1f} s elapsed, {processor:.1f} s of processor time"
    )


def run_all(arguments: argparse.Namespace, commit: str, *, adopts: bool) -> int:
    """Run ``make test`` as often as asked for; keep each result."""
    out = arguments.out or ROOT / "benchmarks/results/test_runs.json"
    records = json.loads(out.read_text()) if out.exists() else []
    first = arguments.first or 1 + max((record["seed"] for record in records), default=0)
    new: list[dict[str, Any]] = []
    for seed in range(first, first + arguments.runs):
        new.append(one_run(seed, commit, arguments.target, adopts=adopts))
        print(*(f"{key} {value}" for key, value in new[-1].items()), sep="  ", flush=True)
        out.write_text(json.dumps([*records, *new], indent=1) + "\n")
    if new:
        print(summary([*records, *new], commit, arguments.target))
    return int(not all(record["green"] for record in new))


def main() -> int:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="how many more")
    parser.add_argument("--first", type=int, help="the seed of the first; else one not yet used")
    parser.add_argument("--target", default="test", help="of make; the slow tests too: test-all")
    parser.add_argument("--out", type=Path, help="where records are kept")
    arguments = parser.parse_args()
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    adopts = adopt_orphans()
    return run_all(arguments, commit.strip(), adopts=adopts)


if __name__ == "__main__":
    sys.exit(main())
