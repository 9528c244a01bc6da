"""The records that chose the constants of the rule of :mod:`dpbam.auto`: validation records alone.

For the sources of :data:`reproduce.defaults.FITTED`: a finer grid over the path's length, C and the
balance, with the centre as the rule has it. A record has the accuracy on validation records, which
are held out of the training records. No test record is read.

    python -m reproduce.defaults_fit FEATURES RESULTS       (resumes; a record is computed once)
    python -m reproduce.defaults_fit RESULTS                (prints what each constant would lose)
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch

from dpbam.auto import Facts, choose, single_release_sigma
from dpbam.features import recentre_rows
from dpbam.privacy.plan import default_delta
from reproduce.defaults import (
    FITTED,
    Record,
    Split,
    append_records,
    cells,
    descend,
    load,
    log_shares,
    released_centre,
    remaining_sigma,
    training_rows,
)

UNIT = 0.012  # lengths of the path are this times n / sigma_1, times one of LENGTHS
LENGTHS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
CLIPS = (1.0, 3.0)
BALANCES = (0.0, 0.25, 0.5, 1.0)
SEEDS = (0, 1)


def validated(split: Split, cell: Record) -> Record:
    """Return the accuracy on validation records by path, C and balance, mean over the seeds."""
    n, classes = min(cell["n"], len(split.x)), split.classes
    facts = Facts(n=n, epsilon=cell["epsilon"], image_shape=(1, 1, 1), classes=classes)
    choice = choose(facts)
    assert choice.release_counts is not None
    assert choice.release_centre is not None
    sigma = single_release_sigma(cell["epsilon"], choice.delta)
    remaining = remaining_sigma(sigma, choice.release_counts, choice.release_centre)
    settings = [(UNIT * n / sigma * length, clip) for length in LENGTHS for clip in CLIPS]
    scores: dict[str, list[float]] = defaultdict(list)
    for seed in SEEDS:
        x, y = training_rows(split, n, seed)
        centre = released_centre(x, choice.release_centre, seed)
        valid_x = recentre_rows(split.valid_x, centre)
        fitted = descend(recentre_rows(x, centre), y, classes, remaining, settings, seed)
        prior = log_shares(y, classes)
        for (length, clip), (weight, bias) in zip(settings, fitted, strict=True):
            outputs = valid_x @ weight + bias
            for share in BALANCES:
                right = (outputs - share * prior).argmax(1) == split.valid_y
                name = f"{length * sigma / n / UNIT:.2f} {clip:g} {share:g}"
                scores[name].append(100 * right.double().mean().item())
    means = {name: round(float(np.mean(values)), 2) for name, values in scores.items()}
    return {"d": split.x.shape[1], "classes": classes, "trained_on": n, "scores": means}


def length_by(classes: int, signal: float, factor: float, by_classes: float, bent: float) -> float:
    """Return a path in multiples of UNIT n / sigma_1; ``bent`` lowers it where that is large."""
    return float(factor * (classes / 10) ** by_classes * (signal / 300) ** -bent)


def loss(record: Record, length: float, clip: float, share: float) -> float:
    """Return how far a setting is from the cell's best, in points; between lengths by log."""
    scores = record["scores"]
    row = [scores[f"{one:.2f} {clip:g} {share:g}"] for one in LENGTHS]
    between = float(np.interp(np.log(length), np.log(LENGTHS), row))
    return float(max(scores.values())) - between


def table(records: Sequence[Record]) -> str:
    """Return the twenty settings with the least loss on validation records, mean and worst."""
    rows = []
    grid = product(CLIPS, BALANCES, (0.8, 1.0, 1.2, 1.4, 1.7), (0.0, 0.2, 0.33, 0.5), (0.0, 0.12))
    for clip, share, factor, by_classes, bent in grid:
        losses = []
        for r in records:
            sigma = single_release_sigma(r["epsilon"], default_delta(r["trained_on"]))
            signal = r["trained_on"] / sigma
            length = length_by(r["classes"], signal, factor, by_classes, bent)
            losses.append(loss(r, length, clip, share if r["classes"] > 2 else 0.5))
        rows.append((np.mean(losses), max(losses), clip, share, factor, by_classes, bent))
    lines = ["  mean  worst  C, balance, factor, exponent of classes / 10, less than linear by"]
    for mean, worst, *setting in sorted(rows)[:20]:
        lines.append(f"{mean:6.2f} {worst:6.2f}  {', '.join(f'{one:g}' for one in setting)}")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
    else:
        folder, results = Path(sys.argv[1]), Path(sys.argv[2])
        wanted = (cell for cell in cells(folder) if cell["source"] in FITTED and cell["n"] <= 500)
        append_records(
            results, wanted, lambda c: validated(load(folder, c["source"], c["features"]), c)
        )
