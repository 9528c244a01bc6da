"""The fused engine against that of another checkout, step by step in turns in one process.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--nets resnet9-64 wrn-16-4] [--repeats 5]

Processor time, one thread. Printed and written to results/against.json: the median over the turns
of (this checkout / the other), and of each as a multiple of the non-private step of the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).resolve().parent


def steps_of(checkout: Path) -> ModuleType:
    """The module ``steps`` of this folder, with the package ``dpbam`` of a checkout."""
    ours = ("dpbam", "steps", "nets")
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:0] = [str(checkout / "src"), str(HERE)]
    try:
        import steps

        import dpbam
    finally:
        del sys.path[:2]
    assert Path(dpbam.__file__).is_relative_to(checkout), dpbam.__file__
    return steps


def seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def compare(now: ModuleType, before: ModuleType, net: str, method: str, repeats: int) -> Any:
    rows = now.NETS[net].batch
    runs = [
        before.step("fused", method, net, rows),
        now.step("fused", method, net, rows),
        now.step("plain", method, net, rows),
    ]
    for run in runs:
        run()
    turns = [[seconds(run) for run in runs] for _ in range(repeats)]
    median = statistics.median
    return {
        "net": net, "method": method, "turns": repeats,
        "now_to_before": round(median(b / a for a, b, _ in turns), 3),
        "before": round(median(a / c for a, _, c in turns), 3),
        "now": round(median(b / c for _, b, c in turns), 3),
    }  # fmt: skip


def commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--nets", nargs="+", default=["resnet9-64", "wrn-16-4"])
    parser.add_argument("--methods", nargs="+", default=["dp-sgd", "bam", "bam-exact"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "against.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    other = arguments.checkout.resolve()
    before, now = steps_of(other), steps_of(HERE.parent)
    rows = []
    for net in arguments.nets:
        for method in arguments.methods:
            rows.append(compare(now, before, net, method, arguments.repeats))
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ", flush=True)
    found = {"before": commit(other), "now": commit(HERE.parent), "torch": torch.__version__}
    arguments.out.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
