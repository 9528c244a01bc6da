"""Private steps of the fused engine against those of another checkout, in turns in one process.

    git worktree add ../before COMMIT
    python benchmarks/against.py ../before [--nets resnet9-64 wrn-16-4] [--repeats 5]

Processor time, one thread, whole steps with noise. Printed and written to results/against.json: the
median over the turns of (this checkout / the other), and of each as a multiple of the non-private
step of the same turn.
"""

from __future__ import annotations

import argparse
import importlib
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


_SWAPPED = ("dpbam", "steps", "nets")


class Checkout:
    """The module ``steps`` of this folder with the package ``dpbam`` of a checkout.

    Both checkouts live in one process: :meth:`use` makes its modules those that an ``import``
    inside a function gets.
    """

    def __init__(self, root: Path) -> None:
        self._modules: dict[str, ModuleType] = {}
        self.use()
        sys.path[:0] = [str(root / "src"), str(HERE)]
        try:
            self.steps = importlib.import_module("steps")
            package = importlib.import_module("dpbam")
        finally:
            del sys.path[:2]
        assert Path(package.__file__ or "").is_relative_to(root), package.__file__
        self._modules = _loaded()

    def use(self) -> None:
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(self._modules)

    def prepare(self, method: str, net: str, rows: int) -> Callable[[], object]:
        """Return a whole private step, with noise, after two calls."""
        self.use()
        run = self.steps.private_step("fused", method, net, rows)
        run()
        self._modules = _loaded()  # with those that were imported at first use
        return run


def _loaded() -> dict[str, ModuleType]:
    return {k: m for k, m in sys.modules.items() if k.split(".")[0] in _SWAPPED}


def seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def compare(now: Checkout, before: Checkout, net: str, method: str, repeats: int) -> Any:
    rows = now.steps.NETS[net].batch
    runs = [(c, c.prepare(method, net, rows)) for c in (before, now)]
    runs.append((now, now.steps.step("plain", method, net, rows)))
    turns = []
    for _ in range(repeats):
        turn = []
        for checkout, run in runs:
            checkout.use()
            turn.append(seconds(run))
        turns.append(turn)
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
    before, now = Checkout(other), Checkout(HERE.parent)
    rows = []
    checkouts = {"before": commit(other), "now": commit(HERE.parent), "torch": torch.__version__}
    for net in arguments.nets:
        for method in arguments.methods:
            rows.append(compare(now, before, net, method, arguments.repeats))
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ", flush=True)
            # after every row: a long run on a shared machine may be ended before its last net
            arguments.out.write_text(json.dumps({**checkouts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
