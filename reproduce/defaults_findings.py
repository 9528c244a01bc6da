"""The defaults of findings (multi-label): the rule against a grid, on digits with four attributes.

Attributes of a digit are its findings: even, prime, at least five, with a closed loop. As in
:mod:`reproduce.defaults`, heads are simulated; the alternative is selected on validation records
and compared with the rule on test records, by the mean accuracy over the findings.

    python -m reproduce.defaults_findings FEATURES RESULTS       (resumes)
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from dpbam.auto import AVERAGE, MOMENTUM, STEPS, Facts, choose, single_release_sigma
from dpbam.features import HEAD_SCALE, recentre_rows
from reproduce.defaults import (
    EPSILONS,
    Record,
    Split,
    append_records,
    load,
    released_centre,
    remaining_sigma,
    training_rows,
)

ATTRIBUTES = {
    "even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "at least five": (5, 6, 7, 8, 9),
    "loop": (0, 6, 8, 9),
}  # fmt: skip
PATHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the rule's
CLIPS = (0.3, 1.0, 3.0, 10.0)  # times the rule's
SEEDS = (0, 1, 2)


def findings_of(digits: Tensor) -> Tensor:
    """Return float [N, 4], one column per attribute."""
    columns = [torch.isin(digits, torch.tensor(having)) for having in ATTRIBUTES.values()]
    return torch.stack(columns, dim=1).float()


def descend(
    x: Tensor, y: Tensor, sigma: float, length: float, clip: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Simulate full-batch private descent on the mean of the findings' cross-entropies."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.nn.functional.pad(HEAD_SCALE * x, (0, 1), value=1.0)
    norms = inputs.norm(dim=1, keepdim=True)
    weight = torch.zeros(inputs.shape[1], y.shape[1])
    velocity, mean = torch.zeros_like(weight), torch.zeros_like(weight)
    first = round(STEPS * (1 - AVERAGE))
    for step in range(STEPS):
        residual = (torch.sigmoid(inputs @ weight) - y) / y.shape[1]
        factors = (clip / (residual.norm(dim=1, keepdim=True) * norms).clamp(min=1e-12)).clamp(
            max=1
        )
        noise = torch.randn(weight.shape, generator=generator)
        noised = inputs.T @ (residual * factors) + sigma * math.sqrt(STEPS) * clip * noise
        velocity = MOMENTUM * velocity + noised / len(x)
        weight = weight - length / (STEPS * clip) * velocity
        if step >= first:
            mean += (weight - mean) / (step - first + 1)
    return HEAD_SCALE * mean[:-1], mean[-1]


def simulated(split: Split, cell: Record) -> Record:
    """Return the mean accuracy over the findings on validation and test records, by setting."""
    n = min(cell["n"], len(split.x))
    choice = choose(
        Facts(
            n=n, epsilon=cell["epsilon"], image_shape=(1, 8, 8), classes=len(ATTRIBUTES),
            task="multi-label",
        )
    )  # fmt: skip
    assert choice.release_centre is not None
    sigma = single_release_sigma(cell["epsilon"], choice.delta)
    remaining = remaining_sigma(sigma, choice.release_centre)
    length = choice.lr * choice.clip_norm * choice.steps
    held_out = [(split.valid_x, split.valid_y), (split.test_x, split.test_y)]
    scores: dict[str, list[list[float]]] = defaultdict(list)
    for seed in SEEDS:
        x, digits = training_rows(split, n, seed)
        centre = released_centre(x, choice.release_centre, seed)
        for path in PATHS:
            for clip in CLIPS:
                weight, bias = descend(
                    recentre_rows(x, centre), findings_of(digits), remaining, path * length,
                    clip * choice.clip_norm, seed,
                )  # fmt: skip
                accuracies = []
                for rows, labels in held_out:
                    predicted = recentre_rows(rows, centre) @ weight + bias > 0
                    right = predicted == findings_of(labels).bool()
                    accuracies.append(round(100 * right.double().mean().item(), 2))
                scores[f"path {path:g} C {clip:g}"].append(accuracies)
    shares = findings_of(split.test_y).mean(0)
    constant = torch.maximum(shares, 1 - shares).mean().item()
    return {"d": split.x.shape[1], "constant": round(100 * constant, 2), "scores": dict(scores)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cells = [
        {"source": "digits", "features": kind, "n": n, "epsilon": epsilon}
        for kind in ("scattering", "mobilenet")
        for n in (500, 1150)
        for epsilon in EPSILONS
    ]
    append_records(
        Path(sys.argv[2]), cells, lambda c: simulated(load(folder, c["source"], c["features"]), c)
    )
