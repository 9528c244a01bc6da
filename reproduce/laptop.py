"""Features for private CIFAR-10 on two cores: fixed ones, for a linear classifier.

DP-SGD's noise grows with the number of weights, so it helps to learn fewer of them (Tramèr and
Boneh 2021). From CIFAR-10, one linear layer is learnt and nothing else:

1. Scattering maps of each image (:mod:`reproduce.scattering`): 243 channels of 8 x 8.
2. Their square root, which reduces strong contrasts relative to weak ones.
3. Principal axes of the channels, whitened. Their covariance is measured on *synthetic* images,
   dead leaves (:func:`dead_leaves`), which have the statistics of photographs and are public.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam.data import DataSet, Images, data_root, load
from reproduce.scattering import Scattering2d, mirrored_paths

CHANNELS = 48  # principal axes kept
WHITENING = 1.0  # 0: the axes keep their variances; 1: all have the same
_SYNTHETIC = 1500  # images to measure the axes on
_STEP = 1 / 32  # of the rounding, in units of the features' deviation
_HELD_OUT = 5000
_ROWS = 8  # images computed at once, to fit a core's cache
_FORMAT = 1  # of the cache: raise it when the features change


@dataclass(frozen=True)
class Axes:
    """What turns scattering maps into features; measured on synthetic images alone.

    Attributes:
        mean: [243] of the companded maps.
        project: [243, k] axes, divided by their whitened deviations.
        sign: [k] +1 where an axis is unchanged by mirroring, -1 where it changes its sign.
    """

    mean: Tensor
    project: Tensor
    sign: Tensor

    @classmethod
    def measured(cls, maps: Tensor, channels: int = CHANNELS, whitening: float = WHITENING) -> Axes:
        """Find the ``channels`` strongest axes of maps [n, 243, y, x], each with mirror symmetry.

        The covariance is made symmetric under mirroring. Then it does not mix the maps that
        mirroring keeps with those whose sign it changes, and the axes of each are found separately.
        """
        swap = _mirror_matrix(maps.shape[1] // 81)
        rows = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]).double()
        mean = (rows.mean(0) + swap @ rows.mean(0)) / 2
        covariance = (rows - mean).T @ (rows - mean) / len(rows)
        covariance = (covariance + swap @ covariance @ swap.T) / 2
        values, axes, signs = [], [], []
        for sign in (1, -1):
            onto = (torch.eye(len(swap)) + sign * swap) / 2  # the maps of this symmetry
            found, vectors = torch.linalg.eigh(onto @ covariance @ onto)
            of_it = (vectors * (onto @ vectors)).sum(0) > 0.5
            values.append(found[of_it])
            axes.append(vectors[:, of_it])
            signs.append(torch.full((int(of_it.sum()),), float(sign)))
        variance = torch.cat(values)
        order = variance.argsort(descending=True)[:channels]
        scale = variance[order] ** (-whitening / 2)
        return cls(
            mean.float(), (torch.cat(axes, 1)[:, order] * scale).float(), torch.cat(signs)[order]
        )

    def features(self, maps: Tensor) -> NDArray[np.uint8]:
        """Map [n, 243, 8, 8] to uint8 [n, k, 8, 4], the same for an image and its mirror image."""
        projected = torch.einsum("ncyx,ck->nkyx", maps - self.mean[:, None, None], self.project)
        half = projected.shape[-1] // 2
        mirrored = self.sign[:, None, None] * projected.flip(-1)
        folded = (projected + mirrored)[..., :half]  # the other half has the same values
        size = folded[0].numel()
        folded = folded * (
            size**0.5 / folded.flatten(1).norm(dim=1)[:, None, None, None].clamp(min=1e-9)
        )
        bits = (folded / _STEP + 127.5).round().clamp(0, 255).to(torch.uint8)
        rounded: NDArray[np.uint8] = bits.numpy()
        return rounded


def maps_of(images: Tensor) -> Tensor:
    """Compute the scattering maps of images in [-1, 1]: S_0, and the root of S_1 and S_2."""
    scattering = Scattering2d((images.shape[-2], images.shape[-1]))
    parts = []
    for rows in torch.split(images, _ROWS):
        maps = scattering(rows)
        smooth = maps[:, :: scattering.paths].clone()  # S_0 has a sign
        maps = maps.clamp(min=0).sqrt()
        maps[:, :: scattering.paths] = smooth
        parts.append(maps)
    return torch.cat(parts)


def dead_leaves(count: int, seed: int = 0, side: int = 32) -> Tensor:
    """Draw synthetic images [count, 3, side, side] in [-1, 1]: overlapping opaque shapes.

    Ellipses and boxes of all sizes, small ones more often (radius r with density r^-3), each of one
    colour with a slight slope, over one another, with some grain: edges, colours and scales occur
    about as they do in photographs (Lee, Mumford and Huang 2001).

    Example:
        >>> dead_leaves(2).shape
        torch.Size([2, 3, 32, 32])
    """
    generator = np.random.default_rng(seed)
    return torch.stack([torch.from_numpy(_leaves(generator, side)) for _ in range(count)])


def _leaves(g: np.random.Generator, side: int) -> NDArray[np.float32]:
    y, x = np.mgrid[0:side, 0:side]
    image = np.zeros((3, side, side))
    level = g.uniform(-0.6, 0.6)
    for _ in range(40):
        radius = min(40.0, 2.0 / np.sqrt(g.uniform(1 / 400, 1)))
        cx, cy = g.uniform(-8, side + 8, 2)
        colour = np.clip(level + g.normal(0, 0.35) + g.normal(0, 0.12, 3), -1, 1)
        angle, narrow, round_ = g.uniform(0, np.pi), g.uniform(0.4, 1), g.random() < 0.5
        u = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
        v = (y - cy) * np.cos(angle) - (x - cx) * np.sin(angle)
        w = v / narrow
        distance = np.sqrt(u**2 + w**2) if round_ else np.maximum(abs(u), abs(w))
        cover = np.clip(radius - distance + 0.5, 0, 1)  # a soft edge of one pixel
        slope = g.normal(0, 0.01) * u + g.normal(0, 0.01) * v
        image = image * (1 - cover) + (colour[:, None, None] + slope) * cover
    _, grain = abs(g.normal(0, 0.04, 2))
    return np.clip(image + g.normal(0, grain, image.shape), -1, 1).astype(np.float32)


def _mirror_matrix(colours: int) -> Tensor:
    """The permutation of channels by mirroring: float64 [81 colours, 81 colours]."""
    paths = mirrored_paths(2, 8)
    order = torch.cat([paths + len(paths) * k for k in range(colours)])
    return torch.eye(len(order), dtype=torch.float64)[order]


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
    axes = Axes.measured(maps_of(dead_leaves(_SYNTHETIC)))
    for start in range(0, len(images), 1000):
        pixels, _ = images.batch(np.arange(start, min(start + 1000, len(images))))
        yield axes.features(maps_of(pixels.float() / 127.5 - 1))


def _write(path: Path, array: NDArray[Any]) -> None:
    temporary = path.with_suffix(".tmp.npy")
    np.save(temporary, array)
    temporary.rename(path)
