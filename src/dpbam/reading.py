"""Reads each record alone, with random generators of its own.

The proof of a step compares the sum with and without one unit: every other unit's term must be the
same in both. So what is read of a record must not depend on the others of its batch, neither on
their values (mixup, padding to the longest) nor on what they drew from a common generator (random
crops, masked tokens).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from torch.utils.data import Dataset, default_collate

from dpbam.errors import ArgumentError
from dpbam.params import map_rows, rows
from dpbam.privacy.randomness import Randomness

Drawn = tuple[int, int]  # a record's number, and the key of its random draws


def keyed(records: Tensor, randomness: Randomness, step: int) -> list[Drawn]:
    """Return each of a step's records with the key of its draws: records [N] int64."""
    keys = randomness.keys("reading", step, records)
    return list(zip(records.tolist(), keys.tolist(), strict=True))


class OneByOne(Dataset[Any]):
    """A data set whose item (record, key) is that record as a batch of one row.

    Guarantee: a row depends on its record and its key alone.

    Assumptions: the data set and its collate function keep no state, and draw from the global
    generators of torch, NumPy and ``random``. :meth:`check` refuses a state that shows.

    Proof: both see one record at a time, and the generators start from the record's key.

    Args:
        dataset: map-style.
        collate: from a list of one item to a batch of one row.

    Example:
        >>> class Noisy(Dataset):
        ...     def __getitem__(self, i):
        ...         return i + torch.rand(1)
        >>> alone = OneByOne(Noisy())
        >>> bool(alone[3, 7] == alone.__getitems__([(5, 1), (3, 7)])[1])
        True
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, drawn: Drawn) -> Any:
        return self.__getitems__([drawn])[0]

    def __getitems__(self, drawn: Sequence[Drawn]) -> list[Any]:
        """Read several records; a DataLoader calls this with a whole batch."""
        with _generators_restored():
            return [self._row(record, key) for record, key in drawn]

    def _row(self, record: int, key: int) -> Any:
        torch.default_generator.manual_seed(key)
        if _devices():
            torch.cuda.manual_seed_all(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
        random.seed(key)
        batch = self._collate([self._dataset[record]])
        row = dict(batch) if isinstance(batch, Mapping) else batch  # a tokenizer's BatchEncoding
        if (count := rows(row)) != 1:
            raise ArgumentError(
                f"the collate function made {count} rows of one record, and each would count as a "
                "unit: return one row (several views of a record: multiplicity and augment)"
            )
        return row

    def check(self) -> None:
        """Refuse a data set that reads one record in two ways from the same random numbers."""
        first, _, again = self.__getitems__([(0, 1), (len(self._dataset) - 1, 2), (0, 1)])
        try:
            torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            raise ArgumentError(
                "record 0 was read twice, from the same random numbers, and differs: the data set "
                "or its collate function keeps a state (a generator or counter of its own), so "
                "one record could change others; draw from the global generators of torch, NumPy "
                "or random, or use augment"
            ) from None


def _devices() -> list[int]:
    """The GPUs that have a generator by now."""
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if ready else []


@contextmanager
def _generators_restored() -> Iterator[None]:
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(_devices()):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


class Join:
    """A collate function that concatenates the rows of :class:`OneByOne`.

    An empty sample becomes zero rows of the right shapes.
    """

    def __init__(self, dataset: OneByOne) -> None:
        self._empty = map_rows(lambda t: t[:0], dataset[0, 0])

    def __call__(self, batches: list[Any]) -> Any:
        if not batches:
            return self._empty
        leaves, form = tree_flatten(batches[0])
        columns = [tree_flatten(batch)[0] for batch in batches]
        try:
            joined = [
                None if leaf is None else torch.cat(column)
                for leaf, column in zip(leaves, zip(*columns, strict=True), strict=True)
            ]
        except (RuntimeError, TypeError, ValueError) as error:
            _refuse_lengths(batches)
            raise error
        return tree_unflatten(joined, form)


def _refuse_lengths(batches: Sequence[Any]) -> None:
    """Name what has different shapes in two records."""
    shapes: dict[str, tuple[int, ...]] = {}
    for batch in batches:
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if isinstance(leaf, Tensor):
                name, shape = keystr(path).strip("[]'.") or "a record", tuple(leaf.shape[1:])
                if shapes.setdefault(name, shape) != shape:
                    raise ArgumentError(
                        f"{name} has shape {shape} in one record and {shapes[name]} in another: "
                        "pad every sample to one length (tokenizer(..., padding='max_length', "
                        "truncation=True), or a collate_fn that pads to a fixed length), since "
                        "padding to the longest of a batch lets one sample change the others"
                    )
