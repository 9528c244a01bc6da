"""Features of a public encoder as data sets, for linear heads that train in seconds.

The encoder is MobileNetV3-small, trained on ImageNet, as ONNX: ``mobilenet_v3_small.onnx`` and its
``preprocessor_config.json`` in the folder ``mobilenet-v3-small`` next to the downloads
(``~/.cache/dpbam``), or at ``$DPBAM_MOBILENET``. Features are computed once, some 10 ms per image,
and kept next to it. They are scaled as ``dpbam train`` scales them for a head.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data import DataError, DataSet, Images, data_root, from_arrays, load
from dpbam.features import HEAD_SCALE, cached_features, make_features
from reproduce.small_data import cifar10 as halved_cifar10
from reproduce.small_data import pneumonia

MOBILENET = "DPBAM_MOBILENET"
SUBSET = 10_000  # training records of CIFAR-10 that get features


class FeatureRows(Images):
    """Features as images of one pixel: float32 [N, D, 1, 1]."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.shape = (len(rows), rows.shape[1], 1, 1)
        self._rows = rows

    def read(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        return np.ascontiguousarray(HEAD_SCALE * self._rows[indices])[:, :, None, None]


@cache
def cifar10(split: str) -> DataSet:
    """Return features of the first 10,000 training images, or of all 10,000 test images."""
    images = load("cifar10", split=split)
    return _on_features(images.subset(np.arange(SUBSET), name=f"cifar10/{split}"))


@cache
def pneumonia_features(split: str) -> DataSet:
    """Return features of PneumoniaMNIST: 5,232 training images or 624 test images."""
    return _on_features(pneumonia(split))


def cifar10_last_five(split: str) -> DataSet:
    """Return the last five classes at 16x16: 1,000 training or all 1,000 test images of each.

    The encoder of ``examples/public_encoder.py`` was trained on the first five.
    """
    images = halved_cifar10(split)
    labels = np.asarray(images.labels)
    rows = np.concatenate([np.flatnonzero(labels == k)[:1000] for k in range(5, 10)])
    pixels, of_class = images.batch(np.sort(rows))
    names = images.class_names[5:]
    return from_arrays(pixels.numpy(), of_class.numpy() - 5, name=images.name, class_names=names)


def _on_features(images: DataSet) -> DataSet:
    features = make_features(f"onnx:{encoder_path()}", images.shape)
    rows = cached_features(images, features, encoder_path().parent / "features")
    return DataSet(f"{images.name} features", FeatureRows(rows), images.labels, images.class_names)


def encoder_path() -> Path:
    """Return the path of the encoder: ``$DPBAM_MOBILENET``, else next to the downloads."""
    folder = Path(os.environ.get(MOBILENET) or data_root() / "mobilenet-v3-small")
    path = folder / "mobilenet_v3_small.onnx"
    if not path.is_file():
        raise DataError(
            f"there is no encoder {path}: put mobilenet_v3_small.onnx with its "
            f"preprocessor_config.json there, or name the folder in {MOBILENET}"
        )
    return path
