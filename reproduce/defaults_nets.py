"""Would a net that learns its features be better than a head on scattering? 8,000 records.

MNIST and Fashion-MNIST at 28x28, epsilon 8: ``auto``, and nets from scratch with averaged weights,
with and without augmented views, at three learning rates. All are scored on test records, and the
nets' best rate may be taken by these scores: that favours the nets.

    python -m reproduce.defaults_nets DATA RESULTS           (resumes; DATA has mnist and fashion)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dpbam.data import DataSet, from_arrays
from reproduce.defaults import Record, append_records, train_cell

FOLDER = "DPBAM_DEFAULTS"  # where reproduce.defaults_data wrote its files
N, TEST = 8000, 2000
RATES = (0.005, 0.01)
NET = {"batch_size": 1000, "swa": 0.5}  # NAdam and C = 1 are the defaults


def mnist(split: str) -> DataSet:
    return _first("mnist", split, N if split == "train" else TEST)


def fashion(split: str) -> DataSet:
    return _first("fashion", split, N if split == "train" else TEST)


def _first(source: str, split: str, count: int) -> DataSet:
    with np.load(Path(os.environ[FOLDER]) / f"{source}-{split}.npz") as values:
        x, y = values["x"][:count], values["y"][:count]
    names = [str(k) for k in range(10)]
    return from_arrays(x, y.astype(str), name=f"{source}/{split}", class_names=names)


def cells() -> Iterator[Record]:
    for source in ("mnist",):
        flip = "none" if source == "mnist" else "horizontal"
        views = {"augment_multiplicity": 2, "shift": 2, "flip": flip, "epochs": 5.0}
        common = {"source": source, "n": N, "epsilon": 8.0, "seed": 0}
        yield common | {"setting": {"model": "auto"}}
        for lr in RATES:
            yield common | {"setting": {"model": "small-cnn", "lr": lr, "epochs": 10.0, **NET}}
        yield common | {"setting": {"model": "small-cnn", "lr": RATES[1], **views, **NET}}


def trained(cell: Record) -> Record:
    """Train one cell, and return its accuracy in percent; seconds are of processor time."""
    began = time.process_time()
    result = train_cell(f"reproduce.defaults_nets:{cell['source']}", cell)
    return {
        "accuracy": round(100 * float(result.score), 2), "spent": result.epsilon,
        "seconds": round(time.process_time() - began),
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ[FOLDER] = sys.argv[1]
    append_records(Path(sys.argv[2]), cells(), trained)
