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

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.params import map_rows, rows
from dpbam.privacy.randomness import Randomness

Drawn = tuple[int, int]  # a record's number, and the key of its random draws
TARGETS = ("labels", "label", "targets", "target")  # keys of a dict item's target
_PROBES = 64  # records that are looked at before the training begins


def keyed(records: Tensor, randomness: Randomness, step: int) -> list[Drawn]:
    """Return each of a step's records with the key of its draws: records [N] int64."""
    keys = randomness.keys("reading", step, records)
    return list(zip(records.tolist(), keys.tolist(), strict=True))


def collate_pair(items: list[Any]) -> Any:
    """Collate items to (inputs, targets); of dicts, the targets are under the one usual key."""
    pair = default_collate(items)
    if isinstance(pair, Mapping):
        names = [name for name in TARGETS if name in pair]
        if len(names) != 1 or len(pair) < 2:
            raise ArgumentTypeError(
                f"a data set's items are dicts with the keys {sorted(map(str, pair))}: one of them "
                f"must be the target's ({', '.join(TARGETS)}), the others are the model's keyword "
                "arguments; or give (input, target) pairs"
            )
        return {k: v for k, v in pair.items() if k != names[0]}, pair[names[0]]
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ArgumentTypeError("a data set's items must be (input, target) pairs")
    return pair


class OneByOne(Dataset[Any]):
    """A data set whose item (record, key) is that record as a batch of one row.

    Guarantee: a row depends on its record and its key alone.

    Assumptions: ``dataset[i]`` reads record i and no other. The data set and its collate function
    keep no state, and draw from the global generators of torch, NumPy and ``random``;
    :func:`isolated` refuses a state that shows.

    Proof: both are asked for one record at a time, and the generators start from its key. Seeding
    them takes longer than reading a small record, so a batch is first read without: if no generator
    has moved, no row depends on any; else it is read again, each record from its own key.

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
        self._stacks = collate in (default_collate, collate_pair)  # rows do not depend on others
        self._draws = False  # whether a record was seen to draw random numbers

    def __getitem__(self, record_and_key: Drawn) -> Any:
        return self.__getitems__([record_and_key])[0]

    def __getitems__(self, records_and_keys: Sequence[Drawn]) -> list[Any]:
        """Read several records; a DataLoader calls this with a whole batch."""
        with _generators_restored() as moved:
            if not self._draws:
                batch = [self._read(record) for record, _ in records_and_keys]
                if not moved():
                    return batch
                self._draws = True
            return [self._row(record, key) for record, key in records_and_keys]

    def _row(self, record: int, key: int) -> Any:
        """Read a record with the generators at its key."""
        torch.default_generator.manual_seed(key)
        if _devices():
            torch.cuda.manual_seed_all(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
        random.seed(key)
        return self._read(record)

    def _read(self, record: int) -> Any:
        item = self._dataset[record]
        if self._stacks and type(item) is tuple and [type(x) for x in item] == [Tensor, int]:
            # as below, in a fifth of the time
            return [item[0].clone()[None], torch.tensor([item[1]])]
        batch = self._collate([item])
        row = dict(batch) if isinstance(batch, Mapping) else batch  # a tokenizer's BatchEncoding
        if (count := rows(row)) != 1:
            raise ArgumentError(
                f"the collate function made {count} rows of one record, and each would count as a "
                "unit: return one row (several views of a record: multiplicity and augment)"
            )
        return map_rows(torch.clone, row)  # it may be a buffer that the next record is read into


def _devices() -> list[int]:
    """The GPUs that have a generator by now."""
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if ready else []


@contextmanager
def _generators_restored() -> Iterator[Callable[[], bool]]:
    """Restore the global generators at the end; yield a function: whether one has moved."""
    of_numpy, of_python, before = np.random.get_state(), random.getstate(), _positions()  # noqa: NPY002
    try:
        with torch.random.fork_rng(_devices()):
            yield lambda: _positions() != before
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def _positions() -> tuple[object, ...]:
    """Return the states of the global generators, for a comparison."""
    _, words, *rest = np.random.get_state()  # noqa: NPY002
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _devices())]
    of_torch = [state.numpy().tobytes() for state in states]
    return np.asarray(words).tobytes(), rest, random.getstate(), of_torch


class Join:
    """A collate function that concatenates the rows of :class:`OneByOne`.

    Every row must have the parts, types and shapes of the first record's; otherwise those of a
    batch would depend on which records are in it. An empty sample becomes zero rows. Nothing is
    kept of the first record but its form.
    """

    def __init__(self, first: Any) -> None:
        leaves, self._form = tree_flatten(first)
        self._empty: list[Any] = [None if x is None else x[:0].clone() for x in leaves]
        plain = type(first) is list and all(type(x) is Tensor for x in first)
        self._row = [(x.dtype, (1, *x.shape[1:])) for x in first] if plain else None
        self._names = [keystr(path).strip("[]'.") or "a record"
                       for path, _ in tree_flatten_with_path(first)[0]]  # fmt: skip

    def __call__(self, batches: Sequence[Any]) -> Any:
        columns = zip(*(self._leaves(batch) for batch in batches), strict=True)
        joined = [None if column[0] is None else torch.cat(column) for column in columns]
        return tree_unflatten(joined if batches else self._empty, self._form)

    def _leaves(self, batch: Any) -> list[Any]:
        if type(batch) is list and self._row == [
            (x.dtype, x.shape) for x in batch if type(x) is Tensor
        ]:
            return batch  # the usual row
        try:
            leaves = self._form.flatten_up_to(batch)
        except ValueError as error:
            raise ArgumentError(
                f"a record has other parts than record 0 ({error}): give all the same keys"
            ) from None
        for name, leaf, empty in zip(self._names, leaves, self._empty, strict=True):
            if (kind := _kind(leaf)) != (usual := _kind(empty)):
                raise ArgumentError(
                    f"{name} is {kind} in one record and {usual} in record 0: a batch would depend "
                    "on which records are in it; convert all to one type"
                )
            if leaf is not None and leaf.shape[1:] != empty.shape[1:]:
                raise ArgumentError(
                    f"{name} has shape {tuple(leaf.shape[1:])} in one record and "
                    f"{tuple(empty.shape[1:])} in another: pad every sample to one length "
                    "(tokenizer(..., padding='max_length', truncation=True), or a collate_fn that "
                    "pads to a fixed length), since padding to the longest of a batch lets one "
                    "sample change the others"
                )
        return leaves


def _kind(leaf: Tensor | None) -> str:
    return "None" if leaf is None else str(leaf.dtype)


def isolated(
    dataset: Any, collate: Callable[[list[Any]], Any] = default_collate
) -> tuple[OneByOne, Join]:
    """Return the data set read one record at a time, and what joins its rows to batches.

    Some records are read twice before, in two orders and from the same random numbers.

    Raises:
        ArgumentError: if a record differs between the two, or has another form than the first.
    """
    alone, last = OneByOne(dataset, collate), len(dataset) - 1
    probes = [(k, k) for k in sorted({round(k * last / _PROBES) for k in range(_PROBES + 1)})]
    there, back = alone.__getitems__(probes), alone.__getitems__(probes[::-1])[::-1]
    join = Join(there[0])
    join(there)
    try:
        torch.testing.assert_close(back, there, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        raise ArgumentError(
            "a record was read twice, from the same random numbers, and differs: the data set or "
            "its collate function keeps a state (a generator or counter of its own), so one record "
            "could change others; draw from the global generators of torch, NumPy or random, or "
            "use augment"
        ) from None
    return alone, join
