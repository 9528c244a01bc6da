"""The study behind the defaults: how far the rule of :mod:`dpbam.auto` is from the best.

Each source (:mod:`reproduce.defaults_data`) at some numbers of records n and epsilon 1, 3 and 8,
with each kind of features: the rule's own setting, and a grid of alternatives, tuned without
accounting. **Regret** is the test accuracy of the alternative that validation records select, minus
the rule's. Validation records are held out of the training records; test records are judged once
and select nothing. The rule was chosen by scores of :data:`FITTED`, those of test records among
them: they are no blind judges of it, the other sources are.

All heads are computed by a direct simulation of the mechanism (full batch, clipped, Gaussian noise
of the same variance, by the exact formula for a Gaussian release), which takes a tenth of the
oracle's time; figures of the real command are in ``defaults-final.jsonl``.

    python -m reproduce.defaults FEATURES RESULTS        (resumes: a record is never computed twice)

FEATURES holds what :mod:`reproduce.defaults_features` writes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbam.app.runs.class_counts import offsets
from dpbam.app.runs.first_release import shrunk
from dpbam.auto import (
    AVERAGE,
    BALANCE,
    CENTRE,
    CLIP_NORM,
    COUNTS,
    GRAM_WEIGHT,
    MOMENTUM,
    PATH,
    STEPS,
    path_length,
    single_release_sigma,
)
from dpbam.features import HEAD_SCALE, recentre_rows
from dpbam.heads.closed_form import BOUND, class_targets
from dpbam.privacy.plan import default_delta

Record = dict[str, Any]
Head = tuple[Tensor, Tensor, Tensor]  # weight [D, K], bias [K], centre of the features [D]

# sources whose records chose something of the rule: the centre was found on digits and fashion
FITTED = ("cifar10", "digits", "fashion", "pneumonia")
PATHS = (0.5, 1.0, 2.0, 4.0)  # times the rule's
CLIPS = (1.0, 3.0)
BALANCES = (0.0, 0.5, 1.0)
RIDGES = (0.03, 0.1)
EPSILONS = (1.0, 3.0, 8.0)
SEEDS = (0, 1)
SIZES = {
    "cifar10": (500, 2000, 8000), "pneumonia": (500, 3766), "digits": (500, 1150),
    "mnist": (500, 2000), "fashion": (500, 2000), "emoji": (500, 2256), "icons": (500, 1884),
    "sketches": (500, 2000), "letters": (500, 2000), "faces": (96,),
}  # fmt: skip
FEATURES = ("mobilenet", "scattering")
_HELD_OUT = 2000  # validation records, and test records, at most


def run(folder: Path, results: Path) -> None:
    """Compute all cells that have no record yet; one line per finished cell."""
    known = {_key(json.loads(line)) for line in results.open()} if results.exists() else set()
    for cell in cells(folder):
        if _key(cell) in known:
            continue
        record = cell | simulated(load(folder, cell["source"], cell["features"]), cell)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


def cells(folder: Path) -> Iterator[Record]:
    """Yield what can be computed from the features that are there, small problems first."""
    keys = [
        (n, source, kind)
        for source, sizes in SIZES.items()
        for n in sizes
        for kind in FEATURES
        if all((folder / f"{source}-{p}-{kind}.npy").exists() for p in ("train", "test"))
    ]
    # small problems first, and those that judge the rule before those it was fitted to
    for n, source, kind in sorted(keys, key=lambda key: (key[0] > 500, key[1] in FITTED, key)):
        for epsilon in EPSILONS:
            yield {"source": source, "features": kind, "n": n, "epsilon": epsilon}


def _key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("source", "features", "n", "epsilon"))


@lru_cache(2)
def load(folder: Path, source: str, kind: str) -> tuple[Tensor, ...]:
    """Return features and labels to train on, of validation, and of test records.

    The last fifth of the training records are validation records; at most 2,000 of either.
    """
    parts = []
    for part in ("train", "test"):
        x = torch.tensor(np.load(folder / f"{source}-{part}-{kind}.npy"))
        y = torch.tensor(np.load(folder / f"{source}-{part}-labels.npy"))[: len(x)].long()
        parts += [x, y]
    x, y, test_x, test_y = parts
    held_out = min(_HELD_OUT, len(x) // 5)
    return (
        x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:], test_x[:_HELD_OUT],
        test_y[:_HELD_OUT],
    )  # fmt: skip


def simulated(data: tuple[Tensor, ...], cell: Record) -> Record:
    """Return accuracies on validation and test records, by alternative, one row per seed."""
    x, y, held = data[0], data[1], data[2:]
    classes = int(max(y.max(), held[1].max(), held[3].max())) + 1
    n = min(cell["n"], len(x))
    sigma = single_release_sigma(cell["epsilon"], default_delta(n))
    length = path_length(n, cell["epsilon"], default_delta(n))
    scores: dict[str, list[list[float]]] = {}
    for seed in SEEDS:
        # disjoint parts of the training records where there are enough of them
        start = seed * n if (seed + 1) * n <= len(x) else 0
        rows = slice(start, start + n)
        for name, head in heads(x[rows], y[rows], classes, sigma, length, seed):
            scores.setdefault(name, []).append(_scores(head, held))
    constant = float(torch.bincount(held[3]).max() / len(held[3]))
    return {
        "d": x.shape[1], "classes": classes, "trained_on": n, "path": PATH, "centre": CENTRE,
        "constant": round(100 * constant, 2), "scores": scores,
    }  # fmt: skip


def heads(
    x: Tensor, y: Tensor, classes: int, sigma: float, length: float, seed: int
) -> Iterator[tuple[str, Head]]:
    """Yield the rule's head, the alternatives, and one without privacy (``not private``)."""
    n = len(x)
    counts = np.bincount(y.numpy(), minlength=classes)
    # the counts take a share of the budget: precisions of Gaussian releases add up
    noise = COUNTS * sigma
    remaining = sigma / math.sqrt(1 - 1 / COUNTS**2 - 1 / CENTRE**2)
    noised = counts + noise * np.random.default_rng(seed).standard_normal(classes)
    centre = released_centre(x, CENTRE * sigma, seed)
    moved = recentre_rows(x, centre)
    ((weight, bias),) = descend(moved, y, classes, remaining, [(length, CLIP_NORM)], seed)
    shift = torch.from_numpy(offsets(noised, noise, n, BALANCE)).float()
    yield "rule", (weight, bias - shift, centre)
    exact = np.log(np.maximum(counts / n, 0.2 / classes))
    settings = [(length * p, c) for p in PATHS for c in CLIPS]
    # the alternatives pay for a centre where they have one, and not for the class counts
    after = sigma / math.sqrt(1 - 1 / CENTRE**2)
    for rows, origin, left, words in (
        (moved, centre, after, "centred"), (x, torch.zeros(x.shape[1]), sigma, "not centred")
    ):  # fmt: skip
        fitted = descend(rows, y, classes, left, settings, seed)
        for (path, clip), (weight, bias) in zip(settings, fitted, strict=True):
            for share in BALANCES:
                name = f"{words} path {path / length:g} C {clip:g} balance {share:g}"
                yield name, (weight, bias - share * torch.from_numpy(exact).float(), origin)
    yield from solve(x, y, classes, sigma, seed)
    mean = x.mean(0)
    ((weight, bias),) = descend(
        recentre_rows(x, mean), y, classes, 0.0, [(max(4 * length, 100.0), 1e6)], seed
    )
    yield "not private", (weight, bias, mean)


def released_centre(x: Tensor, sigma: float, seed: int) -> Tensor:
    """Simulate the release of the mean of the features: :mod:`dpbam.app.runs.first_release`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    n, d = x.shape
    noised = x.mean(0) + sigma / n * torch.randn(d, generator=generator)
    return torch.from_numpy(shrunk(noised.double().numpy(), sigma / n)).float()


def _scores(head: Head, held: tuple[Tensor, ...]) -> list[float]:
    """Return accuracy on validation records; accuracy and balanced accuracy on test records."""
    weight, bias, centre = head
    valid_x, valid_y, test_x, test_y = _moved(held, centre)
    valid = ((valid_x @ weight + bias).argmax(1) == valid_y).double().mean()
    right = ((test_x @ weight + bias).argmax(1) == test_y).double()
    by_class = torch.stack([right[test_y == c].mean() for c in sorted(set(test_y.tolist()))]).mean()
    return [round(100 * v.item(), 2) for v in (valid, right.mean(), by_class)]


@lru_cache(2)  # tensors are told apart by identity, and many heads share a centre
def _moved(held: tuple[Tensor, ...], centre: Tensor) -> tuple[Tensor, ...]:
    valid_x, valid_y, test_x, test_y = held
    if not centre.any():
        return held
    return recentre_rows(valid_x, centre), valid_y, recentre_rows(test_x, centre), test_y


def descend(
    x: Tensor, y: Tensor, classes: int, sigma: float, settings: Sequence[tuple[float, float]],
    seed: int,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Simulate :func:`dpbam.heads.fit_by_descent` for several pairs of L and C at once.

    Without noise (sigma 0) the gradient is not clipped, and lr = L / T.
    """
    generator = torch.Generator().manual_seed(seed)
    (n, d), count = x.shape, len(settings)
    length, clip = (torch.tensor([s[k] for s in settings]) for k in (0, 1))
    lr = length / (STEPS * clip) if sigma else length / STEPS
    inputs = torch.nn.functional.pad(HEAD_SCALE * x, (0, 1), value=1.0)
    norms = inputs.norm(dim=1)[:, None]
    targets = torch.nn.functional.one_hot(y, classes).float()[:, None]
    weight = torch.zeros(d + 1, count, classes)
    velocity, mean = torch.zeros_like(weight), torch.zeros_like(weight)
    first = round(STEPS * (1 - AVERAGE))
    for step in range(STEPS):
        outputs = (inputs @ weight.flatten(1)).view(n, count, classes)
        residual = torch.softmax(outputs, 2) - targets
        factors = (clip / (residual.norm(dim=2) * norms).clamp(min=1e-12)).clamp(max=1.0)
        clipped = inputs.T @ (residual * factors[:, :, None]).flatten(1)
        noise = torch.randn(d + 1, 1, classes, generator=generator)
        noised = clipped.view_as(weight) + sigma * math.sqrt(STEPS) * clip[:, None] * noise
        velocity = MOMENTUM * velocity + noised / n
        weight = weight - lr[:, None] * velocity
        if step >= first:
            mean += (weight - mean) / (step - first + 1)
    return [(HEAD_SCALE * mean[:-1, k], mean[-1, k]) for k in range(count)]


def solve(
    x: Tensor, y: Tensor, classes: int, sigma: float, seed: int
) -> Iterator[tuple[str, Head]]:
    """Simulate the closed-form head for some regularisers, balanced and not."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.nn.functional.pad(x, (0, 1), value=1.0) / math.sqrt(2)
    d, std = inputs.shape[1], sigma * BOUND
    raw = torch.randn(d, d, generator=generator)
    gram = inputs.T @ inputs + std / GRAM_WEIGHT * (raw + raw.T) / 2
    cross = inputs.T @ class_targets(y, classes)
    cross += std * torch.randn(d, classes, generator=generator)
    deviation = math.sqrt(1 - 1 / classes)
    shares = cross[-1] * math.sqrt(2) * deviation / len(x) + 1 / classes
    shares = shares.clamp(min=0.2 / classes)
    values, vectors = torch.linalg.eigh(gram)
    for ridge in RIDGES:
        penalty = ridge * std / GRAM_WEIGHT * math.sqrt(2 * d)
        solved = vectors @ ((vectors.T @ cross) / (values.clamp(min=0) + penalty)[:, None])
        weight = solved[:-1] * deviation / math.sqrt(2)
        bias = solved[-1] * deviation / math.sqrt(2) + 1 / classes
        origin = torch.zeros(len(weight))
        yield f"closed form, ridge {ridge:g}", (weight, bias, origin)
        yield f"closed form, ridge {ridge:g}, balanced", (weight / shares, bias / shares, origin)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), Path(sys.argv[2]))
