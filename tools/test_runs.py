"""Run ``make test`` several times more, or each test file by itself, in other orders.

    python tools/test_runs.py [--runs 10] [--first SEED] [--out benchmarks/results/test_runs.json]
    python tools/test_runs.py --files [PATH...] [--orders 2] [--minutes M] [--slow] [--fresh]

The first appends a record of each run as it ends: commit, order, hash seed, what pytest said,
elapsed and processor seconds, and last prints what all runs of this commit took. Processor seconds
are of make and everything it started: on Linux also of fork servers and browsers, which their
parents do not wait for (the field ``counts``).

The second runs each test file in processes of its own: in as many random orders as asked for, and
twice in one process. One record per file (``benchmarks/results/test_files.json``), written as the
file is finished; a later record of the same file takes its place, with orders not tried before. It
can be interrupted and started again: files without a record come first, then the oldest records,
those of this commit not at all. ``--fresh`` does these, too.

Both end with 1 if one of these runs failed.
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
_PATIENCE = 120.0  # seconds for processes to end that outlive make
_NO_TESTS = 5  # pytest's status if all tests of a file are slow, and none is to run


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
    said = re.findall(
        r"^.*\b(?:passed|failed|deselected|errors?)\b.* in [\d.]+s.*$", done.stdout, re.M
    )
    return {
        "green": done.returncode in (0, _NO_TESTS),
        "said": said[-1].strip("= ") if said else (done.stdout + done.stderr)[-200:],
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M),
        "elapsed_seconds": round(elapsed, 1),
        "processor_seconds": round(spent() - before, 1),
    }


def one_run(seed: int, commit: str, *, adopts: bool) -> dict[str, Any]:
    """Run all tests in the order of ``seed``."""
    order = {"PYTHONHASHSEED": str(seed), "PYTEST_ADDOPTS": f"--randomly-seed={seed}"}
    counts = "all processes" if adopts else "processes that were waited for"
    return {
        "commit": commit,
        "seed": seed,
        **run_command(["make", "test"], **order),
        "counts": counts,
    }


def one_file(file: str, seeds: range, commit: str, *, slow: bool) -> dict[str, Any]:
    """Run one file by itself: in the order of each seed, and twice in one process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [] if slow else ["-m", "not slow"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    runs = [
        {"how": f"order {seed}"}
        | run_command(
            [*command, f"--randomly-seed={seed}", file], PYTHONHASHSEED=str(seed), **variables
        )
        for seed in seeds
    ]
    # each copy has its module's fixtures anew, and shares the imported module and the process
    twice = run_command(
        [*command, "-p", "no:randomly", "--keep-duplicates", file, file], **variables
    )
    runs.append({"how": "twice in one process", **twice})
    return {
        "file": file,
        "green": all(run["green"] for run in runs),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "tests": "all" if slow else "not slow",
        "last_seed": seeds[-1],
        "runs": runs,
    }


def list_files(paths: list[str]) -> list[str]:
    """Return the test files among and below the paths, relative to the repository."""
    files = set()
    for path in ((ROOT / name).resolve() for name in paths):
        files |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    return sorted(str(file.relative_to(ROOT)) for file in files)


def run_files(arguments: argparse.Namespace, commit: str) -> int:
    """Run the files that have no record of this commit, the oldest first; keep each result."""
    out = arguments.out or ROOT / "benchmarks/results/test_files.json"
    records = json.loads(out.read_text()) if out.exists() else []
    known = {record["file"]: record for record in records}
    todo = [
        file
        for file in list_files(arguments.files or ["tests"])
        if arguments.fresh or known.get(file, {}).get("commit") != commit
    ]
    todo.sort(key=lambda file: known.get(file, {}).get("date", ""))
    end = time.monotonic() + 60 * arguments.minutes
    failed = []
    for file in todo:
        if time.monotonic() > end:
            break
        first = 1 + known.get(file, {}).get("last_seed", 0)
        seeds = range(first, first + arguments.orders)
        known[file] = one_file(file, seeds, commit, slow=arguments.slow)
        failed += [] if known[file]["green"] else [file]
        for run in known[file]["runs"]:
            print(file, *(f"{key} {value}" for key, value in run.items()), sep="  ", flush=True)
        out.write_text(json.dumps([known[name] for name in sorted(known)], indent=1) + "\n")
    green = sum(record["green"] for record in known.values())
    print(f"{green} of {len(known)} files with a record are green; red now: {failed or 'none'}")
    return int(bool(failed))


def summary(records: list[dict[str, Any]], commit: str) -> str:
    """What the runs of one commit took."""
    own = [record for record in records if record["commit"] == commit]
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
        new.append(one_run(seed, commit, adopts=adopts))
        print(*(f"{key} {value}" for key, value in new[-1].items()), sep="  ", flush=True)
        out.write_text(json.dumps([*records, *new], indent=1) + "\n")
    if new:
        print(summary([*records, *new], commit))
    return int(not all(record["green"] for record in new))


def main() -> int:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="how many more")
    parser.add_argument("--first", type=int, help="the seed of the first; else one not yet used")
    parser.add_argument("--out", type=Path, help="where records are kept")
    parser.add_argument("--files", nargs="*", metavar="PATH", help="each test file by itself")
    parser.add_argument("--orders", type=int, default=2, help="of each file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no file later")
    parser.add_argument("--slow", action="store_true", help="of each file also the slow tests")
    parser.add_argument("--fresh", action="store_true", help="also files recorded at this commit")
    arguments = parser.parse_args()
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    adopts = adopt_orphans()
    if arguments.files is not None:
        return run_files(arguments, commit.strip())
    return run_all(arguments, commit.strip(), adopts=adopts)


if __name__ == "__main__":
    sys.exit(main())
