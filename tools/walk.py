"""List what one private step passes through: ``python tools/walk.py [--net conv] [--functions]``.

The second step of DP-SGD is traced, on the engine that the library chooses: the files of the
library that it enters, how many of their functions run, and how often they are called. With
``--functions``, the functions too, in the order of their first call.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from dpbam import DPSGD, PrivacyPlan, PrivateGradientOracle

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "src" / "dpbam"
ROWS = 32
NETS = {
    "mlp": ((32,), lambda: [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)]),
    "conv": (
        (3, 8, 8),
        lambda: [
            nn.Conv2d(3, 8, 3),
            nn.GroupNorm(4, 8),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(10),
        ],
    ),
}


def trace_step(net: str) -> Counter[tuple[str, str]]:
    """Return how often each function of the library is called in a step, by file and name."""
    torch.manual_seed(0)
    shape, layers = NETS[net]
    inputs, targets = torch.randn(2 * ROWS, *shape), torch.randint(10, (2 * ROWS,))
    model = nn.Sequential(*layers())
    model(inputs[:1])  # gives a lazy layer its shape
    plan = PrivacyPlan(n=2 * ROWS, batch_size=ROWS, steps=3, noise_multiplier=1.0, delta=1e-5)
    loss = nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(model, loss, plan, method=DPSGD(), seed=0)
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(LIBRARY)):
            calls[(frame.f_code.co_filename, frame.f_code.co_qualname)] += 1

    batches = oracle.batches((inputs, targets))
    oracle.backward(*next(batches))
    batch = next(batches)
    threading.setprofile(count)
    sys.setprofile(count)
    oracle.backward(*batch)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def main() -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=sorted(NETS), default="conv")
    parser.add_argument("--functions", action="store_true", help="list the functions too")
    arguments = parser.parse_args()
    calls = trace_step(arguments.net)
    functions = Counter(file for file, _ in calls)
    for file, count in sorted(functions.items()):
        called = sum(number for (other, _), number in calls.items() if other == file)
        print(f"{count:5d} functions {called:6d} calls  {Path(file).relative_to(LIBRARY)}")
        if arguments.functions:
            print(*(f"        {name}" for other, name in calls if other == file), sep="\n")
    print(f"{len(functions)} files, {len(calls)} functions, {sum(calls.values())} calls")


if __name__ == "__main__":
    main()
