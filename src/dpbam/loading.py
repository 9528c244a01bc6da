"""From a plan's Poisson sample to tensors.

An empty sample gives an empty batch (zero rows, right shapes), never a skipped step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.params import rows, select_rows
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.sampling import Indices, PoissonSampler, UnitIndex, UnitShare
from dpbam.reading import collate_pair, isolated, keyed

Batch = tuple[Any, Any, Tensor]


class PoissonBatches(Iterator[Batch]):
    """Iterates once over (inputs, targets, units): the batches of one plan on one data set.

    ``len()`` is the number of batches that are left.

    Args:
        plan: n, the unit of privacy and the most records of one unit.
        dataset: a map-style data set of (input, target) pairs, or of dicts with one of the keys
            :data:`~dpbam.reading.TARGETS`, the others being the model's keyword arguments; it is
            read one record at a time (:class:`~dpbam.reading.OneByOne`). Or a tuple (inputs,
            targets) of tensors (or dicts of tensors) with the records along the first axis; or
            anything with
            ``batch(indices) -> (inputs, targets)``, such as :class:`dpbam.data.DataSet`, whose rows
            must depend on their own records alone.
        sampler: the plan's sampler.
        units: the owner of each record, if the unit is not the record.
        num_workers: workers of the DataLoader, or threads that gather batches ahead.
        share: the units of this process, where several draw one sample together.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        dataset: Any,
        sampler: PoissonSampler,
        *,
        units: Any = None,
        num_workers: int = 0,
        share: UnitShare | None = None,
    ) -> None:
        self._dataset = _records_of(dataset)
        self._sampler, self._num_workers = sampler, num_workers
        self._share = share or UnitShare()
        self._index = _unit_index(plan, units, len(self._dataset))
        _refuse_weaker_unit(plan, dataset)
        refuse_repeated(dataset, units)
        n = self._index.n if self._index else len(self._dataset)
        if n != plan.n:
            raise ArgumentError(
                f"the plan is for n = {plan.n} units ({plan.unit}) but the data set has {n}: the "
                "sampling rate would be another; make the plan with the data set's size"
            )

        # Hugging Face's method of this name is another one
        gathers = hasattr(self._dataset, "batch") and not _is_hugging_face(self._dataset)
        self._batches = self._gather_batches() if gathers else self._load_records()
        self._left = len(sampler)

    def __iter__(self) -> PoissonBatches:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._left -= 1
        return batch

    def __len__(self) -> int:
        return self._left

    def close(self) -> None:
        """End the threads that read ahead; no batch comes afterwards."""
        self._batches.close()

    def _samples(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw (records, units) of each step, both [N] int64.

        Every process draws for all n units and keeps its own. Seeded, all draw alike, and the parts
        make up the sample of a single process; unseeded, each has entropy of its own, and what it
        keeps is independent of what the others keep.
        """
        for step in range(self._sampler.start, self._sampler.steps):
            units = self._sampler.indices(step)
            records = units
            if self._index:
                records, units = self._index.records(units, self._sampler.randomness, step)
            mine = self._share.owns(units)
            records, units = records[mine], units[mine]
            yield torch.as_tensor(records), torch.as_tensor(units)

    def _gather_batches(self) -> Generator[Batch, None, None]:
        """Gather whole batches, each in a thread of its own if there are workers; in order."""
        if not self._num_workers:
            yield from (self._gather(*sample) for sample in self._samples())
            return
        pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="dpbam-read")
        waiting: deque[Future[Batch]] = deque()
        try:
            for sample in self._samples():
                waiting.append(pool.submit(self._gather, *sample))
                if len(waiting) > self._num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _gather(self, records: Tensor, units: Tensor) -> Batch:
        inputs, targets = self._dataset.batch(records)
        return inputs, targets, units

    def _load_records(self) -> Generator[Batch, None, None]:
        """Read record by record, each by itself."""
        alone, join = isolated(self._dataset, collate_pair)
        for_records, for_units = itertools.tee(self._samples())
        randomness, start = self._sampler.randomness, self._sampler.start
        loader: DataLoader[Any] = DataLoader(
            alone,
            batch_sampler=(keyed(r, randomness, t) for t, (r, _) in enumerate(for_records, start)),
            num_workers=self._num_workers,
            collate_fn=join,
        )
        # unlike a loop and zip, map keeps no batch alive while the next one is read
        yield from map(lambda batch, sample: (*batch, sample[1]), loader, for_units)


class _Tensors:
    """A pair of tensors, or of dicts of tensors, as a data set."""

    def __init__(self, parts: Any) -> None:
        self._length = rows(parts)
        if len(parts) != 2:
            raise ArgumentTypeError(
                f"a data set of tensors is (inputs, targets), got {len(parts)} parts"
            )
        self._parts = tuple(parts)

    def __len__(self) -> int:
        return self._length

    def batch(self, records: Tensor) -> Any:
        return select_rows(self._parts, records)


def _records_of(dataset: Any) -> Any:
    """Return what has a record for every number; a loader's own batches are not Poisson."""
    if isinstance(dataset, DataLoader):
        refuse_sampler(dataset)
    if isinstance(dataset, DataLoader | IterableDataset):
        raise ArgumentTypeError(
            f"oracle.batches draws Poisson samples of its own, which a {type(dataset).__name__} "
            "cannot give: pass the data set itself, one that answers dataset[i] and len(dataset)"
        )
    parts = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if not isinstance(parts, tuple | list) and not hasattr(parts, "__len__"):
        raise ArgumentTypeError(
            f"a {type(dataset).__name__} has no length, and the plan accounts for samples of the "
            "whole data set: pass one that answers dataset[i] and len(dataset)"
        )
    return _Tensors(parts) if isinstance(parts, tuple | list) else dataset


def refuse_repeated(dataset: Any, units: Any = None) -> None:
    """Refuse a data set that has a record in several rows, unless they are of one unit.

    Looks through torch's Subset and ConcatDataset and Hugging Face's ``select``, ``shuffle`` and
    ``concatenate_datasets``, and reads no record. What other data sets repeat is not seen, nor a
    file that was loaded twice.

    Args:
        dataset: map-style.
        units: the owner of each row; None: every row is a unit.
    """
    if not isinstance(dataset, Subset | ConcatDataset) and not _is_hugging_face(dataset):
        return
    rows = np.arange(len(dataset))
    records, owners = _origins(dataset, rows, {}), rows if units is None else np.asarray(units)
    order = np.argsort(records, kind="stable")
    one, next_one = order[:-1], order[1:]
    two_owners = owners[one] != owners[next_one]
    repeated = np.flatnonzero((records[one] == records[next_one]) & two_owners)
    if len(repeated):
        raise ArgumentError(
            f"rows {one[repeated[0]]} and {next_one[repeated[0]]} of the "
            f"{type(dataset).__name__} are one record but two units, and its owner would lose more "
            "privacy than the plan accounts for: give each record once and weight the loss (class "
            "weights), or name the owner of each row, the same for all copies, by "
            "oracle.batches(data, units=...) and a plan with unit and max_records"
        )


def _origins(dataset: Any, rows: Indices, known: dict[Any, int]) -> Indices:
    """Return a number for each of the rows [N], equal for those that are one record of one set."""
    if isinstance(dataset, Subset):
        return _origins(dataset.dataset, _numbers(dataset.indices, known)[rows], known)
    if (rows < 0).any():
        rows = np.where(rows < 0, rows + len(dataset), rows)
    if _is_hugging_face(dataset):
        return _arrow_origins(dataset, rows, known)
    if not isinstance(dataset, ConcatDataset):
        return rows + (known.setdefault(id(dataset), len(known)) << 40)
    origins = np.empty_like(rows)
    place = np.searchsorted(dataset.cumulative_sizes, rows, side="right")
    for k, (inner, end) in enumerate(zip(dataset.datasets, dataset.cumulative_sizes, strict=True)):
        origins[place == k] = _origins(inner, rows[place == k] - end, known)
    return origins


def _arrow_origins(dataset: Any, rows: Indices, known: dict[Any, int]) -> Indices:
    """Return the numbers of :func:`_origins` for the rows [N] of a set of Arrow tables.

    Selects of one set, and what they are joined to, are different objects that share its memory: a
    row is known by the memory of its first column that has some, and by its place there.
    """
    if dataset._indices is not None:  # of select and shuffle
        rows = dataset._indices.column(0).to_numpy().astype(np.int64)[rows]
    columns = [column.chunks for column in dataset._data.table.columns]
    chunks: Sequence[Any] = next(filter(_addresses, columns), [])
    if not chunks:
        return rows + (known.setdefault(id(dataset), len(known)) << 40)
    ends = np.cumsum([len(chunk) for chunk in chunks])
    numbers = [known.setdefault(_addresses([chunk]), len(known)) << 40 for chunk in chunks]
    # of the first row of each chunk its number, less its place in the table
    shifts: Indices = np.asarray([
        number + chunk.offset + len(chunk) - end
        for number, chunk, end in zip(numbers, chunks, ends, strict=True)
    ])  # fmt: skip
    return rows + shifts[np.searchsorted(ends, rows, side="right")]


def _addresses(chunks: Sequence[Any]) -> tuple[int, ...]:
    """Return where the values of Arrow arrays are in memory; of nulls alone, nowhere."""
    buffers = (buffer for chunk in chunks for buffer in chunk.buffers())
    return tuple(buffer.address for buffer in buffers if buffer is not None)


def _is_hugging_face(dataset: object) -> bool:
    """Whether it is a map-style set of the package ``datasets``, which need not be installed."""
    modules = {each.__module__.partition(".")[0] for each in type(dataset).__mro__}
    return "datasets" in modules and hasattr(dataset, "_indices")


def _numbers(indices: Sequence[Any], known: dict[Any, int]) -> Indices:
    """Return the indices; keys of another kind are numbered, equal ones alike."""
    keys = [key.item() if isinstance(key, Tensor) else key for key in indices]
    if not all(isinstance(key, Integral) for key in keys):
        keys = [known.setdefault(("key", key), len(known)) for key in keys]
    return np.asarray(keys, dtype=np.int64)


def refuse_sampler(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose sampler weights records or may leave some out.

    The plan's Poisson samples, which are of the whole data set, would replace it.
    """
    batches = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches
    sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
    if isinstance(sampler, WeightedRandomSampler):
        raise ArgumentError(
            "a weighted sampler draws some records more often, and their owners would lose more "
            "privacy than the plan accounts for, which has one sampling rate: weight the loss "
            "instead, per record and before the clip"
        )
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return  # refused as such
    complete = type(sampler) in (SequentialSampler, RandomSampler)
    if not complete or not len(sampler) == len(sampler.data_source) == len(loader.dataset):
        raise ArgumentError(
            f"the loader's {type(sampler).__name__} may leave records of the data set out, and "
            "the Poisson samples that replace it would not: pass torch.utils.data.Subset(dataset, "
            "indices), with the records to train on, and no sampler"
        )


def _refuse_weaker_unit(plan: PrivacyPlan, dataset: Any) -> None:
    """Refuse a promise per record where a :class:`dpbam.data.DataSet` names another unit.

    Nothing is known of other data: their owners are what ``units`` says.
    """
    owner = getattr(dataset, "owner", None)
    if plan.unit != "record" or not callable(owner) or not hasattr(dataset, "unit"):
        return
    sign, unit = f"the unit {dataset.unit!r}", dataset.unit
    if unit is None:
        if (named := owner()) is None:
            return
        sign, unit = named.sign, named.column
    repair = f"unit={unit!r}, and pass units=data.column({unit!r})"
    if unit is None:
        repair = "another unit, and pass units=, the owner of each record"
    if unit != "record":
        raise ArgumentError(
            f"the data set has {sign}, but the plan's unit is the record, which protects less: "
            f"make the plan with {repair}; or choose single records by loading with unit='record', "
            "or by dataclasses.replace(data, unit='record')"
        )


def _unit_index(plan: PrivacyPlan, units: Any, records: int) -> UnitIndex | None:
    if plan.unit == "record":
        if units is not None:
            raise ArgumentError(
                "units were given but the plan's unit is the record: make the plan with, for "
                "example, unit='patient' and max_records"
            )
        return None
    if units is None:
        raise ArgumentError(
            f"the plan's unit is the {plan.unit}: pass units=, the {plan.unit} of each record"
        )
    if len(np.asarray(units)) != records:
        raise ArgumentError(f"units has {len(units)} entries for {records} records: one each")
    return UnitIndex(units, plan.max_records)
