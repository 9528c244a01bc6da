"""The paper's data in small: real images, halved so that two cores can train on them.

Each function is a data set for ``--data module:function``: called with "train" or "test". The
``_tuning`` ones hold out a part of the *training* set as their test set, so that settings are
chosen without the test set. Halving takes seconds, so the result is cached.

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
RARE = (2, 5, 8)  # bird, dog, ship: the rare classes of the imbalanced sets
RARITY = 2  # of their records one in so many is in the training set
PNEUMONIA = "DPBAM_PNEUMONIA"


@cache
def cifar10(split: str) -> DataSet:
    """Return CIFAR-10 halved to 16x16: all 50,000 and 10,000 images."""
    return _halved_set(load("cifar10", split=split))


@cache
def cifar10_first(split: str) -> DataSet:
    """Return the same with the first 10,000 training images."""
    dataset = load("cifar10", split=split)
    few = np.arange(10_000) if split == "train" else np.arange(len(dataset))
    return _halved_set(dataset, few)


@cache
def cifar10_tuning(split: str) -> DataSet:
    """Return the training set of :func:`cifar10` alone, a tenth of it held out."""
    dataset = load("cifar10", split="train")
    return _halved_set(dataset, _kept(len(dataset), split))


@cache
def cifar10_8x8(split: str) -> DataSet:
    """Return CIFAR-10 halved twice, to 8x8: all 50,000 and 10,000 images."""
    return _again(cifar10(split))


@cache
def cifar10_8x8_tuning(split: str) -> DataSet:
    """Return the training set of :func:`cifar10_8x8` alone, a tenth of it held out."""
    return _again(cifar10_tuning(split))


@cache
def cifar10_8x8_imbalanced(split: str) -> DataSet:
    """Return :func:`cifar10_8x8` with half of the training images of the rare classes."""
    dataset = cifar10_8x8(split)
    return dataset if split == "test" else _thinned(dataset)


def _thinned(dataset: DataSet) -> DataSet:
    """Keep the first half of the records of each rare class, and all records of the others."""
    labels = np.asarray(dataset.labels)
    is_dropped = np.zeros(len(labels), dtype=bool)
    for rare in RARE:
        where = np.flatnonzero(labels == rare)
        is_dropped[where[len(where) // RARITY :]] = True
    return _set(dataset, *_arrays(dataset, np.flatnonzero(~is_dropped)))


def pneumonia(split: str) -> DataSet:
    """Return PneumoniaMNIST, 28x28: training and validation images together; test images."""
    path = pneumonia_path()
    if split == "test":
        return load(str(path), split="test")
    splits = [load(str(path), split=name) for name in ("train", "val")]
    images, labels = zip(*(_arrays(data, np.arange(len(data))) for data in splits), strict=True)
    return _set(splits[0], np.concatenate(images), np.concatenate(labels))


def pneumonia_tuning(split: str) -> DataSet:
    """Return the training set of :func:`pneumonia` alone, a tenth of it held out."""
    dataset = pneumonia("train")
    return _set(dataset, *_arrays(dataset, _kept(len(dataset), split)))


def pneumonia_14x14(split: str) -> DataSet:
    """Return PneumoniaMNIST halved to 14x14: 5,232 training images and 624 test images."""
    return _again(pneumonia(split))


def pneumonia_14x14_tuning(split: str) -> DataSet:
    """Return the training set of :func:`pneumonia_14x14` alone, a tenth of it held out."""
    return _again(pneumonia_tuning(split))


def pneumonia_path() -> Path:
    """Return the path of PneumoniaMNIST: ``$DPBAM_PNEUMONIA``, else next to the downloads."""
    path = Path(os.environ.get(PNEUMONIA) or data_root() / "pneumoniamnist.npz")
    if not path.exists():
        raise DataError(
            f"PneumoniaMNIST is not at {path}: get pneumoniamnist.npz from medmnist.com, put it "
            f"there, or give its path with --pneumonia"
        )
    return path


def halved(images: Images) -> Images:
    """Average 2x2 squares, rounded: [N, C, H, W] -> [N, C, H/2, W/2]."""
    n, c, h, w = images.shape
    squares = images.reshape(n, c, h // 2, 2, w // 2, 2)
    means: Images = squares.mean(axis=(3, 5), dtype=np.float32).round().astype(np.uint8)
    return means


def _kept(count: int, split: str) -> NDArray[np.int64]:
    is_held_out = np.arange(count) % HELD_OUT == 0
    return np.flatnonzero(is_held_out if split == "test" else ~is_held_out)


def _halved_set(dataset: DataSet, where: NDArray[np.int64] | None = None) -> DataSet:
    images, labels = _arrays(dataset, np.arange(len(dataset)) if where is None else where)
    return _set(dataset, halved(images), labels)


def _arrays(dataset: DataSet, where: NDArray[np.int64]) -> tuple[Images, NDArray[np.int64]]:
    images, labels = dataset.batch(where)
    return images.numpy(), labels.numpy()


def _set(dataset: DataSet, images: Images, labels: Any) -> DataSet:
    return from_arrays(images, labels, name=dataset.name, class_names=dataset.class_names)


def _again(dataset: DataSet) -> DataSet:
    images, labels = _arrays(dataset, np.arange(len(dataset)))
    return _set(dataset, halved(images), labels)
