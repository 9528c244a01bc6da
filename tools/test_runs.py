"""Run ``make test`` several times, each in another order and with another hash seed.

    python tools/test_runs.py [--runs 10] [--first 1] [--out benchmarks/results/test_runs.json]

Appends a record of each run as it ends: commit, order, hash seed, what pytest said, elapsed and
processor seconds (of make and all its children). Ends with 1 if a run failed.
"""

from __future__ import annotations

import argparse
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


def one_run(seed: int) -> dict[str, Any]:
    """Run the tests in the order of ``seed``."""
    chosen = {"PYTHONHASHSEED": str(seed), "PYTEST_ADDOPTS": f"--randomly-seed={seed}"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        ["make", "test"],
        cwd=ROOT,
        env={**os.environ, **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = re.findall(r"^.*\b(?:passed|failed)\b.* in [\d.]+s.*$", done.stdout, flags=re.M)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                            text=True, check=True)  # fmt: skip
    return {
        "commit": commit.stdout.strip(),
        "seed": seed,
        "green": done.returncode == 0,
        "said": said[-1].strip("= ") if said else done.stderr[-200:],
        "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M),
        "elapsed_seconds": round(time.monotonic() - begun, 1),
        "processor_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
    }


def main() -> int:
    """Run, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="the seed of the first run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/test_runs.json")
    arguments = parser.parse_args()
    records = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for k in range(len(records), arguments.runs):
        records.append(one_run(arguments.first + k))
        print(*(f"{key} {value}" for key, value in records[-1].items()), sep="  ", flush=True)
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    return int(not all(record["green"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
