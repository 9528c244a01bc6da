"""A cache of features. They are private data: computed from records, without noise.

A file holds float32 [N, D], standardised, as NumPy writes arrays. It is named by a digest of
everything that its values depend on: every pixel of every record in its order, and the extractor's
description (weights, preprocessing, versions). So a changed record never meets stale features. Only
the owner can read it (mode 0600); it appears complete or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data import DataSet, to_float
from dpbam.data.fetch import atomic
from dpbam.features.base import Features, digest_of, standardise_rows

_ROWS = 256  # read at once
_FORMAT = 1


def feature_key(data: DataSet, features: Features) -> str:
    """Return the name of a cache entry: SHA-256 over the records and the extractor."""
    facts = f"{_FORMAT} {data.images.digest()} {digest_of(features)}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def cached_features(
    data: DataSet,
    features: Features,
    folder: Path | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[Any]:
    """Return the standardised features of all records, float32 [N, D]; computed once.

    Args:
        data: whose images are read.
        features: the extractor, made for the shape of these images.
        folder: keeps them, for example a run's ``non-private/features``; None: memory alone.
        progress: called with the number of records so far, and of all.

    Example:
        >>> from dpbam.data import load
        >>> from dpbam.features import ScatteringFeatures
        >>> digits = load("digits", split="test")
        >>> cached_features(digits, ScatteringFeatures(digits.shape, channels=5)).shape
        (359, 80)
    """
    shape = (len(data), features.width)
    if folder is None:
        rows: NDArray[Any] = _computed(data, features, np.empty(shape, np.float32), progress)
        return rows
    path = folder / f"features-{feature_key(data, features)}.npy"
    if not holds_features(path, shape):
        with atomic(path) as temporary:
            mapped = np.lib.format.open_memmap(temporary, "w+", np.float32, shape)
            _computed(data, features, mapped, progress).flush()
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def _computed(
    data: DataSet, features: Features, out: Any, progress: Callable[[int, int], None] | None
) -> Any:
    for start in range(0, len(data), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(data)))
        images = to_float(data.batch(rows)[0])
        out[rows] = standardise_rows(features.extract(images)).numpy()
        if progress:
            progress(int(rows[-1]) + 1, len(data))
    return out


def holds_features(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether a file is there that holds the features; a damaged one is computed again."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    return bool(values.dtype == np.float32 and values.shape == shape)
