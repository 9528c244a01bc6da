"""Features of a frozen public encoder: computed once per record, and not to be shared.

A record's features are a function of that record alone and of public constants: the encoder runs
in eval on one row at a time (by vmap), with the resizing and normalisation of its own files. So the
head's private training on features is private training on the records. They are computed without
noise: their files are in ``non-private/``.

A file is named by a digest of all that its values depend on: every pixel of every record, the
encoder's tensors and architecture, its preprocessing, the version of torch and the kind of device.
So a changed record never meets stale features, and runs may share a folder (``feature_cache``): a
file appears there complete, or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpbam.app.runs.facts import weights_digest
from dpbam.app.runs.feature_model import FeatureModel
from dpbam.data import DataSet, Images, to_float
from dpbam.data.fetch import atomic
from dpbam.engines.isolation import over_rows
from dpbam.features import cached_features, recentre_rows
from dpbam.features.cache import holds_features
from dpbam.nn.encoders import PublicEncoder
from dpbam.params import device_of, evaluating

_ROWS = 64  # computed at once
_CENTRED = 4096  # moved to their centre at once


def on_features(data: DataSet, model: PublicEncoder | FeatureModel, cache: Path | None) -> DataSet:
    """Return the data set with features [N, D, 1, 1] for images; computed when first read.

    Args:
        data: of images.
        model: computes them.
        cache: the folder that keeps them; None: memory.
    """
    if isinstance(model, FeatureModel):
        return replace(data, images=FixedFeatureImages(data, model, cache))
    return replace(data, images=EncoderImages(data, model, cache))


class FeatureImages(Images):
    """Features of a data set's images, as images of one pixel: float32."""

    decodes = True

    def __init__(
        self, data: DataSet, feature_shape: tuple[int, int, int], cache: Path | None
    ) -> None:
        self._data, self._cache = data, cache
        self.shape = (len(data), *feature_shape)

    def read(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        return np.ascontiguousarray(self._values[indices])

    def describe(self, index: int) -> str:
        return self._data.images.describe(index)

    @cached_property
    def _values(self) -> Any:  # float32 [N, D, 1, 1]
        raise NotImplementedError


class FixedFeatureImages(FeatureImages):
    """Fixed features of norm 1, kept by :func:`dpbam.features.cached_features`."""

    def __init__(self, data: DataSet, model: FeatureModel, cache: Path | None) -> None:
        super().__init__(data, model.feature_shape, cache)
        self._model = model
        self.progress: Callable[[int, int], None] | None = None

    def uncentred(self) -> Any:
        """Return the features before a centre is subtracted: [N, D]."""
        return cached_features(
            self._data, self._model.extractor, self._cache, progress=self.progress
        )

    @cached_property
    def _values(self) -> Any:
        """Return the features that the head sees; read first when the centre is released."""
        rows, centre = self.uncentred(), self._model.centre
        if centre is not None:
            blocks = np.array_split(rows, 1 + len(rows) // _CENTRED)
            moved = [recentre_rows(torch.from_numpy(b.copy()), centre.cpu()) for b in blocks]
            rows = torch.cat(moved).numpy()
        return rows[:, :, None, None]


class EncoderImages(FeatureImages):
    """Features of a frozen encoder, as its own layers scale them."""

    def __init__(self, data: DataSet, model: PublicEncoder, cache: Path | None) -> None:
        super().__init__(data, model.feature_shape, cache)
        self._model = model

    @cached_property
    def _values(self) -> Any:
        if self._cache is None:
            return self._computed(np.empty(self.shape, np.float32))
        path = self._cache / f"features-{self._key()}.npy"
        if not holds_features(path, self.shape):
            with atomic(path) as temporary:
                rows = np.lib.format.open_memmap(temporary, "w+", np.float32, self.shape)
                self._computed(rows).flush()
        return np.load(path, mmap_mode="r", allow_pickle=False)

    def _key(self) -> str:
        """Digest all records, the encoder's weights and the constants of its preprocessing.

        The data set's fingerprint would not do: of images that are decoded it reads some.
        """
        model = self._model
        machine = (torch.__version__, device_of(model).type)
        weights = weights_digest(model.encoder)
        facts = (self._data.images.digest(), weights, model.description(), machine)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def _computed(self, out: Any) -> Any:
        """Write the features of every record into ``out`` [N, D, 1, 1]."""
        device = device_of(self._model)
        # the fast kernels of attention have no batching rule
        with evaluating(self._model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            for start in range(0, len(self), _ROWS):
                indices = np.arange(start, min(start + _ROWS, len(self)))
                images = to_float(self._data.batch(indices)[0].to(device))
                rows = over_rows(lambda x: self._model.features(x[None])[0], images)
                out[indices] = rows.cpu().numpy()[:, :, None, None]
        return out
