"""What to train of a public encoder next to the head, and how: low-rank updates and norm layers.

The setting of ``desk/encoder-lora``: a small ConvNeXt that saw five classes of CIFAR-10 without
privacy (``python examples/public_encoder.py encoder``), the other five classes as private records
at 16x16. A thousand of the 5,000 training records are for validation: they select the learning
rate. Test records are scored once, and select nothing.

Alternatives, all next to the head, by NAdam with averaged weights:

* ``A and B``: both factors, as initialised by peft (A uniform, B = 0);
* ``A and B, A four times``: the same product, split otherwise: A four times as large at first;
* ``B alone``: A fixed, with orthonormal rows, so that clipping does not depend on the split;
* ``norms``: scales and shifts of the norm layers;
* ``head by the rule``: features fixed, the head by :mod:`dpbam.auto`.

    python -m reproduce.defaults_lora ENCODER RESULTS        (resumes: no record is computed twice)
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dpbam.auto import Facts, choose, single_release_sigma
from dpbam.data import to_float
from dpbam.features import make_features, standardise_rows
from dpbam.nn import PublicEncoder, load_encoder, train_part
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.plan import PrivacyPlan, default_delta
from dpbam.training.averaging import WeightAverage, dense
from reproduce.defaults import Record, Split, append_records, heads, scores_of
from reproduce.encoder_data import cifar10_last_five

RANK = 8
VALIDATION = 1000
BATCHES = 10  # n over the batch size
STEPS = 40
CLIP_NORM = 1.0
RATES = (0.005, 0.0125, 0.03, 0.075)
FACTORS = ("B alone", "A and B", "A and B, A four times")


def cells() -> Iterator[Record]:
    """Yield the factors with three seeds, the head by the rule, then other n, epsilon and parts."""
    for seed in range(3):
        for part in FACTORS:
            for lr in RATES[:3]:
                yield {"part": part, "n": 2000, "epsilon": 3.0, "lr": lr, "seed": seed}
    settings = [(2000, 3.0), (2000, 8.0), (2000, 1.0)]
    for n, epsilon in settings:
        yield {"part": "head by the rule", "n": n, "epsilon": epsilon, "lr": 0.0, "seed": 0}
    for n, epsilon in settings:
        for lr in RATES:
            yield {"part": "B alone", "n": n, "epsilon": epsilon, "lr": lr, "seed": 0}
    for lr in RATES:
        yield {"part": "norms", "n": 2000, "epsilon": 3.0, "lr": lr, "seed": 0}


@cache
def records() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels to train and validate on, in one fixed order, and of the test."""
    values: list[Tensor] = []
    for part in ("train", "test"):
        data = cifar10_last_five(part)
        pixels, labels = data.batch(torch.arange(len(data)))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        values += [to_float(pixels)[order], torch.as_tensor(labels)[order].long()]
    return values[0], values[1], values[2], values[3]


def make_model(encoder: Path, part: str, seed: int) -> PublicEncoder:
    """Return the encoder with a new head, and ``part`` of it trainable."""
    torch.manual_seed(seed)
    model = load_encoder(f"hf:{encoder}", image_shape=(3, 16, 16), num_outputs=5)
    if part == "norms":
        train_part(model, "norms")
        return model
    model.add_lora(RANK)
    train_part(model, "lora")
    for name, parameter in model.named_parameters():
        if "lora_A" in name and part != "B alone":
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))  # as peft does
            parameter.requires_grad_(True)
        if "lora_A" in name and part == "A and B, A four times":
            parameter.data.mul_(4)
    return model


def trained(encoder: Path, cell: Record) -> Record:
    """Train one cell with its noise, and return the accuracy on validation and test records."""
    x, y, test_x, test_y = records()
    n, epsilon, seed = cell["n"], cell["epsilon"], cell["seed"]
    delta = default_delta(n)
    if cell["part"] == "head by the rule":
        return _by_rule(encoder, n, epsilon, delta)
    model = make_model(encoder, cell["part"], seed)
    start = VALIDATION + seed * n if VALIDATION + (seed + 1) * n <= len(x) else VALIDATION
    rows = (x[start : start + n], y[start : start + n])
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon, delta=delta, n=n, batch_size=n // BATCHES, steps=STEPS,
        clip_norm=CLIP_NORM,
    )  # fmt: skip
    oracle = PrivateGradientOracle(model, nn.CrossEntropyLoss(reduction="none"), plan, seed=seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.NAdam(parameters, lr=cell["lr"])
    average = WeightAverage(model, dense(STEPS // 2))
    for inputs, targets, units in oracle.batches(rows):
        step = oracle.step
        oracle.backward(inputs, targets, units)
        optimizer.step()
        average.update(step)
    with average.applied():
        frozen = copy.deepcopy(model).eval()
    scores = [
        _accuracy(frozen, *part) for part in ((x[:VALIDATION], y[:VALIDATION]), (test_x, test_y))
    ]
    count = sum(p.numel() for p in parameters)
    return {"trained": count, "validation": scores[0], "test": scores[1]}


@torch.no_grad()
def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    right = torch.cat([model(rows).argmax(1) for rows in torch.split(x, 500)]) == y
    return round(100 * right.double().mean().item(), 2)


@cache
def _features(encoder: Path) -> tuple[Tensor, Tensor]:
    x, _, test_x, _ = records()
    features = make_features(f"hf:{encoder}", (3, 16, 16))
    return standardise_rows(features.extract(x)), standardise_rows(features.extract(test_x))


def _by_rule(encoder: Path, n: int, epsilon: float, delta: float) -> Record:
    _, y, _, test_y = records()
    rows, test_rows = _features(encoder)
    k = VALIDATION
    split = Split(rows[k:], y[k:], rows[:k], y[:k], test_rows, test_y)
    choice = choose(Facts(n=n, epsilon=epsilon, delta=delta, image_shape=(3, 16, 16), classes=5))
    sigma = single_release_sigma(epsilon, delta)
    scores = []
    for seed in range(3):
        start = seed * n if (seed + 1) * n <= len(split.x) else 0
        used = slice(start, start + n)
        _, (weight, bias, centre) = next(
            heads(split.x[used], split.y[used], 5, choice, sigma, seed)
        )
        scores.append(scores_of((weight, bias, centre), split)[:2])
    means = torch.tensor(scores).mean(0)
    return {"trained": 5 * (rows.shape[1] + 1), "validation": round(means[0].item(), 2),
            "test": round(means[1].item(), 2), "seeds": len(scores)}  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    encoder, results = Path(sys.argv[1]), Path(sys.argv[2])
    append_records(results, cells(), lambda cell: trained(encoder, cell))
