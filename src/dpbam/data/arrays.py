"""Convert arrays to the form that a data set has; used by every source of arrays.

===========  ===================================================================================
images       uint8 only: [N, H, W], [N, H, W, C] or [N, C, H, W], with C = 1 or 3. Floats are
             refused: their range would have to be guessed from private data.
labels       numbers or strings of any task (:mod:`dpbam.data.labels`); or masks, uint8 [N, H, W].
columns      [N] numbers or strings.
===========  ===================================================================================

A function of the user's own, ``module:function``, returns such arrays. It is called once per split,
``function("train")`` and ``function("test")``, and returns (images, labels), (images, labels,
columns), a :class:`~dpbam.data.DataSet`, or None if it has no such split (then a part of train is
held out). The current folder is on the module path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpbam._names import load_function
from dpbam.data.base import ArrayImages, DataError, Images, Pixels, for_each, in_short
from dpbam.data.dataset import DataSet, to_array
from dpbam.data.sources import Options, Splits, Table
from dpbam.data.tables import number
from dpbam.errors import ArgumentError

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


def open_user(argument: str, options: Options) -> Splits:
    """Return the splits for which the function does not return None."""
    function = _import(argument)
    returned = {split: _call(function, argument, split) for split in ("train", "test")}
    if returned["train"] is None:
        raise DataError(f"{argument}('train') returned None: it must return the training set")
    values = {split: value for split, value in returned.items() if value is not None}
    if not all(isinstance(value, DataSet) for value in values.values()):
        return for_each(lambda value, split: _list(argument, split, value), values)
    if len({value.class_names for value in values.values()}) > 1:
        raise DataError(f"{argument} gives its splits different class names")
    return values


def _list(argument: str, split: str, value: Any) -> Table:
    name = f"{argument}/{split}"
    images, labels, columns = _arrays(argument, value)
    return Table(
        name, to_array(labels, f"labels of {name}"), partial(open_array, images, name),
        columns=columns,
    )  # fmt: skip


def _arrays(argument: str, value: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """The images, labels and columns of a tuple; a DataFrame of columns is a mapping too."""
    kind = f"tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
    if isinstance(value, tuple) and len(value) == 2:
        return (*value, {})
    if isinstance(value, tuple) and len(value) == 3:
        if hasattr(value[2], "keys"):
            return value[0], value[1], dict(value[2])
        kind = f"columns of type {type(value[2]).__name__}, not a dict from names to values"
    if isinstance(value, DataSet):
        kind = "DataSet for one split and arrays for the other"
    raise DataError(
        f"{argument} must return (images, labels), (images, labels, columns) or a DataSet for "
        f"every split, got {kind}"
    )


def _call(function: Callable[[str], Any], argument: str, split: str) -> Any:
    try:
        result = function(split)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{argument}({split!r}) failed with {in_short(error)}") from error
    return replace(result) if isinstance(result, DataSet) else result  # checked again


def _import(argument: str) -> Callable[[str], Any]:
    module = argument.partition(":")[0]
    try:
        return load_function(argument)
    except ArgumentError as error:
        raise DataError(str(error)) from error
    except ModuleNotFoundError as error:
        raise DataError(f"importing {module} failed: {error}") from error
    except Exception as error:
        raise DataError(f"importing {module} failed with {in_short(error)}") from error
