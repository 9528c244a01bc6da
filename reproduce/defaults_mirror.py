"""Whether scattering averages over the mirror image: scored on validation records.

500 records of a source train a head by the rule, with and without the average, and 750 others score
it. No test record is read. A source in colour and three that are grey decide on the default of
:class:`dpbam.features.ScatteringFeatures`; digits have 8 pixels, and are enlarged.

    python -m reproduce.defaults_mirror DATA RESULTS SOURCE ...       (resumes)

DATA holds SOURCE-train.npz of :mod:`reproduce.defaults_data`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpbam.auto import Facts, choose, single_release_sigma
from dpbam.data import to_float
from dpbam.features import ScatteringFeatures, recentre_rows, standardise_rows
from reproduce.defaults import (
    EPSILONS,
    Record,
    append_records,
    descend,
    released_centre,
    remaining_sigma,
)

N, VALIDATION = 500, 750
SEEDS = (0, 1)


@lru_cache(2)
def features_of(path: Path, mirror: bool) -> tuple[Tensor, Tensor]:
    with np.load(path) as values:
        x, y = (values[name][: N + VALIDATION] for name in ("x", "y"))
    features = ScatteringFeatures(x.shape[1:], mirror=mirror)
    return standardise_rows(features.extract(to_float(torch.from_numpy(x)))), torch.from_numpy(y)


def scored(folder: Path, cell: Record) -> Record:
    """Return the rule's accuracy on validation records, mean over the seeds."""
    mirror = cell["features"] == "mirrored"
    x, y = features_of(folder / f"{cell['source']}-train.npz", mirror)
    classes = int(y.max()) + 1
    choice = choose(Facts(n=N, epsilon=cell["epsilon"], image_shape=(1, 1, 1), classes=classes))
    assert choice.release_counts is not None
    assert choice.release_centre is not None
    sigma = single_release_sigma(cell["epsilon"], choice.delta)
    remaining = remaining_sigma(sigma, choice.release_counts, choice.release_centre)
    setting = (choice.lr * choice.clip_norm * choice.steps, choice.clip_norm)
    accuracies = []
    for seed in SEEDS:
        centre = released_centre(x[:N], choice.release_centre, seed)
        rows = recentre_rows(x, centre)
        ((weight, bias),) = descend(rows[:N], y[:N], classes, remaining, [setting], seed)
        right = (rows[N:] @ weight + bias).argmax(1) == y[N:]
        accuracies.append(100 * right.double().mean().item())
    return {"d": x.shape[1], "accuracy": round(float(np.mean(accuracies)), 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, results, *sources = sys.argv[1:]
    cells = [
        {"source": source, "features": kind, "n": N, "epsilon": epsilon}
        for source in sources
        for kind in ("mirrored", "not mirrored")
        for epsilon in EPSILONS
    ]
    append_records(Path(results), cells, lambda cell: scored(Path(folder), cell))
