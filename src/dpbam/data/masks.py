"""Masks of a segmentation: one per image, of its size, each pixel the number of a class.

Masks of 0 and 255 alone are read as 0 and 1. As files they are grey or palette images without
losses, such as PNG; where images are resized, their masks take the nearest pixel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import ArrayImages, DataError, Images, Indices, Pixels, for_each, require
from dpbam.data.decode import FileImages

if TYPE_CHECKING:
    from PIL import Image

_PLAIN = ("1", "L", "P")
_BINARY = ("background", "foreground")


class Masks(Images):
    """Masks of class numbers; ``binary`` ones are stored as 0 and 255."""

    def __init__(self, images: Images, binary: bool) -> None:
        self._images, self._binary = images, binary
        self.shape, self.decodes = images.shape, images.decodes  # type: ignore[misc]

    def read(self, indices: Indices) -> Pixels:
        pixels = self._images.read(indices)
        return (pixels == 255).astype(np.uint8) if self._binary else pixels

    def select(self, indices: Indices) -> Images:
        return Masks(self._images.select(indices), self._binary)

    def describe(self, index: int) -> str:
        return self._images.describe(index)

    def manifest(self) -> bytes:
        return self._images.manifest()


class MaskFiles(FileImages):
    """Mask files: ``paths`` relative to ``root``."""

    def pixels(self, image: Image.Image, where: str) -> Pixels:
        if image.mode not in _PLAIN or image.format == "JPEG":
            raise DataError(
                f"the mask {where} is a {image.format} of mode {image.mode}: save class numbers as "
                "a grey or palette PNG"
            )
        size = self.shape[2:]
        if (image.height, image.width) != size and not self._resize:
            raise DataError(
                f"the mask {where} is {image.height}x{image.width}, its image {size[0]}x{size[1]}: "
                "a mask must have its image's size"
            )
        plain = image.convert("L") if image.mode == "1" else image
        nearest = require("PIL.Image", "reading image files").Resampling.NEAREST
        resized = plain.resize((size[1], size[0]), nearest)
        return np.asarray(resized, dtype=np.uint8)[None]


def mask_array(array: NDArray[Any], where: str) -> Images:
    """View an array of masks [N, H, W] of whole numbers 0..255 as images."""
    flat = array[:, 0] if array.ndim == 4 and array.shape[1] == 1 else array
    flat = flat[..., 0] if flat.ndim == 4 and flat.shape[3] == 1 else flat
    if flat.ndim != 3 or flat.dtype.kind not in "bu" or flat.dtype.itemsize > 1:
        raise DataError(
            f"masks of {where} are {array.dtype} {list(array.shape)}, but must be uint8 [N, H, W]: "
            "the class of each pixel"
        )
    return ArrayImages(flat[:, None].view(np.uint8))


def number_masks(
    splits: Mapping[str, Images], class_names: Sequence[str] | None = None
) -> tuple[dict[str, Images], tuple[str, ...]]:
    """Read every mask once, and return masks of class numbers with the names of the classes.

    Args:
        splits: the masks of each split, by the name to use in an error.
        class_names: the classes, if they are known.
    """
    seen = for_each(_values, splits)
    values = set().union(*seen.values())
    binary = 255 in values and values <= {0, 255}
    names = tuple(class_names or (_BINARY if binary else map(str, range(max(values) + 1))))
    top = 1 if binary else max(values)
    if top >= len(names):
        where = next(w for w, present in seen.items() if max(present) == max(values))
        raise DataError(
            f"masks of {where} hold the value {max(values)}, but there are {len(names)} classes, "
            f"0..{len(names) - 1}: name them all, or correct the masks"
        )
    if not class_names and not binary and len(values) <= max(values):
        missing = min(set(range(max(values))) - values)
        raise DataError(
            f"masks of {' and '.join(splits)} go up to {max(values)} but never hold {missing}: "
            "number the classes 0..K-1, or give their names"
        )
    return {where: Masks(masks, binary) for where, masks in splits.items()}, names


def _values(masks: Images, where: str) -> set[int]:
    """The values that occur; an error with the problems of every mask that cannot be read."""
    present, problems = np.zeros(256, bool), list[str]()
    for positions in masks.chunks():
        try:
            present |= np.bincount(masks.read(positions).reshape(-1), minlength=256) > 0
        except DataError:
            problems += masks.unreadable(positions)
    if problems:
        raise DataError(*problems)
    return set(np.flatnonzero(present).tolist())
