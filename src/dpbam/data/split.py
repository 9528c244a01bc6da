"""A held-out test split for a source that has none.

Records are held out by a hash of their identity (the unit, else the path, else the pixels), class
by class. So the split is the same on every machine, does not depend on the order of the records,
and copies of an image stay together, except where the cut falls between them. Adding or removing
one unit changes the training split by one unit, or swaps one for another at the cut.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import DataError
from dpbam.data.dataset import DataSet

HELD_OUT = 0.2
_NAME = "/held-out"


def held_out(
    dataset: DataSet, *, fraction: float = HELD_OUT, unit: str | None = None
) -> tuple[DataSet, DataSet]:
    """Split into training and test, stratified by class, whole units only.

    Args:
        dataset: all records.
        fraction: the share of each class's units to hold out. A class of at least two units gives
            at least one and keeps at least one.
        unit: the column whose equal values belong together (a patient's records); the class of a
            unit is that of most of its records. None: every record is a unit.

    Example:
        >>> from dpbam.data import from_arrays
        >>> everything = from_arrays(np.zeros((10, 8, 8), np.uint8), [0, 1] * 5)
        >>> train, test = held_out(everything)
        >>> len(train), len(test)
        (8, 2)
    """
    if not 0 < fraction < 1:
        raise DataError(f"the held-out fraction must lie between 0 and 1, got {fraction!r}")
    units, digests = _units(dataset, unit)
    majority = _majority(units, _strata(dataset), dataset.num_classes + 1)
    order = np.argsort(digests, kind="stable")
    chosen = np.zeros(len(digests), bool)
    for label in range(dataset.num_classes + 1):
        mine = order[majority[order] == label]
        chosen[mine[: _cut(len(mine), fraction)]] = True
    test = chosen[units]
    if not test.any():
        raise DataError(
            f"{dataset.name} is too small to hold out a test split: "
            "no class has two units of privacy; provide a test split"
        )
    call = dataset.name.removesuffix("/train")
    return (
        dataset.subset(np.flatnonzero(~test), name=f"{call}/train"),
        dataset.subset(np.flatnonzero(test), name=f"{call}{_NAME}"),
    )


def is_held_out(dataset: DataSet) -> bool:
    """Whether a set is what :func:`held_out` held out, and not a split of the source's own."""
    return dataset.name.endswith(_NAME)


def _strata(dataset: DataSet) -> NDArray[np.int64]:
    """[N] the class; of several findings, one more than the first, or 0; else all are alike."""
    if dataset.task == "single-label":
        return dataset.labels
    if dataset.task == "multi-label":
        first = dataset.labels.argmax(axis=1) + 1
        return np.where(dataset.labels.any(axis=1), first, 0).astype(np.int64)
    return np.zeros(len(dataset), np.int64)


def _units(dataset: DataSet, unit: str | None) -> tuple[NDArray[np.int64], NDArray[np.bytes_]]:
    """[N] the unit of each record, and [U] a hash of each unit's identity."""
    if unit is None:
        names = dataset.images.identities()
        units = np.arange(len(dataset))
    else:
        values, units = np.unique(dataset.column(unit), return_inverse=True)
        names = [str(value).encode() for value in values]
    # 32 hex digits: fixed width, so that numpy compares them whole (raw bytes may end in NUL)
    return units, np.array([hashlib.sha256(name).hexdigest()[:32].encode() for name in names])


def _majority(
    units: NDArray[np.int64], labels: NDArray[np.int64], classes: int
) -> NDArray[np.int64]:
    """[U] the most frequent label of each unit, the lowest where two tie."""
    pairs, counts = np.unique(units * classes + labels, return_counts=True)
    by_unit_then_count = np.lexsort((pairs % classes, -counts, pairs // classes))
    ordered = pairs[by_unit_then_count]
    _, first = np.unique(ordered // classes, return_index=True)
    return np.asarray(ordered[first] % classes)


def _cut(units: int, fraction: float) -> int:
    """The number of a class's units to hold out: nearest to the fraction, not none and not all."""
    return min(max(int(fraction * units + 0.5), 1), units - 1) if units > 1 else 0
