"""Run each test file by itself: in several random orders, and twice in one process.

    python tools/test_files.py [PATH...] [--orders 2] [--minutes M] [--changed] [--slow] [--fresh]

Each run is a process of its own, forked from one that has imported torch, pytest and dpbam, has run
no test and has one thread: it costs the tests alone, and ends with what they left behind. Where the
fork is red the file runs in a fresh interpreter, which decides, since a file may need one (threads,
modules that must not be imported yet); the record then has the fork's words, too.

One line per file in ``benchmarks/results/test_files.json``, written as the file is finished: its
commit, and of each run the order, what pytest said and what it took. A later record of the same
file takes its place, with orders not tried before. Files without a record come first, then those
that were red, those that changed since their record, then the oldest records; those of this commit
not at all. ``--changed`` ends before the oldest, ``--fresh`` does all. It can be interrupted and
started again. The exit code is 1 if one of these files is red.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from test_runs import ROOT, adopt_orphans, spent, wait_for_orphans

_PRELOAD = (
    "pytest", "scipy.stats", "torch._dynamo", "torch.func", "dp_accounting",
    "dpbam.app.cli.train", "dpbam.app.compare.comparison", "dpbam.app.search.search",
    "dpbam.loading", "dpbam.app.runs.build", "dpbam.app.runs.checkpoint",
)  # fmt: skip
#: Of a run; Python draws the hash seed at its start, so that all forks share the server's.
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONHASHSEED": "0"}
_CODE = ("src", "tests", "reproduce", "docs", "tools", "conftest.py", "pyproject.toml")
_NO_TESTS = 5  # pytest's status if all tests of a file are slow, and none is to run
_FOREVER = 1800.0  # seconds, after which a run is killed and red


def warm_up(modules: list[str]) -> None:
    """Import what the tests import; refuse to fork if that has started a thread."""
    for name in modules:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"{threads} threads after the imports: a fork would have one of them only")
    # collected objects would be copied page by page in each child
    gc.collect()
    gc.freeze()


def run_forked(arguments: list[str]) -> dict[str, Any]:
    """Run pytest in a fork of this process."""
    with tempfile.TemporaryFile() as output:
        before, begun = spent(), time.monotonic()
        child = os.fork()
        if child == 0:
            _be_pytest(arguments, output.fileno())
        status = _wait(child)
        elapsed = time.monotonic() - begun
        wait_for_orphans()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return describe_run(os.waitstatus_to_exitcode(status), text, elapsed, spent() - before)


def _be_pytest(arguments: list[str], output: int) -> None:
    """Run pytest in this process and end it, as the interpreter does at its end."""
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest takes the script's place, as under python -m pytest: on the path, and as the main
        # module, which processes that a test spawns import again
        sys.path[0] = str(ROOT)
        spec = importlib.util.find_spec("pytest.__main__")
        main = sys.modules["__main__"]
        main.__spec__, main.__file__ = spec, spec.origin if spec else None
        sys.argv = ["pytest", *arguments]
        code = int(importlib.import_module("pytest").main(arguments))
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """Wait for the process; end it if it takes for ever."""
    end = time.monotonic() + _FOREVER
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def run_fresh(arguments: list[str]) -> dict[str, Any]:
    """Run pytest in a new interpreter."""
    before, begun = spent(), time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    elapsed = time.monotonic() - begun
    wait_for_orphans()
    return describe_run(ended.returncode, ended.stdout, elapsed, spent() - before)


def describe_run(code: int, text: str, elapsed: float, processor: float) -> dict[str, Any]:
    """Return what pytest said, and what it took; of a red run, the tests that failed."""
    summaries = re.findall(
        r"^.*\b(?:passed|failed|deselected|skipped|errors?)\b.* in [\d.]+s.*$", text, re.M
    )
    run = {
        "green": code in (0, _NO_TESTS),
        "said": summaries[-1].strip("= ") if summaries else f"exit code {code}: {text[-200:]}",
        "elapsed_seconds": round(elapsed, 1),
        "processor_seconds": round(processor, 1),
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.M)
    return {**run, "failed": failed} if failed else run


def one_run(how: str, arguments: list[str]) -> dict[str, Any]:
    """Run in a fork; where that is red, a fresh interpreter decides."""
    forked = run_forked(arguments)
    if forked["green"]:
        return {"how": how, "process": "fork", **forked}
    fresh = {"how": how, "process": "fresh", **run_fresh(arguments)}
    return {**fresh, "in_a_fork": [forked["said"], *forked.get("failed", [])]}


def one_file(file: str, seeds: range, commit: str, *, slow: bool) -> dict[str, Any]:
    """Run one file by itself: in the order of each seed, and twice in one process."""
    common = ["-q", "-p", "no:cacheprovider", *([] if slow else ["-m", "not slow"])]
    runs = [one_run(f"order {seed}", [*common, f"--randomly-seed={seed}", file]) for seed in seeds]
    # each copy has its module's fixtures anew, and shares the imported module and the process
    copies = ["-p", "no:randomly", "--keep-duplicates", file, file]
    runs.append(one_run("twice in one process", [*common, *copies]))
    return {
        "file": file,
        "green": all(run["green"] for run in runs),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "tests": "all" if slow else "not slow",
        "last_seed": seeds[-1],
        "runs": runs,
    }


def list_files(paths: list[Path]) -> list[str]:
    """Return the test files among and below the paths, relative to the repository if inside."""
    files: set[Path] = set()
    for path in (path.resolve() for path in paths):
        files |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    return sorted(str(f.relative_to(ROOT) if f.is_relative_to(ROOT) else f) for f in files)


def git(*arguments: str) -> str:
    """Return what git prints; nothing where it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def current_commit() -> str:
    """Return the commit of the code, with a mark if files differ from it."""
    mark = "-dirty" if git("status", "--porcelain", "--", *_CODE) else ""
    return git("rev-parse", "--short=9", "HEAD").strip() + mark


def order_files(
    files: list[str], records: dict[str, Any], commit: str, *, changed: bool, fresh: bool
) -> list[str]:
    """Return the files to run: without a record, red, changed since, then the oldest."""
    recorded = {record["commit"] for record in records.values()}
    differing = {  # a commit that is gone has no difference to show: all its files are old
        old: set(git("diff", "--name-only", old, "--", "tests").split()) for old in recorded
    }

    def rank(file: str) -> tuple[int, str]:
        if file not in records:
            return 0, ""
        record = records[file]
        stale = file in differing[record["commit"]] or "-dirty" in record["commit"]
        return (1 if not record["green"] else 2 if stale else 3), record["date"]

    wanted = [
        file
        for file in files
        if fresh
        or (rank(file)[0] < 3 if changed else records.get(file, {}).get("commit") != commit)
    ]
    return sorted(wanted, key=rank)


def write_records(out: Path, records: dict[str, Any]) -> None:
    """Write one line per file."""
    lines = ",\n".join(json.dumps(records[file]) for file in sorted(records))
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def run_files(arguments: argparse.Namespace) -> int:
    """Run the files, keep each result, print what is red."""
    out, commit = arguments.out, current_commit()
    records = {r["file"]: r for r in json.loads(out.read_text())} if out.exists() else {}
    files = list_files(arguments.paths)
    if ROOT / "tests" in arguments.paths:  # of all files: forget those that are gone
        records = {file: record for file, record in records.items() if file in files}
    todo = order_files(files, records, commit, changed=arguments.changed, fresh=arguments.fresh)
    end, red = time.monotonic() + 60 * arguments.minutes, []
    for number, file in enumerate(todo, 1):
        if time.monotonic() > end:
            break
        first = 1 + records.get(file, {}).get("last_seed", 0)
        seeds = range(first, first + arguments.orders)
        records[file] = one_file(file, seeds, commit, slow=arguments.slow)
        red += [] if records[file]["green"] else [file]
        for run in records[file]["runs"]:
            print(f"{number}/{len(todo)}", file, *run.values(), sep="  ", flush=True)
        write_records(out, records)
    asked = [records[file] for file in files if file in records]
    runs = [run for record in asked for run in record["runs"]]
    forks = sum(run["process"] == "fork" for run in runs)
    print(
        f"{sum(record['green'] for record in asked)} of {len(files)} files green, {forks} of "
        f"{len(runs)} runs in a fork, {sum(run['processor_seconds'] for run in runs):.0f} s of "
        f"processor time; red now: {red or 'none'}"
    )
    return int(bool(red))


def main() -> int:
    """Start the server with the runs' environment, and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", default=[ROOT / "tests"])
    parser.add_argument("--orders", type=int, default=2, help="of each file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no file later")
    parser.add_argument("--changed", action="store_true", help="no files with older records only")
    parser.add_argument("--slow", action="store_true", help="of each file also the slow tests")
    parser.add_argument("--fresh", action="store_true", help="also files recorded at this commit")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/test_files.json", help="the records"
    )
    parser.add_argument("--preload", nargs="*", default=_PRELOAD, help="modules that forks share")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _VARIABLES.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_VARIABLES})
    os.chdir(ROOT)
    if not adopt_orphans():
        sys.exit("this needs Linux: elsewhere the processes of a test are lost")
    warm_up(arguments.preload)
    return run_files(arguments)


if __name__ == "__main__":
    sys.exit(main())
