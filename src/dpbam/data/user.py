"""A data set of the user's own: ``module:function``.

The function is called once per split, ``function("train")`` and ``function("test")``, and returns
(images, labels), (images, labels, columns), a :class:`~dpbam.data.DataSet`, or None if it has no
such split (then a part of train is held out). The arrays are those of
:func:`~dpbam.data.from_arrays`, labels of any task. The current folder is on the module path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dpbam._names import load_function
from dpbam.data.arrays import open_array
from dpbam.data.base import DataError, for_each, in_short
from dpbam.data.dataset import DataSet, to_array
from dpbam.data.sources import Options, Splits, Table
from dpbam.errors import ArgumentError


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
