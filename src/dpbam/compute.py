"""How directions are computed: settings that change only speed and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from dpbam import _validate
from dpbam.batches import LogicalBatch, Views
from dpbam.engines import Loss, PhysicalBatch, make_engine
from dpbam.engines.memory import LIMIT_BYTES, MOST_ROWS, Fit, fit_rows
from dpbam.methods import DPSGD, Method
from dpbam.params import Params, device_of, trainable, zeros
from dpbam.privacy.clipping import unclipped


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Settings of an oracle that change speed and memory, but no result except for rounding.

    Attributes:
        engine: ``"auto"``, ``"fused"``, ``"functional"`` or ``"loop"``; auto takes the fastest that
            supports the model.
        physical_batch_size: the most rows (samples times views) computed at once; None measures
            how many fit into ``memory_limit``.
        memory_limit: bytes that a step may allocate, where the physical batch size is measured.

    Example:
        >>> Compute(engine="loop", physical_batch_size=64).engine
        'loop'
    """

    engine: str = "auto"
    physical_batch_size: int | None = None
    memory_limit: int = LIMIT_BYTES

    def __post_init__(self) -> None:
        if self.physical_batch_size is not None:
            _validate.count("physical_batch_size", self.physical_batch_size)
        _validate.count("memory_limit", self.memory_limit)


class Computation:
    """The engine of one oracle, and the physical batches that it is given.

    Attributes:
        engine: computes directions.
        views: the augmented views of each sample.
        rows: the physical batch size; None until it is given or measured.
    """

    def __init__(
        self,
        compute: Compute,
        model: nn.Module,
        loss: Loss,
        groups: Mapping[str, int],
        views: Views,
    ) -> None:
        self._make = partial(make_engine, compute.engine, model, loss, groups)
        self._model, self.views, self._limit = model, views, compute.memory_limit
        self.engine = self._make()
        self.rows = compute.physical_batch_size

    def fit(self, inputs: Any, targets: Any, method: Method, lam: float) -> Fit:
        """Choose ``rows``, if it is None, so that a step stays within the memory limit."""
        batch = LogicalBatch.of(inputs, targets, None, 1)
        sample = next(batch.split(1, self.views, device_of(self._model)))
        found = fit_rows(self._make, sample, method, lam, rows=self.rows, limit_bytes=self._limit)
        self.rows = found.rows
        return found

    def physical(self, batch: LogicalBatch) -> Iterator[PhysicalBatch]:
        return batch.split(self._most_rows, self.views, device_of(self._model))

    def is_whole(self, batch: LogicalBatch) -> bool:
        fits = len(batch.ids) * self.views.multiplicity <= self._most_rows
        return fits and batch.regular

    def plain_sum(self, batch: LogicalBatch) -> Params:
        """sum_i g_i, neither clipped nor noised."""
        total = zeros(trainable(self._model))
        for physical in self.physical(batch):
            directions = self.engine.directions(physical, DPSGD(), 0.0)
            for name, part in directions.weighted_sum(unclipped(directions.norms())).items():
                total[name] += part
        return total

    @property
    def _most_rows(self) -> int:
        return self.rows or MOST_ROWS
