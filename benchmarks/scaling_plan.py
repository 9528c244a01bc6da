"""A plan on paper: one private step on 1 to 1024 GPUs, from a model of four terms.

    python benchmarks/scaling_plan.py [--flops 1.5e14] [--bandwidth 5e10] [--latency 3e-5]

    step(W) = compute(l / W) * imbalance(l / W, W) + messages(d, W) + noise(d) + draws(n)

compute    F multiple K l / (W flops): F the FLOPs of a plain step of one sample, multiple the
           private step's cost next to it (benchmarks/step.py), flops what a GPU sustains.
imbalance  The largest of W Poisson shares over the mean share: ranks wait for it.
messages   A reduce and a broadcast of 8 d bytes: 16 d / bandwidth, and 2 log2(W) latencies.
noise      As it is built the leader draws all d normals on one core: d times the measured seconds.
           "sliced": every rank draws for d / W coordinates, between a reduce-scatter and an
           all-gather, which carry the same bytes.
draws      n uniform numbers on every rank.

Measured here: noise and draws (benchmarks/results/distributed.json, this script). Assumed, since
there is no GPU at hand: flops, bandwidth, latency; they are options. Efficiency is compute(l) over
W step(W).

Bytes per device: parameters 4 d, clipped sum (float64) 8 d, the message 8 d, the gradient
4 d, the optimiser (NAdam) 8 d, an average of the weights 4 d; on the leader 24 d more while it
draws the noise, divides and sends. Activations of one physical batch are apart, and are chosen to
fit (``oracle.fit``).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import norm

from dpbam.privacy.randomness import Randomness

CONSTANTS = Path(__file__).parent / "results" / "distributed.json"
RANKS = (1, 8, 64, 256, 1024)
BYTES = 4 + 8 + 8 + 4 + 8 + 4 + 24  # a parameter, on the leader


@dataclass(frozen=True)
class Job:
    """A training on paper; FLOPs are of a plain forward and backward of one sample."""

    name: str
    parameters: float
    flops_a_sample: float
    multiple: float
    batch: int
    views: int
    n: int


JOBS = (
    Job("ImageNet at 224 pixels, ResNet-50, DP-SGD, K = 4", 25.6e6, 3 * 8.2e9, 1.01, 16384, 4,
        1_281_167),
    Job("the same with BAM", 25.6e6, 3 * 8.2e9, 2.06, 16384, 4, 1_281_167),
    Job("transformer of 10^9 parameters, 1024 tokens, DP-SGD", 1e9, 6 * 1e9 * 1024, 1.4, 4096, 1,
        10_000_000),
)  # fmt: skip


def imbalance(mean: float, world: int) -> float:
    """E[largest of W Poisson(mean) shares] / mean, by the normal approximation."""
    if world == 1:
        return 1.0
    grid = np.linspace(-6, 8, 4001)
    largest = np.trapezoid(1 - norm.cdf(grid) ** world, grid) + grid[0]
    return float(1 + largest / math.sqrt(mean))


def draw_seconds() -> float:
    """Seconds of one uniform number, the best of five."""
    times = []
    for step in range(5):
        began = time.process_time()
        Randomness(0).uniform("sampling", step, 10**6)
        times.append(time.process_time() - began)
    return min(times) / 10**6


def rows(job: Job, options: argparse.Namespace, noise: float, draw: float) -> list[list[str]]:
    whole = job.flops_a_sample * job.multiple * job.views * job.batch / options.flops
    found = []
    for world in RANKS:
        compute = whole / world * imbalance(job.batch / world, world)
        message = 0.0
        if world > 1:
            message = 16 * job.parameters / options.bandwidth
            message += 2 * math.log2(world) * options.latency
        drawn = job.n * draw
        leader = compute + message + drawn + job.parameters * noise
        sliced = compute + message + drawn + job.parameters * noise / world
        found.append([
            str(world), f"{16 * job.parameters / 1e9:.2f}" if world > 1 else "0",
            f"{BYTES * job.parameters / 1e9:.1f}", f"{compute:.3g}", f"{message:.2g}",
            f"{leader:.3g}", f"{whole / world / leader:.0%}", f"{sliced:.3g}",
            f"{whole / world / sliced:.0%}",
        ])  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flops", type=float, default=1.5e14, help="that a GPU sustains")
    parser.add_argument("--bandwidth", type=float, default=5e10, help="bytes a second and GPU")
    parser.add_argument("--latency", type=float, default=3e-5, help="seconds of a hop")
    options = parser.parse_args()
    noise = json.loads(CONSTANTS.read_text())["noise_seconds_a_coordinate"]["standard"]
    draw = draw_seconds()
    print(f"noise {noise:.2e} s per coordinate, draws {draw:.1e} s per unit (measured); "
          f"{options.flops:.2g} FLOP/s, {options.bandwidth:.2g} B/s, {options.latency:.2g} s "
          "(assumed)")  # fmt: skip
    header = ["GPUs", "GB per step", "GB per device", "compute, s", "messages, s", "step, s",
              "efficiency", "step, noise sliced, s", "efficiency"]  # fmt: skip
    for job in JOBS:
        print(f"\n{job.name}: l = {job.batch}\n")
        print("| " + " | ".join(header) + " |\n|" + "---:|" * len(header))
        for row in rows(job, options, noise, draw):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
