"""Fixed features of images, for a private head: scattering, and frozen public encoders.

========================  ======================================================================
name                      features
========================  ======================================================================
``scattering``            :class:`ScatteringFeatures`; nothing is downloaded
``hf:NAME_OR_FOLDER``     :class:`EncoderFeatures`, of Hugging Face
``onnx:FILE``             :class:`OnnxFeatures`, any ONNX encoder
========================  ======================================================================
"""

from __future__ import annotations

from dpbam._names import ENCODER, did_you_mean
from dpbam.errors import ArgumentError
from dpbam.features.base import HEAD_SCALE, Features, digest_of, recentre_rows, standardise_rows
from dpbam.features.cache import cached_features, feature_key
from dpbam.features.encoders import EncoderFeatures
from dpbam.features.onnx import ONNX, OnnxFeatures
from dpbam.features.scattering import ScatteringFeatures

SCATTERING = "scattering"

__all__ = [
    "HEAD_SCALE",
    "ONNX",
    "SCATTERING",
    "EncoderFeatures",
    "Features",
    "OnnxFeatures",
    "ScatteringFeatures",
    "cached_features",
    "digest_of",
    "feature_key",
    "make_features",
    "recentre_rows",
    "standardise_rows",
]


def make_features(name: str, image_shape: tuple[int, int, int]) -> Features:
    """Return the feature extractor of a name: ``scattering``, ``hf:...`` or ``onnx:FILE``.

    Example:
        >>> make_features("scattering", (1, 8, 8)).width
        768
    """
    if name == SCATTERING:
        return ScatteringFeatures(image_shape)
    if name.startswith(ENCODER):
        return EncoderFeatures(name, image_shape)
    if name.startswith(ONNX):
        return OnnxFeatures(name.removeprefix(ONNX), image_shape)
    hint = did_you_mean(name, [SCATTERING], "choose scattering, hf:NAME_OR_FOLDER or onnx:FILE")
    raise ArgumentError(f"there are no features {name!r}: {hint}")
