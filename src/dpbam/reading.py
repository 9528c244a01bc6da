"""Reads each record alone, with random generators of its own.

The proof of a step compares the sum with and without one unit: every other unit's term must be the
same in both. So what is read of a record must not depend on the others of its batch, neither on
their values (mixup, padding to the longest) nor on what they drew from a common generator (random
crops, masked tokens).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        count = len(records_and_keys)
        with _generators_restored() as moved:
            while True:
                seeded = set(self._drawing)
                batch = use(self._items(records_and_keys), count)
                unseeded = moved() - seeded
                if not unseeded:
                    return batch
                self._drawing |= unseeded  # read again, with these at the key of each record

    def _items(self, records_and_keys: Sequence[Drawn]) -> Iterator[Any]:
        """Read one record after another, with the generators that are drawn from at its key."""
        dataset, seeds = self._dataset, [_SEEDS[name] for name in self._drawing]
        for record, key in records_and_keys:
            for seed in seeds:
                seed(key)
            yield dataset[record]

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


def _stack(items: Iterator[Any], count: int) -> Any:
    """Stack items as ``default_collate`` does, or return None: for tensors and whole numbers alone.

    Each is copied when it is read: it may be a buffer that the next record is read into.
    """
    form: Any = None  # the keys, or the number of parts
    leaves: Any
    its_form: Any
    columns: list[tuple[Any, Any, Any]] = []
    for place, item in enumerate(items):
        if type(item) is tuple:
            leaves, its_form = item, len(item)
        elif type(item) is dict:
            leaves, its_form = item.values(), tuple(item)
        else:
            return None
        if not place:
            form = its_form
            columns = [_new_column(leaf, count) for leaf in leaves]
        if its_form != form:
            return None
        # the usual leaf first, and shapes in NumPy, which takes a quarter of the time
        for (kind, shape, column), leaf in zip(columns, leaves, strict=False):
            if type(leaf) is Tensor and leaf.dtype is kind:
                entries = leaf.numpy(force=True)
                if entries.shape != shape:
                    return None
                column[place] = entries
            elif type(leaf) is int and kind is int:
                column.append(leaf)
            else:
                return None
    tensors = [torch.as_tensor(column) for _, _, column in columns]
    return tensors if isinstance(form, int) else dict(zip(form, tensors, strict=True))


def _new_column(leaf: Any, count: int) -> tuple[Any, Any, Any]:
    """Return the type and shape that all records must have, and what holds ``count`` of them.

    Of a leaf that is not stacked here, the type is that of no leaf.
    """
    if type(leaf) is int:
        return int, (), []
    # NumPy has no bfloat16
    if (
        type(leaf) is not Tensor
        or not leaf.is_cpu
        or leaf.layout != torch.strided
        or leaf.dtype == torch.bfloat16
    ):
        return None, (), None
    column = torch.empty((count, *leaf.shape), dtype=leaf.dtype).numpy()
    return leaf.dtype, tuple(leaf.shape), column


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


@contextmanager
def _generators_restored() -> Iterator[Callable[[], set[str]]]:
    """Restore the global generators at the end; yield a function: the names of those that moved."""
    of_numpy, of_python, before = np.random.get_state(), random.getstate(), _positions()  # noqa: NPY002

    def moved() -> set[str]:
        return {name for name, state in _positions().items() if state != before.get(name)}

    try:
        with torch.random.fork_rng(_devices()):
            yield moved
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)


def _positions() -> dict[str, object]:
    """Return the states of the global generators, for a comparison."""
    _, words, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [torch.cuda.get_rng_state(device).numpy().tobytes() for device in _devices()],
        "numpy": (np.asarray(words).tobytes(), *rest),
        "random": random.getstate(),
    }


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
