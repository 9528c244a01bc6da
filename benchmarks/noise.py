"""What the noise of a step costs: ``GaussianNoise.add`` next to ``torch.normal`` and an addition.

    python benchmarks/noise.py [--parameters 9500000] [--repeats 7]

Nanoseconds of the processor per parameter, on one thread, in turn in one process. Ours is added to
float64 sums in place, as in a step, from a key of 192 bits; torch's is float32, from one of 32.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dpbam.privacy.noise import CHUNKS, GaussianNoise, standard_normals
from dpbam.privacy.randomness import Randomness


def nanoseconds(work: Callable[[], object], count: int) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) / count * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=9_500_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.parameters
    sums = {"w": torch.randn(count, dtype=torch.float64)}
    gradient, noise = torch.randn(count), GaussianNoise(Randomness())
    bits = noise.randomness.noise_generator("noise", 0, 0)

    def draw_alone() -> None:
        for _ in range(0, count, CHUNKS[-1]):
            standard_normals(bits, CHUNKS[-1])

    ways = {
        "draws alone": draw_alone,
        "GaussianNoise.add": lambda: noise.add(sums, 1.0, step=0, reuse=True),
        "torch.normal and +": lambda: gradient + torch.normal(0.0, 1.0, (count,)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, work in ways.items():
            times[name].append(nanoseconds(work, count))
    _, ours, theirs = (statistics.median(values) for values in times.values())
    for name, values in times.items():
        print(f"{name:20}{statistics.median(values):6.1f} ns per parameter")
    print(f"{'ratio':20}{ours / theirs:6.2f}")


if __name__ == "__main__":
    main()
