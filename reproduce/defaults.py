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
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbam.app.runs import RunConfig, RunResult, execute
from dpbam.app.runs.first_release import offsets, shrunk
from dpbam.auto import (
    AVERAGE,
    GRAM_WEIGHT,
    MOMENTUM,
    STEPS,
    Choice,
    Facts,
    choose,
    single_release_sigma,
)
from dpbam.features import HEAD_SCALE, recentre_rows
from dpbam.heads.closed_form import BOUND, class_targets

Record = dict[str, Any]
Head = tuple[Tensor, Tensor, Tensor]  # weight [D, K], bias [K], centre of the features [D]

# sources whose records chose something of the rule; see docs/how-good.md for what each chose
FITTED = ("cifar10", "digits", "fashion", "icons", "letters", "pneumonia")
PATHS = (0.5, 1.0, 2.0, 4.0)  # times the rule's
CLIPS = (1.0, 3.0)
BALANCES = (0.0, 0.5, 1.0)
RIDGES = (0.03, 0.1)
EPSILONS = (1.0, 3.0, 8.0)
SEEDS, SEEDS_OF_MANY = 5, 2  # of at most 1,000 records, and of more
# numbers of records; 500 alone for the sources that chose something, which do not judge the rule
SIZES = dict.fromkeys(("cifar10", "digits", "fashion", "icons", "letters", "pneumonia"), (500,)) | {
    "emoji": (500, 2000), "faces": (96,), "kana": (500, 2000), "mnist": (500, 2000, 8000),
    "sketches": (500, 2000, 7740), "textures": (500, 1920), "tiles": (500, 1936),
}  # fmt: skip
FEATURES = ("mobilenet", "scattering")
_HELD_OUT = 2000  # validation records, and test records, at most


@dataclass(frozen=True, eq=False)
class Split:
    """Features and labels of a source: to train on, of validation, and of test records."""

    x: Tensor
    y: Tensor
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def classes(self) -> int:
        return int(max(labels.max() for labels in (self.y, self.valid_y, self.test_y))) + 1


def append_records(
    results: Path, cells: Iterable[Record], compute: Callable[[Record], Record]
) -> None:
    """Compute all cells that have no record yet; one line per finished cell."""
    known = [json.loads(line) for line in results.open()] if results.exists() else []
    for cell in cells:
        if any(cell.items() <= record.items() for record in known):
            continue
        record = cell | compute(cell)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


def train_cell(data: str, cell: Record) -> RunResult:
    """Train on ``data`` with a cell's setting by the command's own code; keep no run folder."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            data=data, epsilon=cell["epsilon"], seed=cell["seed"], eval_every=1000,
            **cell["setting"],
        )  # fmt: skip
        return execute(config, Path(folder) / "run")


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


@lru_cache(2)
def load(folder: Path, source: str, kind: str) -> Split:
    """Read a source's features; the last fifth of the training records are for validation.

    At most 2,000 of these, and of the test records.
    """
    tensors = []
    for part in ("train", "test"):
        x = torch.tensor(np.load(folder / f"{source}-{part}-{kind}.npy"))
        y = torch.tensor(np.load(folder / f"{source}-{part}-labels.npy"))[: len(x)].long()
        tensors += [x, y]
    x, y, test_x, test_y = tensors
    held_out = min(_HELD_OUT, len(x) // 5)
    return Split(
        x[:-held_out], y[:-held_out], x[-held_out:], y[-held_out:], test_x[:_HELD_OUT],
        test_y[:_HELD_OUT],
    )  # fmt: skip


def training_rows(split: Split, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return n records to train on, other ones for each seed where there are enough."""
    start = seed * n if (seed + 1) * n <= len(split.x) else 0
    return split.x[start : start + n], split.y[start : start + n]


def simulated(split: Split, cell: Record) -> Record:
    """Return accuracies on validation and test records, by alternative, one row per seed."""
    n, classes = min(cell["n"], len(split.x)), split.classes
    # the rule does not use the shape of the images, nor which encoder it is
    choice = choose(Facts(n=n, epsilon=cell["epsilon"], image_shape=(1, 1, 1), classes=classes))
    sigma = single_release_sigma(cell["epsilon"], choice.delta)
    scores: dict[str, list[list[float]]] = {}
    for seed in range(SEEDS if n <= 1000 else SEEDS_OF_MANY):
        x, y = training_rows(split, n, seed)
        for name, head in heads(x, y, classes, choice, sigma, seed):
            scores.setdefault(name, []).append(scores_of(head, split))
    constant = float(torch.bincount(split.test_y).max() / len(split.test_y))
    return {
        "d": split.x.shape[1], "classes": classes, "trained_on": n, "rule": rule_of(choice),
        "constant": round(100 * constant, 2), "scores": scores,
    }  # fmt: skip


def rule_of(choice: Choice) -> Record:
    """Return the settings of the rule that bear on accuracy."""
    names = ("steps", "clip_norm", "lr", "release_counts", "release_centre", "balance")
    return {name: getattr(choice, name) for name in names}


def heads(
    x: Tensor, y: Tensor, classes: int, choice: Choice, sigma: float, seed: int
) -> Iterator[tuple[str, Head]]:
    """Yield the rule's head, the alternatives, and one without privacy (``not private``)."""
    n, length = len(x), choice.lr * choice.clip_norm * choice.steps
    assert choice.release_counts is not None
    assert choice.release_centre is not None
    noise = choice.release_counts * np.random.default_rng(seed).standard_normal(classes)
    noised = np.bincount(y.numpy(), minlength=classes) + noise
    centre = released_centre(x, choice.release_centre, seed)
    moved = recentre_rows(x, centre)
    remaining = remaining_sigma(sigma, choice.release_counts, choice.release_centre)
    ((weight, bias),) = descend(moved, y, classes, remaining, [(length, choice.clip_norm)], seed)
    shift = torch.from_numpy(offsets(noised, choice.release_counts, n, choice.balance)).float()
    yield "rule", (weight, bias - shift, centre)
    prior = log_shares(y, classes)
    settings = [(length * p, c) for p in PATHS for c in CLIPS]
    # the alternatives pay for a centre where they have one, and not for the class counts
    after = remaining_sigma(sigma, choice.release_centre)
    for rows, origin, left, words in (
        (moved, centre, after, "centred"), (x, torch.zeros(x.shape[1]), sigma, "not centred")
    ):  # fmt: skip
        fitted = descend(rows, y, classes, left, settings, seed)
        for (path, clip), (weight, bias) in zip(settings, fitted, strict=True):
            for share in BALANCES:
                name = f"{words} path {path / length:g} C {clip:g} balance {share:g}"
                yield name, (weight, bias - share * prior, origin)
    if x.shape[1] <= 1000:  # by scattering it takes most of the time, and never was the best
        yield from solve(x, y, classes, sigma, seed)
    mean = x.mean(0)
    ((weight, bias),) = descend(
        recentre_rows(x, mean), y, classes, 0.0, [(max(4 * length, 100.0), 1e6)], seed
    )
    yield "not private", (weight, bias, mean)


def remaining_sigma(sigma: float, *spent: float) -> float:
    """Return the noise multiplier that is left of sigma: precisions of Gaussian releases add up."""
    return 1 / math.sqrt(1 / sigma**2 - sum(1 / one**2 for one in spent))


def log_shares(y: Tensor, classes: int) -> Tensor:
    """Return log pi_k of the labels themselves, without noise; at least a fifth of uniform."""
    shares = np.bincount(y.numpy(), minlength=classes) / len(y)
    return torch.from_numpy(np.log(np.maximum(shares, 0.2 / classes))).float()


def released_centre(x: Tensor, sigma: float, seed: int) -> Tensor:
    """Simulate the release of the mean of the features: :mod:`dpbam.app.runs.first_release`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    n, d = x.shape
    noised = x.mean(0) + sigma / n * torch.randn(d, generator=generator)
    return torch.from_numpy(shrunk(noised.double().numpy(), sigma / n)).float()


def scores_of(head: Head, split: Split) -> list[float]:
    """Return accuracy on validation records; accuracy and balanced accuracy on test records."""
    weight, bias, centre = head
    valid_x, test_x = _moved(split, centre)
    valid = ((valid_x @ weight + bias).argmax(1) == split.valid_y).double().mean()
    right = ((test_x @ weight + bias).argmax(1) == split.test_y).double()
    by_class = [right[split.test_y == c].mean() for c in sorted(set(split.test_y.tolist()))]
    means = (valid, right.mean(), torch.stack(by_class).mean())
    return [round(100 * mean.item(), 2) for mean in means]


@lru_cache(2)  # tensors are told apart by identity, and many heads share a centre
def _moved(split: Split, centre: Tensor) -> tuple[Tensor, Tensor]:
    if not centre.any():
        return split.valid_x, split.test_x
    return recentre_rows(split.valid_x, centre), recentre_rows(split.test_x, centre)


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
    folder = Path(sys.argv[1])
    append_records(
        Path(sys.argv[2]), cells(folder),
        lambda cell: simulated(load(folder, cell["source"], cell["features"]), cell),
    )  # fmt: skip
