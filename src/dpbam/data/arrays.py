"""Convert arrays to the form that a data set has; used by every source of arrays.

===========  ===================================================================================
images       uint8 only: [N, H, W], [N, H, W, C] or [N, C, H, W], with C = 1 or 3. Floats are
             refused: their range would have to be guessed from private data.
labels       [N] or [N, 1]: whole numbers 0 .. K-1 without gaps over all splits, or strings, whose
             sorted values become the classes. With class names given, gaps are allowed.
columns      [N] numbers or strings.
===========  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpbam.data.base import ArrayImages, DataError, Pixels
from dpbam.data.dataset import DataSet

_CHANNELS = (1, 3)


def from_arrays(
    images: ArrayLike,
    labels: ArrayLike,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    columns: Mapping[str, ArrayLike] | None = None,
) -> DataSet:
    """Make a data set of arrays, which may be memory-mapped: they are not copied.

    Example:
        >>> scans = from_arrays(np.zeros((3, 8, 8), np.uint8), ["ill", "well", "ill"])
        >>> scans.class_names, scans.labels
        (('ill', 'well'), array([0, 1, 0]))
    """
    numbers, names = number_labels({name: np.asarray(labels)}, class_names)
    return DataSet(
        name=name,
        images=ArrayImages(as_images(np.asanyarray(images), name)),
        labels=numbers[name],
        class_names=names,
        columns={key: as_column(value, f"{name}: {key}") for key, value in (columns or {}).items()},
    )


def as_images(array: NDArray[Any], where: str) -> Pixels:
    """View uint8 [N, H, W], [N, H, W, C] or [N, C, H, W] as [N, C, H, W]."""
    if array.dtype != np.uint8:
        raise DataError(
            f"images of {where} are {array.dtype}, but must be uint8 with values 0..255: "
            "convert them first, for example (255 * x).round().astype('uint8') for x in [0, 1]"
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


def number_labels(
    splits: Mapping[str, NDArray[Any]], class_names: Sequence[str] | None = None
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Number the labels of all splits of a source by one list of classes.

    Args:
        splits: the labels of each split, by the name to use in an error.
        class_names: the classes, if they are known; then some may be absent.

    Returns:
        int64 labels [N] for each split, and the class names.
    """
    flat = {where: _flat(labels, where) for where, labels in splits.items()}
    if all(labels.dtype.kind == "U" for labels in flat.values()):
        names = tuple(class_names or class_order({str(x) for y in flat.values() for x in set(y)}))
        return {where: _look_up(labels, names, where) for where, labels in flat.items()}, names
    whole = {where: _whole(labels, where) for where, labels in flat.items()}
    return whole, tuple(class_names) if class_names else _count_classes(whole)


def class_order(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers where all are ("2" before "10"), else as text."""
    names = list(names)
    numeric = all(name.isascii() and name.isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name) if numeric else 0, name))


def as_column(values: ArrayLike, where: str) -> NDArray[Any]:
    """Return a column [N] of numbers or strings."""
    column = np.asarray(values)
    if column.dtype.kind == "S":
        column = np.char.decode(column, "utf-8")
    if column.dtype.kind not in "biufU" or column.ndim != 1:
        raise DataError(
            f"column {where} must hold one number or string per record, "
            f"got {column.dtype} {list(column.shape)}"
        )
    return column


def _flat(labels: NDArray[Any], where: str) -> NDArray[Any]:
    """[N, 1] -> [N]; bytes -> text."""
    if labels.ndim == 2 and labels.shape[1] != 1:
        raise DataError(
            f"labels of {where} have {labels.shape[1]} values per record: only one label per "
            "record is supported, so choose one of the columns"
        )
    if labels.ndim not in (1, 2):
        raise DataError(f"labels of {where} must be [N] or [N, 1], got {list(labels.shape)}")
    flat = labels.reshape(-1)
    return np.char.decode(flat, "utf-8") if flat.dtype.kind == "S" else flat


def _whole(labels: NDArray[Any], where: str) -> NDArray[np.int64]:
    if labels.dtype.kind not in "biu":
        raise DataError(
            f"labels of {where} are {labels.dtype}, but must be whole numbers 0..K-1 or strings"
        )
    if labels.size and labels.min() < 0:
        raise DataError(
            f"labels of {where} are out of range: record {int(labels.argmin())} has "
            f"{labels.min()}, but classes are numbered from 0"
        )
    return labels.astype(np.int64)


def _count_classes(splits: Mapping[str, NDArray[np.int64]]) -> tuple[str, ...]:
    """The class names "0" .. "K-1", if each of them occurs in some split."""
    present = set().union(*(np.unique(labels).tolist() for labels in splits.values()))
    top = max(present, default=-1) + 1
    if len(present) != top:
        missing = [k for k in range(min(top, 2**16)) if k not in present][:5]
        raise DataError(
            f"labels of {' and '.join(splits)} go up to {top - 1} but skip "
            f"{', '.join(map(str, missing))}{', ...' if top - len(present) > 5 else ''}: number "
            "the classes 0..K-1 without gaps, or give class_names"
        )
    return tuple(str(k) for k in range(top))


def _look_up(labels: NDArray[Any], names: Sequence[str], where: str) -> NDArray[np.int64]:
    number = {name: k for k, name in enumerate(names)}
    unknown = sorted(set(labels.tolist()) - set(number))
    if unknown:
        raise DataError(f"labels of {where} hold {unknown[0]!r}, which is not among class_names")
    return np.array([number[label] for label in labels.tolist()], dtype=np.int64)
