"""The pocket versions of the paper's data: real images, made small enough for two cores.

Each function is a data set as ``--data module:function`` takes it: called with "train" or "test".
The ``_tuning`` ones hold a part of the *training* set out as their test set, so that settings can
be chosen without a look at the test set. Halving takes seconds, so the result is kept.

Example:
    >>> import numpy as np
    >>> halved(np.array([[[[0, 2], [4, 6]]]], dtype=np.uint8))
    array([[[[3]]]], dtype=uint8)
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data import DataError, DataSet, data_root, from_arrays, load

Images = NDArray[np.uint8]
HELD_OUT = 10  # every tenth training image serves as the test set of tuning
PNEUMONIA = "DPBAM_PNEUMONIA"


@cache
def cifar10(split: str) -> DataSet:
    """CIFAR-10 halved to 16x16: all 50,000 and 10,000 images."""
    return _halved_set(load("cifar10", split=split))


@cache
def cifar10_first(split: str) -> DataSet:
    """The same, of the training set the first 10,000 images."""
    dataset = load("cifar10", split=split)
    few = np.arange(10_000) if split == "train" else np.arange(len(dataset))
    return _halved_set(dataset, few)


@cache
def cifar10_tuning(split: str) -> DataSet:
    """The training set of :func:`cifar10` alone, a tenth of it held out."""
    dataset = load("cifar10", split="train")
    return _halved_set(dataset, _kept(len(dataset), split))


def pneumonia(split: str) -> DataSet:
    """PneumoniaMNIST, 28x28: its training and validation images together; its test images."""
    path = pneumonia_path()
    if split == "test":
        return load(str(path), split="test")
    parts = [load(str(path), split=part) for part in ("train", "val")]
    images, labels = zip(*(_arrays(part, np.arange(len(part))) for part in parts), strict=True)
    return _set(parts[0], np.concatenate(images), np.concatenate(labels))


def pneumonia_tuning(split: str) -> DataSet:
    """The training set of :func:`pneumonia` alone, a tenth of it held out."""
    dataset = pneumonia("train")
    return _set(dataset, *_arrays(dataset, _kept(len(dataset), split)))


def pneumonia_path() -> Path:
    """Where PneumoniaMNIST lies: ``$DPBAM_PNEUMONIA``, else beside the downloads.

    Raises:
        DataError: if it is not there, with where to get it.
    """
    path = Path(os.environ.get(PNEUMONIA) or data_root() / "pneumoniamnist.npz")
    if not path.exists():
        raise DataError(
            f"PneumoniaMNIST is not at {path}: get pneumoniamnist.npz from medmnist.com and put it "
            f"there, or say where it is with --pneumonia"
        )
    return path


def halved(images: Images) -> Images:
    """[N, C, H, W] -> [N, C, H/2, W/2]: means of 2x2 squares, rounded."""
    n, c, h, w = images.shape
    squares = images.reshape(n, c, h // 2, 2, w // 2, 2)
    means: Images = squares.mean(axis=(3, 5), dtype=np.float32).round().astype(np.uint8)
    return means


def _kept(count: int, split: str) -> NDArray[np.int64]:
    """The positions that are trained on, or held out."""
    held = np.arange(count) % HELD_OUT == 0
    return np.flatnonzero(held if split == "test" else ~held)


def _halved_set(dataset: DataSet, where: NDArray[np.int64] | None = None) -> DataSet:
    images, labels = _arrays(dataset, np.arange(len(dataset)) if where is None else where)
    return _set(dataset, halved(images), labels)


def _arrays(dataset: DataSet, where: NDArray[np.int64]) -> tuple[Images, NDArray[np.int64]]:
    images, labels = dataset.batch(where)
    return images.numpy(), labels.numpy()


def _set(dataset: DataSet, images: Images, labels: Any) -> DataSet:
    return from_arrays(images, labels, name=dataset.name, class_names=dataset.class_names)
