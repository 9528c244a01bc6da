"""Time and memory of a private step against batch size, length, image size, width and depth.

For each axis a small net grows by doubling while all else is fixed. Fused DP-SGD, fused exact BAM
and Opacus take turns in one process: processor time on one thread, the least of the rounds; memory
is the peak of live tensors. Growth is fitted as c * size^p by least squares of the logarithms.

    python benchmarks/scaling.py [--axes batch width] [--rounds 5] [--out FILE]

Writes results/scaling.json size by size, and in the end the table of docs/engine.md. The same
command resumes; a size that is in the file is not measured again. No noise on either side.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nets import GPT2, NETS, Net
from step import commit, peak, seconds
from steps import step
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "engine.md"
START, END = "<!-- table: scaling -->", "<!-- end -->"
KEYS = [
    ("fused", "dp-sgd"), ("fused", "bam-exact"), ("opacus-hooks", "dp-sgd"),
    ("opacus-ghost", "dp-sgd"),
]  # fmt: skip
Row = dict[str, Any]
AXES = {
    "batch": (8, 16, 32, 64),
    "length": (64, 128, 256, 512),
    "side": (8, 16, 32, 64),
    "width": (16, 32, 64, 128),
    "depth": (2, 4, 8, 16),
}


def convolutions(width: int, depth: int) -> nn.Module:
    """Return ``depth`` convolutions of equal width with group norm, and a linear layer."""
    layers: list[nn.Module] = []
    for k in range(depth):
        fan = 3 if k == 0 else width
        layers += [nn.Conv2d(fan, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def net_of(axis: str, size: int) -> Net:
    """Return the net of one size: images of 16x16, width 32, depth 4, batch 8 but for the axis."""
    if axis == "length":

        def tokens(n: int) -> tuple[Tensor, Tensor]:
            ids = torch.randint(256, (n, size + 1))
            return ids[:, :-1], ids[:, 1:]

        return Net(lambda: GPT2(width=64, depth=1), 4, tokens)
    of = {"batch": 8, "side": 16, "width": 32, "depth": 4, axis: size}

    def images(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3, of["side"], of["side"]), torch.arange(n) % 10

    return Net(lambda: convolutions(of["width"], of["depth"]), of["batch"], images)


def measured(axis: str, size: int, rounds: int) -> list[Row]:
    """Return the least processor seconds and the peak bytes of each engine that runs the net."""
    name = f"{axis} {size}"
    NETS[name] = net_of(axis, size)
    runs = {}
    for key in KEYS:
        try:
            runs[key] = step(*key, name, NETS[name].batch)
            runs[key]()
        except Exception as error:
            print(f"  {name}: {key}: {type(error).__name__}: {str(error)[:90]}", flush=True)
            runs.pop(key, None)
    times = [{key: seconds(run) for key, run in runs.items()} for _ in range(rounds)]
    return [
        {"axis": axis, "size": size, "engine": key[0], "method": key[1],
         "seconds": round(min(t[key] for t in times), 5),
         "bytes": peak(key, name, NETS[name].batch)}
        for key in runs
    ]  # fmt: skip


def exponent(rows: list[Row], what: str) -> float:
    """Return p of c * size^p."""
    sizes, values = np.log([r["size"] for r in rows]), np.log([r[what] for r in rows])
    return float(np.polyfit(sizes, values, 1)[0])


def markdown(rows: list[Row]) -> str:
    """Return the table of exponents, time and memory, with the time at the largest size."""
    lines = [
        "| axis, sizes | " + " | ".join(f"{e} {m}" for e, m in KEYS) + " |",
        "|---" * (1 + len(KEYS)) + "|",
    ]
    for axis in dict.fromkeys(r["axis"] for r in rows):
        cells = []
        for key in KEYS:
            mine = [r for r in rows if (r["axis"], r["engine"], r["method"]) == (axis, *key)]
            found = [f"{exponent(mine, what):.2f}" for what in ("seconds", "bytes") if mine]
            last = f" ({1e3 * mine[-1]['seconds']:.0f} ms)" if mine else ""
            cells.append(", ".join(found) + last if mine else "-")
        sizes = sorted({r["size"] for r in rows if r["axis"] == axis})
        lines.append(f"| {axis}, {sizes[0]} to {sizes[-1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(rows: list[Row]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    table = f"{START}\n\n{markdown(rows)}\n\n{END}"
    PAGE.write_text(pattern.sub(lambda _: table, page), encoding="utf-8")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=tuple(AXES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scaling.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    done = {(r["axis"], r["size"]) for r in rows}
    for axis, size in [(a, s) for a in options.axes for s in AXES[a] if (a, s) not in done]:
        rows += measured(axis, size, options.rounds)
        facts = {
            "command": "python benchmarks/scaling.py " + " ".join(sys.argv[1:]),
            "commit": commit(), "torch": torch.__version__, "threads": 1, "clock": "cpu",
        }  # fmt: skip
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        print(f"{axis} {size}: {time.process_time():.0f} processor seconds so far", flush=True)
    print(markdown(rows))
    write_page(rows)


if __name__ == "__main__":
    main()
