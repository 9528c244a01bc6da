"""A public encoder of Hugging Face as frozen features: ``hf:NAME`` or ``hf:FOLDER``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpbam.engines.isolation import over_rows
from dpbam.nn.encoders import load_encoder
from dpbam.params import evaluating

_ROWS = 32  # computed at once


class EncoderFeatures:
    """What the head of :class:`dpbam.nn.encoders.PublicEncoder` sees, with the encoder in eval.

    Args:
        spec: ``hf:NAME``, ``hf:NAME@REVISION`` or ``hf:FOLDER``.
        image_shape: (C, H, W) of the images.

    Guarantee: row i of ``extract`` depends on image i and on the encoder's public files.

    Assumptions: the files are public, and the encoder keeps nothing in Python objects outside its
    modules (:mod:`dpbam.engines.isolation`).

    Proof: the encoder runs on one row at a time, inside ``vmap``.
    """

    def __init__(self, spec: str, image_shape: tuple[int, int, int]) -> None:
        self.image_shape = image_shape
        self._model = load_encoder(spec, image_shape=image_shape, num_outputs=1)
        self.width = self._model.feature_shape[0]

    def extract(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.empty(0, self.width)
        # the fast kernels of attention have no batching rule
        with evaluating(self._model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            return torch.cat([self._rows(block) for block in torch.split(images.float(), _ROWS)])

    def _rows(self, images: Tensor) -> Tensor:
        features: Tensor = over_rows(lambda x: self._model.features(x[None])[0], images)
        return features.float()

    def description(self) -> Mapping[str, Any]:
        return {
            "features": "hf", "weights": self._model.weights["files"],
            "architecture": self._model.description(), "image_shape": list(self.image_shape),
            "torch": torch.__version__,
        }  # fmt: skip
