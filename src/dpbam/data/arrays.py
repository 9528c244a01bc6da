"""Convert arrays to the form that a data set has; used by every source of arrays.

===========  ===================================================================================
images       uint8 only: [N, H, W], [N, H, W, C] or [N, C, H, W], with C = 1 or 3. Floats are
             refused: their range would have to be guessed from private data.
labels       numbers or strings of any task (:mod:`dpbam.data.labels`); or masks, uint8 [N, H, W].
columns      [N] numbers or strings.
===========  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpbam.data.base import ArrayImages, DataError, Images, Pixels
from dpbam.data.dataset import DataSet, to_array
from dpbam.data.sources import Table
from dpbam.data.tables import number

_CHANNELS = (1, 3)


def from_arrays(
    images: ArrayLike,
    labels: ArrayLike,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
    task: str | None = None,
    unit: str | None = None,
) -> DataSet:
    """Make a data set of arrays, which may be memory-mapped: they are not copied.

    Args:
        images: uint8, one per record.
        labels: of any task, one per record.
        name: of the set.
        class_names: one per class or finding; None: those that occur.
        columns: further facts about each record.
        task: what the labels mean; None: what they can mean.
        unit: whom privacy is promised to: "record", or a column.

    Example:
        >>> scans = from_arrays(np.zeros((3, 8, 8), np.uint8), ["ill", "well", "ill"])
        >>> scans.class_names, scans.labels
        (('ill', 'well'), array([0, 1, 0]))
    """
    raw = to_array(labels, f"labels of {name}")
    table = Table(
        name, raw, partial(open_array, images, name), columns={} if columns is None else columns,
        class_names=class_names, unit=unit,
    )  # fmt: skip
    return number([table], task).dataset(table)


def open_array(images: ArrayLike, name: str) -> Images:
    """View the array of a table's images as images."""
    return ArrayImages(as_images(to_array(images, f"images of {name}"), name))


def as_images(array: NDArray[Any], where: str) -> Pixels:
    """View uint8 [N, H, W], [N, H, W, C] or [N, C, H, W] as [N, C, H, W]."""
    if array.dtype != np.uint8:
        example = "(255 * x).round().astype('uint8') for x in [0, 1]"
        if array.dtype.kind in "iu":
            example = "(x / 257).round().astype('uint8') for 16 bits, x // 16 for 12"
        raise DataError(
            f"images of {where} are {array.dtype}, but must be uint8 with values 0..255: "
            f"convert them first, for example {example}"
        )
    if array.ndim == 3:
        return array[:, None]
    last, first = (array.ndim == 4 and array.shape[axis] in _CHANNELS for axis in (3, 1))
    if last and first:
        raise DataError(
            f"images of {where} have shape {list(array.shape)}, where the channels could be axis 1 "
            "or axis 3: drop the axis of size 1, or pad the images"
        )
    if last:
        return array.transpose(0, 3, 1, 2)
    if first:
        return array
    raise DataError(
        f"images of {where} have shape {list(array.shape)}, but must be [N, H, W], [N, H, W, C] or "
        "[N, C, H, W] with C = 1 (grey) or 3 (RGB)"
    )
