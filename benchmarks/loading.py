"""What reading a map-style data set costs: ``oracle.batches`` next to a shuffled DataLoader.

    python benchmarks/loading.py [--batch-size 1000] [--batches 150]

Processor time per row of 50,000 images of 3 x 32 x 32, in one process and on one thread: one batch
of each in turn, which is kept until the next one is there, as in a training loop. The shuffle and
the Poisson draws count, what is made once does not. Rows that are read without random numbers are
compared, and must be the same.

"that draw" is the same data set with a random flip: each record is then read with the generator at
a key of its own, which takes longer than the draw.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dpbam import PrivacyPlan, PrivateGradientOracle

N = 50_000


class Images(Dataset[Any]):
    def __init__(self, item: Callable[[Tensor, int], Any]) -> None:
        self.item = item
        self.pixels = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (N,)).tolist()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.item(self.pixels[i].float().div_(255), self.labels[i])


def flipped(image: Tensor, label: int) -> tuple[Tensor, int]:
    return image.flip(-1) if torch.rand(1) < 0.5 else image, label


ITEMS: dict[str, Callable[[Tensor, int], Any]] = {
    "as they are": lambda image, label: (image, label),
    "that draw": flipped,
    "NumPy, float targets": lambda image, label: (image.numpy(), float(label)),
    "nested": lambda image, label: ({"image": image, "scale": [1.0, 2.0]}, label),
}


def shuffled(dataset: Images, batch_size: int) -> Iterator[Any]:
    while True:
        yield from DataLoader(dataset, batch_size=batch_size, shuffle=True)


def microseconds_per_row(ways: dict[str, Iterator[Any]], batches: int) -> dict[str, float]:
    batch: dict[str, Any] = {name: next(iterator) for name, iterator in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(batches):
        for name, iterator in ways.items():
            began = time.process_time()
            batch[name] = next(iterator)
            taken = time.process_time() - began
            times[name].append(1e6 * taken / len(batch[name][1]))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = PrivacyPlan(
        n=N,
        batch_size=options.batch_size,
        steps=options.batches + 2,
        noise_multiplier=1.0,
        delta=1e-6,
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    loss = nn.CrossEntropyLoss(reduction="none")
    print("| records | DataLoader, us per row | oracle.batches, us per row | ratio |")
    print("|---|---:|---:|---:|")
    for name, item in ITEMS.items():
        dataset = Images(item)
        batches = PrivateGradientOracle(model, loss, plan).batches(dataset)
        if item is not flipped:
            *batch, units = next(batches)
            rows = default_collate([dataset[i] for i in units.tolist()])
            torch.testing.assert_close(batch, rows, rtol=0, atol=0)
        ways = {"loader": shuffled(dataset, options.batch_size), "batches": batches}
        there, here = microseconds_per_row(ways, options.batches).values()
        print(f"| {name} | {there:.2f} | {here:.2f} | {here / there:.2f} |")


if __name__ == "__main__":
    main()
