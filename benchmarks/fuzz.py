"""Fuzz every reader of files with mutated valid ones, and report branch coverage.

    python benchmarks/fuzz.py --inputs 130000
    python benchmarks/fuzz.py --inputs 13000 --coverage
    python benchmarks/fuzz.py --atheris --inputs 20000     (pip install atheris)

A traceback that is not a sentence for the user is a bug: its input is kept in --keep.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import coverage

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "fuzz")]
MODULES = ["runs/config", "runs/toml", "runs/files", "ledger", "runs/checkpoint", "runs/budget",
           "runs/model_file", "data/pickles", "data/cifar", "data/npz", "data/labels_csv",
           "data/decode", "data/arrays"]  # fmt: skip


def main() -> int:
    options = _options()
    import dpbam

    sources = [f"{Path(dpbam.__file__).parent}/{m}.py" for m in MODULES]
    measured = coverage.Coverage(branch=True, include=sources, data_file=None)
    if options.coverage:
        measured.start()
    from parsers import PARSERS  # imported here: what runs at import is covered too

    warnings.simplefilter("ignore")
    began, bugs, seen = time.monotonic(), 0, Counter()
    names = [n for n in PARSERS if options.only in ("", n)]
    for k, name in enumerate(names):
        share = options.inputs // len(names) + (k < options.inputs % len(names))
        run = _atheris if options.atheris else _random
        found = run(PARSERS[name], share, options)
        bugs += found.pop("BUG", 0)
        seen[name] = share
        print(f"{name:14} {share:7} inputs, {found['read']:6} read, "
              f"{sum(found.values()) - found['read']:6} refused", flush=True)  # fmt: skip
    print(f"{sum(seen.values())} inputs in {time.monotonic() - began:.0f} s, {bugs} tracebacks")
    if options.coverage:
        measured.stop()
        measured.report(show_missing=True)
    return 1 if bugs else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=120_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--coverage", action="store_true", help="slower: measure branches")
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    return parser.parse_args()


def _random(parser, inputs: int, options: argparse.Namespace) -> Counter:
    from mutation import KINDS, Mutation, mutate

    rng, found = random.Random(options.seed), Counter()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(inputs):
            changes = [
                Mutation(rng.randrange(KINDS), rng.getrandbits(32), rng.getrandbits(32))
                for _ in range(rng.choice((1, 1, 1, 2, 3, 5)))
            ]
            content = mutate(rng.choice(parser.valid), changes)
            found[_try(parser, content, Path(folder), options.keep)] += 1
    return found


def _try(parser, content: bytes, folder: Path, keep: Path) -> str:
    try:
        return "read" if parser.try_on(content, folder) == "read" else "refused"
    except Exception:
        keep.mkdir(exist_ok=True)
        path = keep / f"{parser.filename.replace('/', '-')}-{abs(hash(content)):x}"
        path.write_bytes(content)
        traceback.print_exc(limit=-3)
        return "BUG"


def _atheris(parser, inputs: int, options: argparse.Namespace) -> Counter:
    """Coverage-guided, in a process of its own, since libFuzzer ends its process."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    counts = context.Array("q", 3)
    process = context.Process(target=_fuzz, args=(parser, inputs, options, counts))
    process.start()
    process.join()
    return Counter(dict(zip(("read", "refused", "BUG"), counts, strict=True)))


def _fuzz(parser, inputs: int, options: argparse.Namespace, counts) -> None:
    import atheris

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as corpus:
        for k, content in enumerate(parser.valid):
            (Path(corpus) / str(k)).write_bytes(content)

        def one(content: bytes) -> None:
            result = _try(parser, content, Path(folder), options.keep)
            counts[("read", "refused", "BUG").index(result)] += 1

        atheris.instrument_func(parser.read)
        atheris.Setup(
            [sys.argv[0], f"-runs={inputs}", "-verbosity=0", "-rss_limit_mb=8192", corpus], one
        )
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
