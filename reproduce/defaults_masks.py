"""The defaults of segmentation: what ``auto`` takes, against a grid that validation records choose.

Emoji on patches of photographs, 16x16: which pixels are the emoji's? 500 records to train on. Each
setting is a run of ``dpbam train`` with a seed, scored by Dice: with the tuning set on 500 other
training records, with the real set on test records, of other emoji and other places.

    python -m reproduce.defaults_masks DATA RESULTS          (resumes; DATA has emoji and textures)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.data import DataSet, from_arrays
from reproduce.defaults import Record, append_records, train_cell

FOLDER = "DPBAM_DEFAULTS"  # where reproduce.defaults_data wrote its files
N = 500
GRID = ((20.0, 0.002), (20.0, 0.005), (20.0, 0.0125), (40.0, 0.005))  # epochs and rates
EPSILONS = (3.0,)


def masks(split: str) -> DataSet:
    """Return 500 records to train on, or 500 test records."""
    return _composed("train", 0) if split == "train" else _composed("test", 0)


def masks_tuning(split: str) -> DataSet:
    """Return the same records to train on, or 500 other training records to choose by."""
    return _composed("train", 0 if split == "train" else N)


def _composed(part: str, start: int) -> DataSet:
    emoji, photographs = (_halved(name, part, start) for name in ("emoji", "textures"))
    is_drawn = (emoji < 250).any(dim=1, keepdim=True)  # emoji are on white
    pixels = torch.where(is_drawn, emoji, photographs).round().byte().numpy()
    return from_arrays(
        pixels, is_drawn[:, 0].byte().numpy(), name=f"masks/{part}/{start}",
        class_names=["photograph", "emoji"], task="segmentation",
    )  # fmt: skip


def _halved(source: str, part: str, start: int) -> Tensor:
    path = Path(os.environ[FOLDER]) / f"{source}-{part}.npz"
    return F.avg_pool2d(torch.from_numpy(np.load(path)["x"][start : start + N]).float(), 2)


def cells() -> Iterator[Record]:
    """Yield auto's defaults on test records, then the grid on validation records."""
    for epsilon in EPSILONS:
        for seed in range(3):
            yield {"data": "masks", "epsilon": epsilon, "seed": seed, "setting": {"model": "auto"}}
    for epsilon in EPSILONS:
        for epochs, lr in GRID:
            setting = {"model": "unet", "epochs": epochs, "lr": lr, "swa": 0.5}
            yield {"data": "masks_tuning", "epsilon": epsilon, "seed": 0, "setting": setting}


def chosen(records: list[Record]) -> Iterator[Record]:
    """Yield the settings that did best on validation records, to be scored on test records."""
    for epsilon in EPSILONS:
        tuned = [r for r in records if r["data"] == "masks_tuning" and r["epsilon"] == epsilon]
        best = max(tuned, key=lambda record: float(record["dice"]))
        for seed in range(3):
            yield {"data": "masks", "epsilon": epsilon, "seed": seed, "setting": best["setting"]}


def trained(cell: Record) -> Record:
    """Train one cell, and return its Dice in percent."""
    result = train_cell(f"reproduce.defaults_masks:{cell['data']}", cell)
    part = ("test", 0) if cell["data"] == "masks" else ("train", N)
    share = (_halved("emoji", *part) < 250).any(dim=1).double().mean().item()
    return {
        "dice": round(100 * float(result.score), 2), "spent": result.epsilon,
        "constant": round(200 * share / (1 + share), 2),  # every pixel an emoji's
    }  # fmt: skip


if __name__ == "__main__":
    from json import loads

    torch.set_num_threads(1)
    os.environ[FOLDER] = sys.argv[1]
    results = Path(sys.argv[2])
    append_records(results, cells(), trained)
    append_records(results, chosen([loads(line) for line in results.open()]), trained)
