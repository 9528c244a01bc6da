"""What reading a map-style data set costs: ``oracle.batches`` next to a shuffled DataLoader.

    python benchmarks/loading.py [--batch-size 1000] [--repeats 5]

Rows per processor second of 50,000 images of 3 x 32 x 32, in one process and on one thread, in
turn. "that draw" is the same data set with a random flip: each record is then read with the global
generators at a key of its own, which takes longer than reading it.
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpbam import PrivacyPlan, PrivateGradientOracle

N = 50_000


class Images(Dataset[tuple[Tensor, int]]):
    def __init__(self, *, flips: bool) -> None:
        self.flips = flips
        self.pixels = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (N,)).tolist()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = self.pixels[i].float().div_(255)
        if self.flips and torch.rand(1) < 0.5:
            image = image.flip(-1)
        return image, self.labels[i]


def rows_per_second(batches: Iterable[Any], count: int) -> float:
    """Read ``count`` batches after the first, which pays for what is made once."""
    iterator = iter(batches)
    next(iterator)
    began, rows = time.process_time(), 0
    for _ in range(count):
        rows += len(next(iterator)[0])
    return rows / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = PrivacyPlan(
        n=N, batch_size=options.batch_size, steps=9, noise_multiplier=1.0, delta=1e-6
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    loss = nn.CrossEntropyLoss(reduction="none")
    print("| records | DataLoader, rows/s | oracle.batches, rows/s | DataLoader over batches |")
    print("|---|---:|---:|---:|")
    for name, flips in (("as they are", False), ("that draw", True)):
        dataset = Images(flips=flips)
        speeds: dict[str, list[float]] = {"loader": [], "batches": []}
        for _ in range(options.repeats):
            loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=True)
            speeds["loader"].append(rows_per_second(loader, 8))
            oracle = PrivateGradientOracle(model, loss, plan)
            speeds["batches"].append(rows_per_second(oracle.batches(dataset), 8))
        here, there = (statistics.median(speeds[kind]) for kind in ("batches", "loader"))
        print(f"| {name} | {there:,.0f} | {here:,.0f} | {there / here:.2f} |")


if __name__ == "__main__":
    main()
