"""Fuzz every reader of files with mutated valid ones, and keep the figures.

    python benchmarks/fuzz.py --inputs 104000
    python benchmarks/fuzz.py --inputs 1000 --only ledger       (more inputs of one reader)
    python benchmarks/fuzz.py --inputs 13000 --coverage         (slower: measures branches)
    python benchmarks/fuzz.py --inputs 20000 --atheris          (needs: pip install atheris)

Figures add up in ``results/fuzz.json``, reader by reader, so a run that was stopped loses only the
reader that it was at; ``--fresh`` starts anew. No two runs try the same inputs. A traceback that is
not a sentence for the user is a bug: its input is kept in --keep. So is an input that makes the
reader take more than --memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import coverage

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "fuzz"), str(TESTS)]
RESULTS = Path(__file__).with_name("results") / "fuzz.json"
MODULES = ["app/runs/config", "app/runs/toml", "app/runs/files", "app/runs/checkpoint",
           "app/runs/budget", "app/runs/model_file", "app/audit/check", "app/report/records",
           "privacy/ledger", "data/cifar", "data/npz", "data/folder", "data/decode",
           "data/arrays"]  # fmt: skip
FOLDER_SHARE = 0.05  # inputs of a reader of whole run folders, relative to those of a single file
KINDS = ("read", "refused", "tracebacks")


def main() -> int:
    options = _options()
    measured = _coverage()
    if options.coverage:
        measured.start()
    with _instrumented(options.atheris):
        from folders import FOLDERS  # imported here: what runs at import is covered too
        from parsers import PARSERS

    warnings.simplefilter("ignore")
    if options.fresh:
        RESULTS.unlink(missing_ok=True)
    readers = {name: (lambda p=p: p) for name, p in PARSERS.items()} | FOLDERS
    names = [n for n in readers if options.only in ("", n)]
    weights = [FOLDER_SHARE if n in FOLDERS else 1.0 for n in names]
    bugs = 0
    for name, weight in zip(names, weights, strict=True):
        share = math.ceil(options.inputs * weight / sum(weights))
        bugs += _fuzzed(name, readers[name](), share, options)
    if options.coverage:
        measured.stop()
        _keep("coverage", _branches(measured, options.inputs))
    _show()
    return 1 if bugs else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=104_000, help="over all readers")
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--coverage", action="store_true", help="slower: measure branches")
    parser.add_argument("--only", default="", help="one reader's name")
    parser.add_argument("--fresh", action="store_true", help="forget the figures so far")
    parser.add_argument("--memory", type=int, default=1024, help="MiB that a reader may take")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    return parser.parse_args()


def _fuzzed(name: str, parser: Any, inputs: int, options: argparse.Namespace) -> int:
    """Try so many inputs on one reader, add them to the figures; how many were bugs."""
    kind = "atheris" if options.atheris else "mutated"
    before = _kept().get(kind, {}).get(name, {})
    began, peak = sum(os.times()[:4]), _peak()
    run = _atheris if options.atheris else _random
    found = run(parser, inputs, before.get("inputs", 0), options)
    total = {k: before.get(k, 0) + found[k] for k in KINDS}
    total["inputs"] = sum(total.values())
    total["processor seconds"] = round(
        before.get("processor seconds", 0) + sum(os.times()[:4]) - began, 1
    )
    total["memory, MiB"] = max(before.get("memory, MiB", 0), _peak() - peak)
    _keep(kind, {**_kept().get(kind, {}), name: total})
    print(f"{name:14} {total}", flush=True)
    return found["tracebacks"]


def _random(parser: Any, inputs: int, seed: int, options: argparse.Namespace) -> Counter[str]:
    from mutation import KINDS, Mutation, mutate

    rng, found = random.Random(f"{parser.filename} {seed}"), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(inputs):
            changes = [
                Mutation(rng.randrange(KINDS), rng.getrandbits(32), rng.getrandbits(32))
                for _ in range(rng.choice((1, 1, 1, 2, 3, 5)))
            ]
            content = mutate(rng.choice(parser.valid), changes)
            found[_try(parser, content, Path(folder), options)] += 1
    return found


def _try(parser: Any, content: bytes, folder: Path, options: argparse.Namespace) -> str:
    before = _peak()
    try:
        result = "read" if parser.try_on(content, folder) == "read" else "refused"
        if _peak() - before > options.memory:
            raise MemoryError(f"took {_peak() - before} MiB")
    except Exception:
        options.keep.mkdir(exist_ok=True)
        path = options.keep / f"{parser.filename.replace('/', '-')}-{abs(hash(content)):x}"
        path.write_bytes(content)
        traceback.print_exc(limit=-3)
        return "tracebacks"
    return result


def _peak() -> int:
    """The most memory that the process has held so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _atheris(parser: Any, inputs: int, seed: int, options: argparse.Namespace) -> Counter[str]:
    """Coverage-guided, in a process of its own, since libFuzzer ends its process."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    counts = context.Array("q", 3)
    process = context.Process(target=_fuzz, args=(parser, inputs, seed, options, counts))
    process.start()
    process.join()
    return Counter(dict(zip(KINDS, counts, strict=True)))


def _instrumented(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Inside, modules of dpbam are imported such that atheris sees their branches."""
    if not wanted:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=["dpbam"])


def _fuzz(parser: Any, inputs: int, seed: int, options: argparse.Namespace, counts: Any) -> None:
    import atheris

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as corpus:
        for k, content in enumerate(parser.valid):
            (Path(corpus) / str(k)).write_bytes(content)

        def one(content: bytes) -> None:
            counts[KINDS.index(_try(parser, content, Path(folder), options))] += 1

        limits = [
            f"-runs={inputs}",
            f"-seed={seed + 1}",
            "-verbosity=0",
            "-rss_limit_mb=2048",
            "-max_len=65536",
        ]
        atheris.Setup([sys.argv[0], *limits, corpus], one)
        atheris.Fuzz()


def _coverage() -> coverage.Coverage:
    import dpbam

    sources = [f"{Path(dpbam.__file__).parent}/{m}.py" for m in MODULES]
    return coverage.Coverage(branch=True, include=sources, data_file=None, config_file=False)


def _branches(measured: coverage.Coverage, inputs: int) -> dict[str, Any]:
    """Branches taken of those there are, by module; what is never taken is listed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        measured.json_report(outfile=str(path))
        files = json.loads(path.read_text())["files"]
    rows = {}
    for name, facts in sorted(files.items()):
        s = facts["summary"]
        rows[name.partition("dpbam/")[2]] = {
            "branches": s["num_branches"], "taken": s["covered_branches"],
            "lines": s["num_statements"], "run": s["covered_lines"],
            "lines not run": facts["missing_lines"],
        }  # fmt: skip
    return {"inputs": inputs, "modules": rows}


def _kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _keep(name: str, values: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps({**_kept(), name: values}, indent=1) + "\n")


def _show() -> None:
    kept = _kept()
    for kind in ("mutated", "atheris"):
        rows = kept.get(kind, {}).values()
        sums = {k: sum(row[k] for row in rows) for k in ("inputs", *KINDS)}
        print(f"{kind}: {sums}")
    modules = kept.get("coverage", {}).get("modules", {}).values()
    taken, branches = (sum(row[k] for row in modules) for k in ("taken", "branches"))
    print(f"branches of the readers: {taken} of {branches} taken")


if __name__ == "__main__":
    sys.exit(main())
