"""Time of a step against depth (the paper's Figure 3): from 4 to 200 convolutions of fixed width.

A net of ``depth`` convolutions of equal width (each with group norm and Mish) on small images; for
every method and both engines the mean and deviation over trials of the mean over repetitions; then
the growth in depth fitted as time = c * depth^p, and as a line.

    python benchmarks/depth.py [--depths 4 10 20 50 100 200] [--trials 10] [--repetitions 5]

Writes results/depth.json, depth by depth, and results/depth.png; the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from reproduce.depth import NAMES, Timing, by_turns, private_step  # noqa: E402

Row = dict[str, Any]
ENGINES = ("fused", "functional")


def timed(options: argparse.Namespace, depth: int) -> list[Row]:
    """Seconds a step: mean and deviation over trials, each the mean over repetitions."""
    now = time.process_time if options.clock == "cpu" else time.perf_counter
    of = ("trials", "repetitions", "width", "side", "batch")
    timing = Timing((depth,), **{name: getattr(options, name) for name in of})
    steps = {(e, m): private_step(depth, m, timing, e) for e in ENGINES for m in NAMES}
    return [
        {"engine": engine, "method": method, "depth": depth,
         "seconds": float(np.mean(s)), "sd": float(np.std(s, ddof=1))}
        for (engine, method), s in by_turns(steps, timing, now).items()
    ]  # fmt: skip


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


def growths(rows: list[Row]) -> list[Row]:
    """The fit of every engine and method."""
    found = []
    for engine in ENGINES:
        for method in NAMES:
            mine = [r for r in rows if (r["engine"], r["method"]) == (engine, method)]
            growth = fit([r["depth"] for r in mine], [r["seconds"] for r in mine])
            print(f"{engine:11} {method:10} {1e3 * growth['seconds_per_layer']:8.2f} ms a layer, "
                  f"depth^{growth['power']:.2f}, R^2 {growth['r2']:.4f}", flush=True)  # fmt: skip
            found.append({"engine": engine, "method": method, **growth})
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    options = arguments()
    torch.set_num_threads(options.threads)
    facts = {k: v for k, v in vars(options).items() if k not in ("out", "depths")}
    path = options.out / "depth.json"
    rows = kept(path, facts)
    for depth in options.depths:
        if depth not in {r["depth"] for r in rows}:
            rows += timed(options, depth)
            write(path, {**facts, "rows": rows})
            print(f"{depth} layers done", flush=True)
    rows = [r for r in rows if r["depth"] in options.depths]
    write(path, {**facts, "rows": rows, "growth": growths(rows)})
    plot(rows, options.out / "depth.png")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 10, 20, 50, 100, 200])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--side", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


def kept(path: Path, facts: dict[str, Any]) -> list[Row]:
    """The rows of an earlier run with the same settings: what is measured stays measured."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    rows: list[Row] = found["rows"]
    return rows if all(found[k] == v for k, v in facts.items()) else []


def write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def plot(rows: list[Row], path: Path) -> None:
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(f"{row['engine']} {row['method']}", []).append(row)
    series = [
        Series(
            name, colour, [r["depth"] for r in mine], tuple(r["seconds"] for r in mine),
            tuple(r["seconds"] - r["sd"] for r in mine),
            tuple(r["seconds"] + r["sd"] for r in mine), style="points",
        )
        for colour, (name, mine) in enumerate(curves.items())
    ]  # fmt: skip
    panel = lines("", "convolutions", "seconds per step", series, zero=True)
    Figure("depth", "Time of a step against depth", "", "public", [panel]).save(path)


if __name__ == "__main__":
    main()
