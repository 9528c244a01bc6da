"""Data sets and augmentation: uint8 images, labels and columns from any source.

Importing this package does not import torch, scikit-learn, datasets or pooch.
"""

from __future__ import annotations

from dpbam.data.arrays import from_arrays
from dpbam.data.augment import ShiftFlip
from dpbam.data.base import DataError, Images
from dpbam.data.checking import check
from dpbam.data.dataset import DataSet, to_float
from dpbam.data.decode import read_images
from dpbam.data.registry import Splits, load, load_pair
from dpbam.data.sources import data_root
from dpbam.data.split import held_out

__all__ = [
    "DataError",
    "DataSet",
    "Images",
    "ShiftFlip",
    "Splits",
    "check",
    "data_root",
    "from_arrays",
    "held_out",
    "load",
    "load_pair",
    "read_images",
    "to_float",
]
