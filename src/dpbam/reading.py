"""Reads each record alone, with random generators of its own.

The proof of a step compares the sum with and without one unit: every other unit's term must be the
same in both. So what is read of a record must not depend on the others of its batch, neither on
their values (mixup, padding to the longest) nor on what they drew from a common generator (random
crops, masked tokens).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
_PROBES = 64  # records that are looked at before the training begins


def keyed(records: Tensor, randomness: Randomness, step: int) -> list[Drawn]:
    """Return each of a step's records with the key of its draws: records [N] int64."""
    keys = randomness.keys("reading", step, records)
    return list(zip(records.tolist(), keys.tolist(), strict=True))


def collate_pair(items: list[Any]) -> Any:
    """Collate items to (inputs, targets); of dicts, the targets are under the one usual key."""
    return _as_pair(default_collate(items))


def _as_it_is(batch: Any) -> Any:
    return batch


def _as_pair(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if len(names) != 1 or len(batch) < 2:
            raise ArgumentTypeError(
                f"a data set's items are dicts with the keys {sorted(map(str, batch))}: one of "
                f"them must be the target's ({', '.join(TARGETS)}), the others are the model's "
                "keyword arguments; or give (input, target) pairs"
            )
        return {k: v for k, v in batch.items() if k != names[0]}, batch[names[0]]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ArgumentTypeError("a data set's items must be (input, target) pairs")
    return batch


class OneByOne(Dataset[Any]):
    """A data set whose item (record, key) is that record as a batch of one row.

    Guarantee: a row depends on its record and its key alone.

    Assumptions: ``dataset[i]`` reads record i and no other. The data set and its collate function
    keep no state, and draw from the global generators of torch, NumPy and ``random``;
    :func:`isolated` refuses a state that shows. A record that reads a generator without moving it
    is not the only one: some record that is read beforehand does so, too.

    Proof: both are asked for one record at a time, and the generators start from its key. Seeding
    them takes longer than reading a small record, so a batch is read without those that no record
    was seen to draw from: if none of these has moved, no row depends on any; else it is read again.

    Args:
        dataset: map-style.
        collate: from a list of one item to a batch of one row.
        drawing: the generators that are at its key for each record.

    Example:
        >>> class Noisy(Dataset):
        ...     def __getitem__(self, i):
        ...         return i + torch.rand(1)
        >>> alone = OneByOne(Noisy())
        >>> bool(alone[3, 7] == alone.rows([(5, 1), (3, 7)])[1])
        True
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        drawing: Iterable[str] = (),
    ) -> None:
        self._dataset, self._collate = dataset, collate
        # torch's own function stacks, and so can we, many records in the time of one
        self._finish = {default_collate: _as_it_is, collate_pair: _as_pair}.get(collate)
        self._drawing = set(drawing)  # and those that records are seen to draw from

    def __getitem__(self, record_and_key: Drawn) -> Any:
        return self.rows([record_and_key])[0]

    def __getitems__(self, records_and_keys: Sequence[Drawn]) -> list[Any]:
        """Read a whole batch, for :class:`Join`; a DataLoader calls this."""
        if self._finish is not None and records_and_keys:
            batch = self._read_all(records_and_keys, _stack)
            if batch is not None:
                return [Stacked(self._finish(batch))]
        return self.rows(records_and_keys)

    def rows(self, records_and_keys: Sequence[Drawn]) -> list[Any]:
        """Read several records, each as a batch of one row."""
        rows: list[Any] = self._read_all(
            records_and_keys, lambda items, count: [self._row(item) for item in items]
        )
        return rows

    def _read_all(
        self, records_and_keys: Sequence[Drawn], use: Callable[[Iterator[Any], int], Any]
    ) -> Any:
        """Return ``use(items, count)``: the items as they are read, each with draws of its own."""
        before, moved = _positions(), set(_SEEDS)  # all are restored if reading fails
        try:
            while True:
                seeded = set(self._drawing)
                batch = use(self._items(records_and_keys), len(records_and_keys))
                moved = _moved_since(before)
                if moved <= seeded:
                    return batch
                self._drawing |= moved  # read again, with these at the key of each record
        finally:
            _restore(before, moved)

    def _items(self, records_and_keys: Sequence[Drawn]) -> Iterator[Any]:
        """Read one record after another, with the generators that are drawn from at its key."""
        dataset, seeds = self._dataset, [_SEEDS[name] for name in self._drawing]
        if not seeds:
            return map(dataset.__getitem__, [record for record, _ in records_and_keys])

        def seeded() -> Iterator[Any]:
            for record, key in records_and_keys:
                for seed in seeds:
                    seed(key)
                yield dataset[record]

        return seeded()

    def _row(self, item: Any) -> Any:
        batch = self._collate([item])
        row = dict(batch) if isinstance(batch, Mapping) else batch  # a tokenizer's BatchEncoding
        if (count := rows(row)) != 1:
            raise ArgumentError(
                f"the collate function made {count} rows of one record, and each would count as a "
                "unit: return one row (several views of a record: multiplicity and augment)"
            )
        return map_rows(torch.clone, row)  # it may be a buffer that the next record is read into


class Stacked(NamedTuple):
    """All rows of a batch, of records that have the form of the first."""

    batch: Any


_UNFIT = (TypeError, KeyError, OverflowError, RuntimeError)  # what is not stacked here


def _stack(items: Iterator[Any], count: int) -> Any:
    """Stack items as ``default_collate`` does, or return None where only that can."""
    columns = None
    for place, item in enumerate(items):
        try:  # the items are read outside: what the data set raises is not caught
            columns = columns or _Columns(item, count)
            columns.put(place, item)
        except _UNFIT:
            return None
    try:
        return columns and columns.batch()
    except _UNFIT:
        return None


class _Columns:
    """A batch of tuples, lists or dicts with the parts, types and shapes of the first.

    Arrays are copied when they are read: they may be a buffer that the next record is read into.

    Raises:
        TypeError: one of ``_UNFIT``, from any method, where ``default_collate`` has to decide.
    """

    def __init__(self, first: Any, count: int) -> None:
        if type(first) not in (tuple, list, dict):
            raise TypeError
        self._type, self._length = type(first), len(first)
        self._columns: dict[Any, Any] = {}
        # the same columns by kind: one loop over all kinds took 3% longer
        self._nested: list[tuple[Any, _Columns]] = []
        self._arrays: list[tuple[Any, Any, Any, Any, Any]] = []
        self._numbers: list[tuple[Any, list[Any]]] = []
        for key in first if type(first) is dict else range(len(first)):
            leaf = first[key]
            if type(leaf) in (tuple, list, dict):
                self._columns[key] = _Columns(leaf, count)
                self._nested.append((key, self._columns[key]))
            elif type(leaf) in (Tensor, np.ndarray, np.memmap):
                self._columns[key] = torch.empty((count, *leaf.shape), dtype=_torch_dtype(leaf))
                column = self._columns[key].numpy()
                self._arrays.append((key, type(leaf), leaf.dtype, column.shape[1:], column))
            elif type(leaf) in _NUMBERS or isinstance(leaf, np.number | np.bool_):
                self._columns[key] = []
                self._numbers.append((key, self._columns[key]))
            else:
                raise TypeError

    def put(self, place: int, item: Any) -> None:
        if type(item) is not self._type or len(item) != self._length:
            raise TypeError
        for key, its_type, dtype, shape, column in self._arrays:
            leaf = item[key]
            if type(leaf) is not its_type or leaf.dtype != dtype:
                raise TypeError
            if its_type is Tensor:
                try:
                    leaf = leaf.numpy()  # its shape takes a quarter of the time of a tensor's
                except RuntimeError:  # it requires a gradient or is a complex conjugate
                    leaf = leaf.numpy(force=True)
            if leaf.shape != shape:
                raise TypeError
            column[place] = leaf
        for key, numbers in self._numbers:
            numbers.append(item[key])
        for key, columns in self._nested:
            columns.put(place, item[key])

    def batch(self) -> Any:
        """Return a list or dict of tensors, each with the records along the first axis."""
        batch = {key: _stacked(column) for key, column in self._columns.items()}
        return batch if self._type is dict else list(batch.values())


def _stacked(column: Any) -> Any:
    if isinstance(column, _Columns):
        return column.batch()
    if isinstance(column, Tensor):
        return column
    types = set(map(type, column))
    if len(types) > 1:
        raise TypeError
    return torch.from_numpy(np.array(column, dtype=_NUMBERS.get(types.pop())))


def _torch_dtype(array: Any) -> torch.dtype:
    if isinstance(array, Tensor):
        return array.dtype
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


# from a record's key to the state of a global generator
_SEEDS: dict[str, Callable[[int], object]] = {
    "torch": torch.default_generator.manual_seed,
    "cuda": torch.cuda.manual_seed_all,
    "numpy": lambda key: np.random.seed(key & 0xFFFFFFFF),  # noqa: NPY002
    "random": random.seed,
}


def _devices() -> list[int]:
    """The GPUs that have a generator by now."""
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if ready else []


def _positions() -> dict[str, Any]:
    """Return the states of the global generators, to be compared and restored."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [torch.cuda.get_rng_state(device).numpy().tobytes() for device in _devices()],
        "numpy": pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002
        "random": random.getstate(),
    }


def _moved_since(before: dict[str, Any]) -> set[str]:
    """Return the names of the generators that are no longer in the state they had."""
    return {name for name, state in _positions().items() if state != before[name]}


def _restore(states: dict[str, Any], names: set[str]) -> None:
    def of_torch(state: bytes) -> Tensor:
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    if "torch" in names:
        torch.set_rng_state(of_torch(states["torch"]))
    if "cuda" in names:
        for device, state in enumerate(states["cuda"]):
            torch.cuda.set_rng_state(of_torch(state), device)
    if "numpy" in names:
        np.random.set_state(pickle.loads(states["numpy"]))  # noqa: NPY002
    if "random" in names:
        random.setstate(states["random"])


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
        if batches and type(batches[0]) is Stacked:
            return tree_unflatten(self._leaves(batches[0].batch), self._form)
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

    Some records are read several times before, in two orders and from the same random numbers.

    Raises:
        ArgumentError: if a record differs between the two, or has another form than the first.
    """
    alone, last = OneByOne(dataset, collate), len(dataset) - 1
    probes = [(k, k) for k in sorted({round(k * last / _PROBES) for k in range(_PROBES + 1)})]
    there, back = alone.rows(probes), alone.rows(probes[::-1])[::-1]
    join = Join(there[0])
    join(there)
    same = _same_rows(back, there)
    seeding = OneByOne(dataset, collate, drawing=[n for n, state in _positions().items() if state])
    if same and not _same_rows(seeded := seeding.rows(probes), there):
        # records read a generator without moving it (torch.initial_seed, fork_rng): unless all are
        # always at the key of each record, one that draws would change what is read of the others
        alone, same = seeding, _same_rows(seeding.rows(probes[::-1])[::-1], seeded)
    if not same:
        raise ArgumentError(
            "a record was read twice, from the same random numbers, and differs: the data set or "
            "its collate function keeps a state (a generator or counter of its own), so one record "
            "could change others; draw from the global generators of torch, NumPy or random, or "
            "use augment"
        )
    return alone, join


def _same_rows(rows: list[Any], others: list[Any]) -> bool:
    try:
        torch.testing.assert_close(rows, others, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True
