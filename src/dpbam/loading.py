"""From a plan's Poisson sample to tensors: index, gather whole batches, or drive a DataLoader.

An empty sample gives an empty batch (zero rows, right shapes), never a skipped step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from dpbam.errors import ArgumentError, ArgumentTypeError
from dpbam.params import map_rows, rows, select_rows
from dpbam.privacy.plan import PrivacyPlan
from dpbam.privacy.sampling import PoissonSampler, Share, UnitIndex


class PoissonBatches:
    """Iterates over (inputs, targets, units): the batches of one plan on one data set.

    Args:
        plan: says n, the unit and its cap.
        dataset: a map-style data set of (input, target) pairs; or a tuple (inputs, targets) of
            tensors (or dicts of tensors) with the records along the first axis; or anything with
            ``batch(indices) -> (inputs, targets)``, such as :class:`dpbam.data.DataSet`.
        sampler: the plan's sampler.
        units: the owner of each record, if the unit is not the record.
        num_workers: of the DataLoader; or the threads that gather batches ahead.
        share: this process's part of the units, where several draw one sample together.

    Example:
        >>> from dpbam.privacy.plan import PrivacyPlan
        >>> plan = PrivacyPlan(n=4, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-5)
        >>> data = (torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1]))
        >>> batches = PoissonBatches(plan, data, plan.sampler())
        >>> [(x.shape, y.tolist(), ids.tolist()) for x, y, ids in batches]
        [(torch.Size([4, 2]), [0, 1, 0, 1], [0, 1, 2, 3])]
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        dataset: Any,
        sampler: PoissonSampler,
        *,
        units: Any = None,
        num_workers: int = 0,
        share: Share | None = None,
    ) -> None:
        dataset = _records_of(dataset)
        self._tensors = dataset if isinstance(dataset, tuple | list) else None
        records = rows(dataset) if self._tensors is not None else len(dataset)
        if self._tensors is not None and len(dataset) != 2:
            raise ArgumentTypeError(
                f"a data set of tensors is (inputs, targets), got {len(dataset)} parts"
            )
        self._dataset, self._sampler, self._num_workers = dataset, sampler, num_workers
        self._share = share or Share()
        self._index = _unit_index(plan, units, records)
        n = self._index.n if self._index else records
        if n != plan.n:
            raise ArgumentError(
                f"the plan is for n = {plan.n} units ({plan.unit}) but the data set has {n}: the "
                "sampling rate would be another; make the plan with the data set's size"
            )

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        if self._tensors is not None:
            return self._from_tensors()
        if hasattr(self._dataset, "batch"):
            return self._from_batches()
        return self._from_loader()

    def _samples(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(records, units) of each step, both [N] int64.

        Every process draws for all n units and keeps what is its own. Seeded, all draw alike, and
        the parts make up the sample of a single process; unseeded, each has entropy of its own,
        and what is kept is independent of what the others keep.
        """
        for step in range(self._sampler.start, self._sampler.steps):
            units = self._sampler.indices(step)
            records = units
            if self._index:
                generator = self._sampler.randomness.generator("records", step)
                records, units = self._index.records(units, generator)
            own = self._share.owns(units)
            records, units = records[own], units[own]
            yield torch.as_tensor(records), torch.as_tensor(units)

    def _from_tensors(self) -> Iterator[tuple[Any, Any, Any]]:
        for records, units in self._samples():
            inputs, targets = select_rows(tuple(self._tensors or ()), records)
            yield inputs, targets, units

    def _from_batches(self) -> Iterator[tuple[Any, Any, Any]]:
        """Each thread gathers one whole batch ahead; they come out in order."""
        if not self._num_workers:
            yield from (self._gather(*sample) for sample in self._samples())
            return
        pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="dpbam-read")
        waiting: deque[Future[tuple[Any, Any, Any]]] = deque()
        try:
            for sample in self._samples():
                waiting.append(pool.submit(self._gather, *sample))
                if len(waiting) > self._num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _gather(self, records: Tensor, units: Tensor) -> tuple[Any, Any, Any]:
        inputs, targets = self._dataset.batch(records)
        return inputs, targets, units

    def _from_loader(self) -> Iterator[tuple[Any, Any, Any]]:
        empty = map_rows(lambda t: t[:0], default_collate([self._dataset[0]]))
        loader = DataLoader(
            _WithUnit(self._dataset),
            batch_sampler=_Pairs(self._samples()),
            num_workers=self._num_workers,
            collate_fn=_Collate(empty),
        )
        yield from loader


class _Pairs:
    """Turns (records, units) into the list of (record, unit) that a batch sampler yields."""

    def __init__(self, samples: Iterator[tuple[Tensor, Tensor]]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for records, units in self._samples:
            yield list(zip(records.tolist(), units.tolist(), strict=True))


class _WithUnit(Dataset[Any]):
    """A data set asked by (record, unit), which answers with the unit beside the item."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, pair: tuple[int, int]) -> tuple[Any, int]:
        record, unit = pair
        return self._dataset[record], unit


class _Collate:
    """default_collate that can make an empty batch."""

    def __init__(self, empty: Any) -> None:
        self._empty = empty

    def __call__(self, items: list[tuple[Any, int]]) -> tuple[Any, Any, Tensor]:
        units = torch.tensor([unit for _, unit in items], dtype=torch.int64)
        pair = default_collate([item for item, _ in items]) if items else self._empty
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ArgumentTypeError("a data set's items must be (input, target) pairs")
        inputs, targets = pair
        return inputs, targets, units


def _records_of(dataset: Any) -> Any:
    """What can be asked for any record by its number; a loader's own batches are not Poisson."""
    if isinstance(dataset, DataLoader | IterableDataset):
        raise ArgumentTypeError(
            f"oracle.batches draws Poisson samples of its own, which a {type(dataset).__name__} "
            "cannot give: pass the data set itself, one that answers dataset[i] and len(dataset)"
        )
    return dataset.tensors if isinstance(dataset, TensorDataset) else dataset


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
