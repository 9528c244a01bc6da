"""A plan on paper: one private step on 1 to 1024 GPUs, from a model of five terms.

    python benchmarks/scaling_plan.py [--flops 1.5e14] [--bandwidth 5e10] [--latency 3e-5]

    step(W) = compute(l / W) * imbalance(l / W, W) + messages(d, W) + noise(d) + ledger + draws(n)

compute    F multiple K l / (W flops): F the FLOPs of a plain step of one sample, multiple the
           private step's cost next to it (benchmarks/step.py), flops what a GPU sustains.
imbalance  The largest of W Poisson shares over the mean share: ranks wait for it.
messages   16 d (W - 1) / W bytes over the bandwidth: a reduce-scatter and an all-gather; before, a
           reduce and a broadcast of as many. Latencies: 2 log2(W) before; now 4 log2(W), with the
           two small messages by which the leader reports that the step is on disk.
noise      One core of the host per rank draws. Before, the leader drew for all d coordinates; now
           every rank draws for its d / W.
ledger     One line, flushed to disk, by the leader, while all wait.
draws      n uniform numbers on every rank.

Measured here: noise, ledger and draws. Assumed, since there is no GPU at hand: flops, bandwidth,
latency; they are options. Efficiency is compute(l) over W step(W).

Bytes per parameter and device: parameters 4, clipped sum (float64) 8, the message 8, the gradient
4, the optimiser (NAdam) 8, an average of the weights 4: 36. Before, the leader held 24 more while
it drew the noise, divided and sent; now each rank holds 24 / W for its slice. Activations of one
physical batch are apart, and are chosen to fit (``oracle.fit``).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import norm

from dpbam.privacy.ledger import Ledger
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.secure_noise import make_noise

RANKS = (1, 8, 64, 256, 1024)
BYTES = 4 + 8 + 8 + 4 + 8 + 4  # a parameter
SLICE = 24  # more: on the leader before; on every rank now, over W


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
    Job("The same with BAM", 25.6e6, 3 * 8.2e9, 2.06, 16384, 4, 1_281_167),
    Job("Transformer of 10^9 parameters, 1024 tokens, DP-SGD", 1e9, 6 * 1e9 * 1024, 1.4, 4096, 1,
        10_000_000),
)  # fmt: skip


def imbalance(mean: float, world: int) -> float:
    """E[largest of W Poisson(mean) shares] / mean, by the normal approximation."""
    if world == 1:
        return 1.0
    grid = np.linspace(-6, 8, 4001)
    largest = np.trapezoid(1 - norm.cdf(grid) ** world, grid) + grid[0]
    return float(1 + largest / math.sqrt(mean))


@dataclass(frozen=True)
class Measured:
    """Seconds, on this machine."""

    noise: float  # a coordinate
    secure: float  # likewise
    ledger: float  # a step
    draw: float  # a unit


def least(work: Callable[[int], object], count: int) -> float:
    """Processor seconds of ``work``, the best of five, over ``count``."""
    times = []
    for step in range(5):
        began = time.process_time()
        work(step)
        times.append(time.process_time() - began)
    return min(times) / count


def measured() -> Measured:
    torch.set_num_threads(1)
    zeros = {"w": torch.zeros(10**6, dtype=torch.float64)}
    standard, secure = make_noise("standard", None), make_noise("secure", None)
    return Measured(
        least(lambda step: standard.add(zeros, 1.0, step), 10**6),
        least(lambda step: secure.add(zeros, 1.0, step), 10**6),
        ledger_seconds(),
        least(lambda step: Randomness(0).uniform("sampling", step, 10**6), 10**6),
    )


def ledger_seconds() -> float:
    """Wall seconds of one charge on disk, the median of 20."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(1e-5, path=Path(folder) / "ledger.jsonl")
        for step in range(20):
            began = time.perf_counter()
            ledger.charge("s", step, noise_multiplier=1.0, sampling_rate=0.1)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def rows(job: Job, options: argparse.Namespace, found: Measured) -> list[list[str]]:
    whole = job.flops_a_sample * job.multiple * job.views * job.batch / options.flops
    d, table = job.parameters, []
    for world in RANKS:
        compute = whole / world * imbalance(job.batch / world, world)
        sent = 16 * d * (world - 1) / world
        fixed = compute + sent / options.bandwidth + job.n * found.draw + found.ledger
        hop = math.log2(world) * options.latency
        cells = [
            str(world), f"{sent / 1e9:.2f}", f"{(BYTES + SLICE) * d / 1e9:.1f}",
            f"{(BYTES + SLICE / world) * d / 1e9:.1f}", f"{compute:.3g}",
        ]  # fmt: skip
        for noise in (found.noise, found.secure):
            for step in (fixed + 2 * hop + d * noise, fixed + 4 * hop + d * noise / world):
                cells.append(f"{step:.3g} ({whole / world / step:.0%})")
        table.append(cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flops", type=float, default=1.5e14, help="that a GPU sustains")
    parser.add_argument("--bandwidth", type=float, default=5e10, help="bytes a second and GPU")
    parser.add_argument("--latency", type=float, default=3e-5, help="seconds of a hop")
    options = parser.parse_args()
    found = measured()
    print(f"Noise {found.noise:.2g} s per coordinate, secure {found.secure:.2g} s, ledger "
          f"{found.ledger:.2g} s per step, draws {found.draw:.2g} s per unit (measured); "
          f"{options.flops:.2g} FLOP/s, {options.bandwidth:.2g} B/s, {options.latency:.2g} s "
          "(assumed).")  # fmt: skip
    header = ["GPUs", "GB per step", "GB per device, before", "now", "compute, s",
              "step before, s", "step now, s", "secure before, s", "secure now, s"]  # fmt: skip
    for job in JOBS:
        print(f"\n**{job.name}**, l = {job.batch}:\n")
        print("| " + " | ".join(header) + " |\n|" + "---:|" * len(header))
        for row in rows(job, options, found):
            print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
