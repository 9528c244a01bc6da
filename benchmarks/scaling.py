"""Time and memory of a private step against batch size, length, image size, width and depth.

For each axis a net grows by doubling while all else is fixed. All sizes of plain, fused DP-SGD,
fused exact BAM and Opacus take turns in one process, round by round: processor time on one thread.
Memory is the peak of live tensors that the step allocates.

Exponents are local ones at the largest sizes. Of time, over the last two doublings, one for each
round: the median, with the least and the largest. A constant part (calls) still flattens a little.
Of memory, which is counted, p of a + c size^p through the last three sizes: log2 of the ratio of
the last two increments, in which a constant part (a temporary tensor of one layer) drops out.

    python benchmarks/scaling.py [--axes batch width] [--rounds 7] [--out FILE] [--again]

Writes results/scaling.json axis by axis, and in the end the table of docs/engine.md. The same
command resumes: an axis that was measured at the present commit of the sources is not measured
again. No noise on either side.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from nets import GPT2, NETS, Net
from step import SOURCES, commit, peak, seconds, write_between
from steps import step
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
KEYS = [
    ("plain", "sgd"), ("fused", "dp-sgd"), ("fused", "bam-exact"), ("opacus-hooks", "dp-sgd"),
    ("opacus-ghost", "dp-sgd"),
]  # fmt: skip
Row = dict[str, Any]
AXES = {
    "batch": (32, 64, 128, 256),
    "length": (1024, 2048, 4096, 8192),
    "side": (32, 64, 128, 256),
    "width": (64, 128, 256, 512),
    "depth": (16, 32, 64, 128),
}


def convolutions(width: int, depth: int) -> nn.Module:
    """Return ``depth`` convolutions of equal width with group norm, and a linear layer."""
    layers: list[nn.Module] = []
    for k in range(depth):
        fan = 3 if k == 0 else width
        layers += [nn.Conv2d(fan, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def net_of(axis: str, size: int) -> Net:
    """Return the net of one size.

    Images of 16x16, width 32, depth 4, batch 8 but for the axis; batch 2 along the side. One block
    of GPT-2 of width 64, one sequence.
    """
    if axis == "length":

        def tokens(n: int) -> tuple[Tensor, Tensor]:
            ids = torch.randint(256, (n, size + 1))
            return ids[:, :-1], ids[:, 1:]

        return Net(lambda: GPT2(width=64, depth=1, positions=size), 1, tokens)
    of = {"batch": 8, "side": 16, "width": 32, "depth": 4, axis: size}
    if axis == "side":
        of["batch"] = 2

    def images(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, of["side"], of["side"]), torch.arange(n) % 10

    return Net(lambda: convolutions(of["width"], of["depth"]), of["batch"], images)


def measured(axis: str, rounds: int) -> list[Row]:
    """Return the processor seconds of every round and the peak bytes, by size and engine."""
    runs = {}
    for size in AXES[axis]:
        name = f"{axis} {size}"
        NETS[name] = net_of(axis, size)
        for key in KEYS:
            run = runs[name, key] = step(*key, name, NETS[name].batch)
            run()
    times = [{each: seconds(run) for each, run in runs.items()} for _ in range(rounds)]
    return [
        {"axis": axis, "size": int(name.split()[1]), "engine": key[0], "method": key[1],
         "seconds": [round(t[name, key], 5) for t in times],
         "bytes": peak(key, name, NETS[name].batch)}
        for name, key in runs
    ]  # fmt: skip


def of_increments(values: list[float]) -> float:
    """Return p of a + c size^p through the last three values, each at twice the size before.

    Example:
        >>> of_increments([7.0, 103.0, 112.0, 148.0])
        2.0
    """
    return math.log2((values[-1] - values[-2]) / (values[-2] - values[-3]))


def of_ratios(rows: list[Row]) -> list[float]:
    """Return p of c size^p through the third last and the last value, of each round."""
    before, last = rows[-3]["seconds"], rows[-1]["seconds"]
    return [math.log2(b / a) / 2 for a, b in zip(before, last, strict=True)]


def cell(rows: list[Row]) -> str:
    """Return exponents and largest values of time and memory."""
    rows = sorted(rows, key=lambda r: r["size"])
    found, size = of_ratios(rows), [r["bytes"] for r in rows]
    spread = f"{statistics.median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"
    time = f"{spread} ({1e3 * statistics.median(rows[-1]['seconds']):.0f} ms)"
    return f"{time}; {of_increments(size):.2f} ({1e-6 * size[-1]:.0f} MB)"


def markdown(rows: list[Row]) -> str:
    """Return the table of exponents of time and memory, with the values at the largest size."""
    lines = [
        "| axis, sizes | " + " | ".join(f"{e} {m}" for e, m in KEYS) + " |",
        "|---" * (1 + len(KEYS)) + "|",
    ]
    for axis in dict.fromkeys(r["axis"] for r in rows):
        mine = [r for r in rows if r["axis"] == axis]
        cells = [cell([r for r in mine if (r["engine"], r["method"]) == key]) for key in KEYS]
        sizes = sorted({r["size"] for r in mine})
        lines.append(f"| {axis}, {sizes[0]} to {sizes[-1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=tuple(AXES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scaling.json")
    parser.add_argument("--again", action="store_true", help="also axes that are recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = json.loads(options.out.read_text()) if options.out.exists() else {}
    source = commit(*SOURCES)
    present = held.get("source") == source and not options.again
    rows: list[Row] = held["rows"] if present else []
    done = {r["axis"] for r in rows}
    for axis in [a for a in options.axes if a not in done]:
        rows += measured(axis, options.rounds)
        facts = {
            "command": "python benchmarks/scaling.py " + " ".join(sys.argv[1:]),
            "commit": commit(), "source": source, "torch": torch.__version__, "threads": 1,
            "clock": "cpu",
        }  # fmt: skip
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        print(f"{axis}: {time.process_time():.0f} processor seconds so far", flush=True)
    print(markdown(rows))
    write_between("scaling", markdown(rows))


if __name__ == "__main__":
    main()
