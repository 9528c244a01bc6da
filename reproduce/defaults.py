"""The study behind the defaults: which features, head and settings, from public facts alone.

Each source (:mod:`reproduce.defaults_data`) at some numbers of records n and epsilon 1, 3 and 8,
with each kind of features and each head, over a grid of settings: tuning without accounting, to
know the best. The settings of :mod:`dpbam.auto` are then judged by **regret**: points of test
accuracy below the best private alternative, which is selected on validation records.

The grid is computed by a direct simulation of the same mechanism (full batch, clipped, Gaussian
noise of the same variance), which takes a tenth of the oracle's time; the final figures are runs of
the oracle (``by`` in a record: "simulation" or "oracle"). Half of a source's held-out records are
validation records, the other half test records.

    python -m reproduce.defaults FEATURES RESULTS        (resumes: a record is never computed twice)

FEATURES holds SOURCE-PART-KIND.npy, raw features float32 [N, D], and SOURCE-PART-labels.npy.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from dpbam.auto import AVERAGE as RULE_AVERAGE
from dpbam.auto import LONGEST, PATH, SHORTEST
from dpbam.auto import STEPS as RULE_STEPS
from dpbam.features import standardise_rows
from dpbam.heads.closed_form import BOUND, GRAM_WEIGHT, class_targets
from dpbam.privacy.plan import default_delta

Record = dict[str, Any]
Head = tuple[Tensor, Tensor]

STEPS, CLIP, MOMENTUM, AVERAGE = 50, 0.3, 0.9, 0.6
PATHS = (20, 60, 200, 600, 2000, 6000)  # L = lr C T
RIDGES = (0.03, 0.1, 0.3)
EPSILONS = (1.0, 3.0, 8.0)
SEEDS = (0, 1)
MOST_HELD_OUT = 3000
SIZES = {
    "cifar10": (500, 2000, 8000, 50000), "pneumonia": (500, 4708), "digits": (500, 1438),
    "mnist": (2000,), "fashion": (500, 2000), "sketches": (2000,), "emoji": (500, 2821),
    "icons": (500, 2355), "faces": (120,), "letters": (2000,),
}  # fmt: skip
FEATURES = ("mobilenet", "scattering")
HEADS = ("rule", "descent", "closed-form")  # the rule's own setting, and two grids


def cells(folder: Path) -> Iterator[Record]:
    """Yield what can be computed from the features that are there, small problems first."""
    keys = [
        (n, source, kind)
        for source, sizes in SIZES.items()
        for n, kind in itertools.product(sizes, FEATURES)
        if all((folder / f"{source}-{p}-{kind}.npy").exists() for p in ("train", "test"))
    ]
    for n, source, kind in sorted(keys):
        for epsilon in EPSILONS:
            yield {"source": source, "features": kind, "n": n, "epsilon": epsilon}


def run(folder: Path, results: Path) -> None:
    """Compute all cells that have no record yet; one line per finished cell and head."""
    known = {_key(json.loads(line)) for line in results.open()} if results.exists() else set()
    for cell in cells(folder):
        wanted = [head for head in HEADS if _key(cell | {"head": head}) not in known]
        if not wanted:
            continue
        data = load(folder, cell["source"], cell["features"])
        if len(data[0]) < 0.9 * cell["n"]:
            continue
        for head in wanted:
            record = cell | {"head": head, "by": "simulation", **simulated(data, cell, head)}
            with results.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("source", "features", "n", "epsilon", "head"))


@lru_cache(2)
def load(
    folder: Path, source: str, kind: str, most: int = MOST_HELD_OUT
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return standardised features and labels to train on, and of at most ``most`` held out."""
    parts = []
    for part in ("train", "test"):
        labels = np.load(folder / f"{source}-{part}-labels.npy")
        values = np.load(folder / f"{source}-{part}-{kind}.npy", mmap_mode="r")
        count = min(len(values), len(labels))
        if part == "test":
            count = min(count, most)
        parts += [standardise_rows(torch.tensor(values[:count])), torch.tensor(labels[:count])]
    return parts[0], parts[1], parts[2], parts[3]


def simulated(data: tuple[Tensor, ...], cell: Record, head: str) -> Record:
    """Return the accuracies of one head over its grid: by setting, one value per seed."""
    x, y, held_x, held_y = data
    classes = int(torch.cat([y, held_y]).max()) + 1
    grid: Sequence[float] = {"descent": PATHS, "closed-form": RIDGES, "rule": (PATH,)}[head]
    scores: dict[str, list[list[float]]] = {str(g): [] for g in grid}
    n = min(cell["n"], len(x))
    seeds = SEEDS if n < 20_000 else SEEDS[:1]
    for seed in seeds:
        # disjoint parts of the training records where there are enough of them
        start = seed * n if (seed + 1) * n <= len(x) else 0
        rows = slice(start, start + n)
        sigma = gaussian_sigma(cell["epsilon"], default_delta(n))
        fit = {"descent": descend, "closed-form": solve, "rule": follow}[head]
        for setting, (weight, bias) in fit(x[rows], y[rows], classes, sigma, grid, seed):
            scores[str(setting)].append(_scores(held_x @ weight + bias, held_y, classes))
    return {"d": x.shape[1], "classes": classes, "trained_on": n, "scores": scores}


def _scores(outputs: Tensor, labels: Tensor, classes: int) -> list[float]:
    """Return accuracy on validation and on test records, and balanced accuracy on the latter."""
    right = (outputs.argmax(1) == labels).double()
    half = len(labels) // 2
    test = right[half:]
    by_class = [
        test[labels[half:] == c].mean() for c in range(classes) if (labels[half:] == c).any()
    ]
    values = (right[:half].mean(), test.mean(), torch.stack(by_class).mean())
    return [round(100 * v.item(), 2) for v in values]


@lru_cache(64)
def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Return the noise multiplier of one Gaussian release within (epsilon, delta), exactly."""

    def excess(sigma: float) -> float:
        a, b = 0.5 / sigma, epsilon * sigma
        return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta)

    return float(brentq(excess, 1e-2, 1e4))


def descend(
    x: Tensor, y: Tensor, classes: int, sigma: float, paths: Sequence[float], seed: int
) -> Iterator[tuple[float, Head]]:
    """Simulate :func:`dpbam.heads.fit_by_descent` for some lengths of the path."""
    for path in paths:
        yield path, descend_once(x, y, classes, sigma, path, seed)


def follow(
    x: Tensor, y: Tensor, classes: int, sigma: float, share: Sequence[float], seed: int
) -> Iterator[tuple[float, Head]]:
    """Simulate the descent with the settings of :mod:`dpbam.auto`."""
    for path in share:
        length = min(LONGEST, max(SHORTEST, path * len(x) / sigma))
        yield path, descend_once(x, y, classes, sigma, length, seed, RULE_STEPS, RULE_AVERAGE)


def descend_once(
    x: Tensor, y: Tensor, classes: int, sigma: float, path: float, seed: int, steps: int = STEPS,
    average: float = AVERAGE,
) -> Head:  # fmt: skip
    """Simulate the descent: weight [D, K] and bias [K]."""
    generator = torch.Generator().manual_seed(seed)
    n, d = x.shape
    inputs = torch.nn.functional.pad(x, (0, 1), value=1.0)
    targets = torch.nn.functional.one_hot(y, classes).float()
    norms = inputs.norm(dim=1)
    lr, std = path / (steps * CLIP), sigma * math.sqrt(steps) * CLIP
    weight, velocity, mean = (torch.zeros(d + 1, classes) for _ in range(3))
    first = round(steps * (1 - average))
    for step in range(steps):
        residual = torch.softmax(inputs @ weight, 1) - targets
        factors = (CLIP / (residual.norm(dim=1) * norms).clamp(min=1e-12)).clamp(max=1.0)
        clipped = inputs.T @ (residual * factors[:, None])
        noised = clipped + std * torch.randn(d + 1, classes, generator=generator)
        velocity = MOMENTUM * velocity + noised / n
        weight = weight - lr * velocity
        if step >= first:
            mean += (weight - mean) / (step - first + 1)
    return mean[:-1], mean[-1]


def solve(
    x: Tensor, y: Tensor, classes: int, sigma: float, ridges: Sequence[float], seed: int
) -> Iterator[tuple[float, Head]]:
    """Simulate the closed-form head for some regularisers: weight [D, K] and bias [K]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.nn.functional.pad(x, (0, 1), value=1.0) / math.sqrt(2)
    d = inputs.shape[1]
    std = sigma * BOUND
    raw = torch.randn(d, d, generator=generator, dtype=torch.float64)
    gram = (inputs.T @ inputs).double() + std / GRAM_WEIGHT * (raw + raw.T) / 2
    cross = (inputs.T @ class_targets(y, classes)).double()
    cross += std * torch.randn(d, classes, generator=generator, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(gram)
    for ridge in ridges:
        penalty = ridge * std / GRAM_WEIGHT * math.sqrt(2 * d)
        weight = vectors @ ((vectors.T @ cross) / (values.clamp(min=0) + penalty)[:, None])
        yield ridge, (weight[:-1].float(), weight[-1].float())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), Path(sys.argv[2]))
