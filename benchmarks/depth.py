"""Time of a step against depth (the paper's Figure 3): from 4 to 200 convolutions of fixed width.

A net of ``depth`` convolutions of equal width (each with group norm and Mish) on small images; for
every method and both engines the mean and deviation over trials of the mean over repetitions; then
the growth in depth fitted as time = c * depth^p, and as a line.

    python benchmarks/depth.py [--depths 4 10 20 50 100 200] [--trials 10] [--repetitions 5]

Writes results/depth.json and results/depth.png.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nets import LOSS
from steps import METHODS
from torch import nn

from dpbam.engines import FunctionalEngine, FusedEngine, PhysicalBatch
from dpbam.nn.blocks import conv_norm_act

HERE = Path(__file__).parent
ENGINES = {"fused": FusedEngine, "functional": FunctionalEngine}


def net(depth: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    style = {"weight_standardisation": "centre"}
    layers = [conv_norm_act(3, width, **style)]
    layers += [conv_norm_act(width, width, **style) for _ in range(depth - 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def timed(engine: str, method: str, arguments: argparse.Namespace, depth: int) -> list[float]:
    """Seconds a step: one figure a trial, each the mean over repetitions."""
    now = time.process_time if arguments.clock == "cpu" else time.perf_counter
    n = torch.arange(arguments.batch)
    x = torch.randn(arguments.batch, 3, arguments.side, arguments.side)
    batch = PhysicalBatch(x, n % 10, n, arguments.batch, torch.ones(arguments.batch), n)
    made = ENGINES[engine](net(depth, arguments.width), LOSS)
    what, lam = METHODS[method]

    def run() -> None:
        handle = made.directions(batch, what, lam)
        handle.weighted_sum(handle.norms().reciprocal().clamp(max=1.0))

    run()
    out = []
    for _ in range(arguments.trials):
        begin = now()
        for _ in range(arguments.repetitions):
            run()
        out.append((now() - begin) / arguments.repetitions)
    return out


def fit(depths: list[int], seconds: list[float]) -> dict[str, float]:
    """time = c depth^p (p = 1: linear), and R^2 of a straight line."""
    power = np.polyfit(np.log(depths), np.log(seconds), 1)[0]
    line = np.polyfit(depths, seconds, 1)
    left = np.square(np.polyval(line, depths) - seconds).sum()
    whole = np.square(np.array(seconds) - np.mean(seconds)).sum()
    return {
        "power": float(power),
        "seconds_per_layer": float(line[0]),
        "r2": float(1 - left / whole),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 10, 20, 50, 100, 200])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for engine in ENGINES:
        for method in METHODS:
            mine = []
            for depth in arguments.depths:
                trials = timed(engine, method, arguments, depth)
                mine.append(
                    {"engine": engine, "method": method, "depth": depth,
                     "seconds": float(np.mean(trials)), "sd": float(np.std(trials, ddof=1))}
                )  # fmt: skip
            growth = fit(arguments.depths, [r["seconds"] for r in mine])
            print(f"{engine:11} {method:10} {1e3 * growth['seconds_per_layer']:8.2f} ms a layer, "
                  f"depth^{growth['power']:.2f}, R^2 {growth['r2']:.4f}", flush=True)  # fmt: skip
            rows += [{**r, **growth} for r in mine]
    arguments.out.mkdir(exist_ok=True, parents=True)
    facts = {k: v for k, v in vars(arguments).items() if k != "out"}
    (arguments.out / "depth.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    plot(rows, arguments.out / "depth.png")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for engine, style in (("fused", "-"), ("functional", ":")):
        for i, method in enumerate(METHODS):
            mine = [r for r in rows if (r["engine"], r["method"]) == (engine, method)]
            axis.errorbar(
                [r["depth"] for r in mine], [r["seconds"] for r in mine],
                yerr=[r["sd"] for r in mine], linestyle=style, color=f"C{i}", capsize=2,
                label=f"{engine} {method}",
            )  # fmt: skip
    axis.set(xlabel="convolutions", ylabel="seconds a step")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
