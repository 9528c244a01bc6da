#!/usr/bin/env python3
"""Run the core tests against the oldest and newest versions that pyproject.toml admits.

Each set of versions gets an environment of its own, thrown away unless ``--environments`` names a
folder to keep it in. The newest torch from the registry brings gigabytes of CUDA, so this is no
part of continuous integration; its last results are kept in ``benchmarks/results/versions.json``,
each with what was installed, run and skipped. A set that cannot be installed is recorded as such.

    tools/check_versions.py oldest newest
    tools/check_versions.py oldest-around --tests tests/interop
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
WATCHED = ("torch", "transformers", "lightning", "opacus")
CORE = ("tests/engines", "tests/test_oracle.py", "tests/test_oracle_guards.py",
        "tests/test_oracle_opacus.py", "tests/nn", "tests/interop")  # fmt: skip
EXTRAS = "opacus,lightning,transformers,secure"
TOOLS = ("pytest>=8", "hypothesis>=6.100", "expecttest>=0.2")
# The lower ends of the ranges in pyproject.toml; a test holds the two together.
OLDEST = {"torch": "2.8.*", "transformers": "5.6.*", "lightning": "2.4.*", "opacus": "1.5.*"}
SETS: dict[str, list[str]] = {
    "oldest": [f"{name}=={version}" for name, version in OLDEST.items()],
    "newest": [],
    "oldest-around": [
        "torch==2.13.*",
        *(f"{name}=={version}" for name, version in OLDEST.items() if name != "torch"),
    ],
}


def main() -> int:
    """Check each set that was asked for; 1 if a test failed in any of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sets", nargs="+", choices=SETS)
    parser.add_argument("--tests", nargs="+", default=list(CORE), help="instead of the core tests")
    parser.add_argument("--environments", type=Path, help="keep, and use again, what is in here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = asked.environments or Path(thrown_away)
        results = {name: _check(folder / name, SETS[name], asked.tests) for name in asked.sets}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, **results}, indent=2) + "\n")
    return int(any(r["exit_code"] for r in results.values()))


def _check(folder: Path, pins: list[str], tests: list[str]) -> dict[str, object]:
    """Install, run the tests, and return the versions, the counts and the names of failures."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[{EXTRAS}]"]
    found: dict[str, object] = {"date": datetime.date.today().isoformat(), "tests": tests}
    if code := subprocess.run([*install, *TOOLS, *pins], check=False).returncode:
        return {**found, "exit_code": code, "not_installed": pins or ["the newest versions"]}
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    ended = subprocess.run(
        [python, "-m", "pytest", "-m", "not slow", "-q", "-p", "no:cacheprovider",
         f"--junit-xml={report}", *tests],
        cwd=ROOT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found["versions"] = {"python": sys.version.split()[0], **_versions(python)}
    return {**found, "exit_code": ended.returncode, **_counts(report)}


def _versions(python: Path) -> dict[str, str]:
    code = f"from importlib.metadata import version as v\nprint(*(v(n) for n in {WATCHED!r}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(WATCHED, done.stdout.split(), strict=True))


def _counts(report: Path) -> dict[str, object]:
    """Passed tests of a JUnit file, those skipped by reason, and the names of those that failed."""
    if not report.exists():
        return {"passed": 0, "skipped": {}, "failed": ["the tests did not run"]}
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [found.get("message", "") for c in cases if (found := c.find("skipped")) is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": dict(Counter(skipped)),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in failed],
    }


if __name__ == "__main__":
    sys.exit(main())
