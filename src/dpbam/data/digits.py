"""scikit-learn's handwritten digits: 1797 grey images of 8 x 8, embedded, no download."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpbam.data.arrays import from_arrays
from dpbam.data.dataset import DataSet
from dpbam.data.sources import Openers, Options
from dpbam.data.split import held_out

_LEVELS = 16  # scikit-learn counts ink in 0..16


def open_digits(argument: str, options: Options) -> Openers:
    """Return a fixed stratified split: 80% to train, 20% to test."""
    return {"train": lambda: _split(0), "test": lambda: _split(1)}


def _split(which: int) -> DataSet:
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = (raw.images * (255 / _LEVELS)).round().astype(np.uint8)
    part = held_out(from_arrays(pixels, raw.target, name="digits"))[which]
    return replace(part, name=("digits/train", "digits/test")[which])
