"""scikit-learn's handwritten digits: 1797 grey images of 8 x 8, embedded, no download."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from dpbam.data.arrays import from_arrays
from dpbam.data.base import require
from dpbam.data.dataset import DataSet
from dpbam.data.sources import Options, Splits
from dpbam.data.split import held_out

_LEVELS = 16  # scikit-learn counts ink in 0..16


def open_digits(argument: str, options: Options) -> Splits:
    """Return a fixed stratified split: 80% to train, 20% to test."""
    train, test = _splits()
    return {"train": train, "test": test}


@cache  # parsed once per process: a data set cannot be changed, so that all callers may share it
def _splits() -> tuple[DataSet, DataSet]:
    raw = require("sklearn.datasets", "the data set digits").load_digits()
    pixels = (raw.images * (255 / _LEVELS)).round().astype(np.uint8)
    pixels.setflags(write=False)
    train, test = held_out(from_arrays(pixels, raw.target, name="digits"))
    return replace(train, name="digits/train"), replace(test, name="digits/test")
