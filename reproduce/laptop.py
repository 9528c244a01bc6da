"""Features for private CIFAR-10 on two cores: fixed ones, for a linear classifier.

DP-SGD's noise grows with the number of weights, so it helps to learn fewer of them (Tramèr and
Boneh 2021). From CIFAR-10, one linear layer is learnt and nothing else:

1. Scattering maps of each image (:mod:`dpbam.features.wavelets`): 243 channels of 8 x 8.
2. Their square root, which reduces strong contrasts relative to weak ones.
3. Principal axes of the channels, whitened. Their covariance is measured on *synthetic* images,
   dead leaves (:mod:`dpbam.features.leaves`), with the statistics of photographs, and public.
4. The mean over an image and its mirror image: half the numbers, and half the weights to noise.
5. All images scaled to the same norm, and rounded to 8 bits with a fixed step.

The features of an image depend on that image alone, so one record still changes one record. They
are a data set like any other, ``reproduce.laptop:cifar10``: training, ledger and statement are
those of ``dpbam train``. ``reproduce.laptop:cifar10_tuning`` holds out 5,000 training records.

    python -m reproduce laptop --scale desk
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam.data import DataSet, Images, data_root, load
from dpbam.features.leaves import dead_leaves
from dpbam.features.scattering import Axes, maps_of

CHANNELS = 48  # principal axes kept
WHITENING = 1.0  # 0: the axes keep their variances; 1: all have the same
_SYNTHETIC = 1500  # images to measure the axes on
_STEP = 1 / 32  # of the rounding, in units of the features' deviation
_HELD_OUT = 5000
_FORMAT = 1  # of the cache: raise it when the features change


def rounded(axes: Axes, maps: Tensor) -> NDArray[np.uint8]:
    """Map [n, 243, 8, 8] to uint8 [n, k, 8, 4], the same for an image and its mirror image."""
    folded = axes.folded(maps)
    size = folded[0].numel()
    folded = folded * (
        size**0.5 / folded.flatten(1).norm(dim=1)[:, None, None, None].clamp(min=1e-9)
    )
    bits = (folded / _STEP + 127.5).round().clamp(0, 255).to(torch.uint8)
    values: NDArray[np.uint8] = bits.numpy()
    return values


class Features(Images):
    """Features as images of many channels: uint8 [N, C, H, W], memory-mapped."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        n, c, h, w = array.shape
        self.shape, self._array = (n, c, h, w), array

    def read(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self._array[indices])


def cifar10(split: str) -> DataSet:
    """Return CIFAR-10's features, computed once and kept under the data root: ten minutes."""
    images = load("cifar10", split=split)
    folder = data_root() / "laptop"
    key = hashlib.sha256(f"{_FORMAT} {CHANNELS} {WHITENING} {images.fingerprint()}".encode())
    path = folder / f"{split}-{key.hexdigest()[:16]}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, np.concatenate(list(_computed(images))))
    features = np.load(path, mmap_mode="r", allow_pickle=False)
    return DataSet(
        f"cifar10-features/{split}", Features(features), images.labels, images.class_names
    )


def cifar10_tuning(split: str) -> DataSet:
    """Return the training records alone: 45,000 to train on, and 5,000 fixed ones to score on."""
    whole = cifar10("train")
    order = np.random.default_rng(0).permutation(len(whole))
    chosen = order[:_HELD_OUT] if split == "test" else order[_HELD_OUT:]
    return whole.subset(np.sort(chosen), name=f"cifar10-features/tuning/{split}")


def _computed(images: DataSet) -> Iterator[NDArray[np.uint8]]:
    axes = Axes.measured(maps_of(dead_leaves(_SYNTHETIC)), CHANNELS, WHITENING)
    for start in range(0, len(images), 1000):
        pixels, _ = images.batch(np.arange(start, min(start + 1000, len(images))))
        yield rounded(axes, maps_of(pixels.float() / 127.5 - 1))


def _write(path: Path, array: NDArray[Any]) -> None:
    temporary = path.with_suffix(".tmp.npy")
    np.save(temporary, array)
    temporary.rename(path)
