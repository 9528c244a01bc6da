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
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpbam.data.base import ArrayImages, DataError, Images, Pixels, for_each
from dpbam.data.dataset import UNKNOWN, DataSet, to_array
from dpbam.data.labels import number_labels
from dpbam.data.masks import mask_array, number_masks
from dpbam.data.sources import Options

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
    raw = {name: to_array(labels, f"labels of {name}")}
    numbers, masks, names = number_any(raw, class_names, task)
    data = numbered(images, numbers[name], masks.get(name), name, names, columns)
    return data if unit is None else replace(data, unit=unit)


def numbered(
    images: ArrayLike,
    labels: NDArray[Any],
    masks: Images | None,
    name: str,
    class_names: Sequence[str],
    columns: Mapping[str, Any] | None,
) -> DataSet:
    """Make a data set of arrays whose labels :func:`number_any` has numbered."""
    return DataSet(
        name=name,
        images=ArrayImages(as_images(to_array(images, f"images of {name}"), name)),
        labels=labels,
        class_names=tuple(class_names),
        columns={} if columns is None else columns,
        masks=masks,
    )


def number_any(
    splits: Mapping[str, NDArray[Any]], class_names: Sequence[str] | None, task: str | None
) -> tuple[dict[str, NDArray[Any]], dict[str, Images], tuple[str, ...]]:
    """Number the labels of all splits, or masks, which have three axes or four."""
    if any(labels.ndim > 2 for labels in splits.values()) and task in (None, "segmentation"):
        arrays = for_each(mask_array, splits)
        masks, names = number_masks(arrays, class_names)
        zeros = {where: np.zeros(len(labels), np.int64) for where, labels in splits.items()}
        return zeros, masks, names
    numbers, names = number_labels(splits, class_names, task)
    return numbers, {}, names


def number_known(
    splits: Mapping[str, NDArray[Any]], class_names: Sequence[str] | None, options: Options
) -> tuple[dict[str, NDArray[Any]], dict[str, Images], tuple[str, ...]]:
    """Number labels or masks; while a set is checked, those that cannot be used are unknown."""
    with options.collecting():
        return number_any(splits, class_names, options.task)
    return {where: np.zeros(y.shape[:1], np.int64) for where, y in splits.items()}, {}, UNKNOWN


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
