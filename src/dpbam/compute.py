"""How directions are computed: by which engine, and on how many rows at once.

:class:`Compute` has the settings, :class:`Runner` runs them. All engines compute the same
directions, so that the settings change speed and memory, but no result except for rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dpbam import _validate
from dpbam.batches import LogicalBatch, Views
from dpbam.engines import (
    Engine,
    FunctionalEngine,
    FusedEngine,
    LoopEngine,
    Loss,
    PerSampleDirections,
    PhysicalBatch,
    StatefulModelError,
    UnsupportedModelError,
)
from dpbam.engines.memory import (
    LIMIT_BYTES,
    LOOP_ROWS,
    MOST_ROWS,
    Fit,
    changed_engine,
    fit_rows,
    serving_engine,
)
from dpbam.engines.structure import describe
from dpbam.engines.synthetic import synthetic_rows
from dpbam.errors import DPBAMError
from dpbam.methods import DPSGD, Method
from dpbam.params import Params, device_of, trainable, zeros
from dpbam.privacy.clipping import unclipped

ENGINES = ("auto", "fused", "functional", "loop")  # but for auto, the fastest first
_SLOWER = {
    "functional": "computes the same, with a gradient per sample in memory",
    "loop": "computes the same one sample at a time, many times slower",
}
_NORM_SHARE = 8  # of a step's memory, one layer's norm of the fused engine may take an eighth


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Settings of an oracle that change speed and memory, but no result except for rounding.

    Attributes:
        engine: ``"auto"``, ``"fused"``, ``"functional"`` or ``"loop"``; auto takes the fastest that
            supports the model.
        physical_batch_size: the most rows (samples times views) computed at once; None measures
            how many fit into ``memory_limit``.
        memory_limit: bytes that a step may allocate, where the physical batch size is measured. An
            eighth of it is what one layer's norm may take in the fused engine; a larger one is
            computed by some units at a time.

    Example:
        >>> Compute(engine="loop", physical_batch_size=64).engine
        'loop'
    """

    engine: str = "auto"
    physical_batch_size: int | None = None
    memory_limit: int = LIMIT_BYTES

    def __post_init__(self) -> None:
        _validate.one_of("engine", self.engine, ENGINES)
        if self.physical_batch_size is not None:
            _validate.count("physical_batch_size", self.physical_batch_size)
        _validate.count("memory_limit", self.memory_limit)


_MEASURED: dict[Hashable, Fit] = {}  # by all that a step's memory and work depend on
_MOST_MEASURED = 1024


class Runner:
    """The engines of one model, the fastest first, and the physical batches that they are given.

    A runner is an engine itself. With ``engine="auto"`` it gives up an engine that does not support
    the model or the method, and one warning gives the reason. An engine that has not computed a
    batch yet is given up at any error except interrupts and lack of memory. One that has, on
    records or on the rows without a record of :meth:`fit`, is kept: engines round differently, so
    a record that made it fail would change the directions of all others. Its error is raised
    before the step is charged.

    Args:
        compute: the settings.
        model: the model.
        loss: (output, targets) -> one value per row.
        groups: the clipping group of each trainable parameter.
        views: the augmented views of each sample; by default one, the sample itself.

    Attributes:
        views: as passed.
        rows: the physical batch size; None until it is set or measured.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> loss = nn.MSELoss(reduction="none")
        >>> Runner(Compute(engine="functional"), model, loss, {"weight": 0, "bias": 0}).name
        'functional'
    """

    def __init__(
        self,
        compute: Compute,
        model: nn.Module,
        loss: Loss,
        groups: Mapping[str, int],
        views: Views | None = None,
    ) -> None:
        self._compute, self._model, self._loss, self._groups = compute, model, loss, groups
        self.views = views or Views()
        self.rows = compute.physical_batch_size
        limit = max(1, compute.memory_limit // _NORM_SHARE)
        engines: tuple[Engine, ...] = (
            FusedEngine(model, loss, groups, memory_limit=limit),
            FunctionalEngine(model, loss, groups),
            LoopEngine(model, loss, groups),
        )
        self._engines = [e for e in engines if compute.engine in ("auto", e.name)]
        self._served = False
        self._tried_on: str | None = None  # the engine that served on synthetic rows
        self._failed = False
        self._plain: Runner | None = None  # of :meth:`plain_sum`

    @property
    def name(self) -> str:
        """The engine in use."""
        return self._engines[0].name

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> PerSampleDirections:
        """Return the directions of a physical batch, by the fastest engine that supports it.

        Raises:
            StatefulModelError: for a model that keeps state between passes, on any engine; or if an
                engine serves that did not on rows without a record: then a pass has changed
                something that the model reads.
            Exception: the last engine's, if none supports the model.
        """
        reasons: list[str] = []
        engines = list(self._engines)  # a record on which all fail gives none of them up
        while True:
            engine = engines[0]
            try:
                directions = engine.directions(batch, method, lam, plain=plain)
                break
            except (StatefulModelError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                chosen = self._served or self._tried_on == engine.name
                if len(engines) == 1 or (chosen and not isinstance(error, UnsupportedModelError)):
                    raise
                if chosen:
                    raise UnsupportedModelError(
                        f"{error} (the {engine.name} engine has computed other rows of this model; "
                        "which engine serves must not depend on a record: choose one that supports "
                        f"all of them, such as Compute(engine={engines[-1].name!r}))"
                    ) from error
                text = str(error).strip() or type(error).__name__
                reason = text.splitlines()[0].rstrip(".")
                reasons.append(f"the {engine.name} engine does not support this: {reason}")
                del engines[0]
        self._engines, self._served = engines, True
        if reasons:
            warnings.warn(
                f"{'; '.join(reasons)}. The {engine.name} engine is used, which "
                f"{_SLOWER[engine.name]}; for speed, change what is named here",
                stacklevel=2,
            )
        tried_on = self._tried_on
        if tried_on is not None and ENGINES.index(engine.name) < ENGINES.index(tried_on):
            raise changed_engine(tried_on, engine.name)
        return directions

    def fit(self, inputs: Any, targets: Any, method: Method, lam: float) -> Fit:
        """Choose ``rows``, if it is None, so that a step stays within the memory limit.

        Of ``inputs`` and ``targets`` only shapes and types are read: the model runs on rows without
        a record (:mod:`dpbam.engines.synthetic`).
        """
        fit = self._measure(self._samples(inputs, targets), method, lam)
        limit = self._compute.memory_limit
        if self.rows is None and fit.rows == 1 and fit.bytes > limit:
            warnings.warn(
                f"one row takes {fit.bytes:,} bytes, more than memory_limit={limit:,}: rows are "
                "computed one at a time; raise Compute(memory_limit=...), or make the model or its "
                "inputs smaller",
                stacklevel=2,
            )
        self.rows, self._tried_on = fit.rows, fit.engine
        return fit

    def _samples(self, inputs: Any, targets: Any) -> list[PhysicalBatch]:
        """Return units without a record, of the form of the batch."""
        device = device_of(self._model)
        return [
            next(LogicalBatch.of(*row, None, 1).split(1, self.views, device))
            for row in synthetic_rows(inputs, targets)
        ]

    def _trial(self) -> Runner:
        """Return a runner on the same model: this one keeps the engines that it gives up."""
        return Runner(self._compute, self._model, self._loss, self._groups)

    def _measure(self, samples: list[PhysicalBatch], method: Method, lam: float) -> Fit:
        """Return what was measured on a model of the same layers in this process, or measure it.

        Measuring takes ten times as long as a step of a small model.
        """
        limit = self._compute.memory_limit
        measure = partial(
            fit_rows, self._trial, samples, method, lam, rows=self.rows, limit_bytes=limit
        )
        structure = describe(self._model, self._loss, method, samples)
        if structure is None:
            return measure()
        key = (structure, self._compute, tuple(self._groups.items()), self.rows, lam)
        if key not in _MEASURED:
            while len(_MEASURED) >= _MOST_MEASURED:
                del _MEASURED[next(iter(_MEASURED))]  # the oldest
            _MEASURED[key] = measure()
        return _MEASURED[key]

    @property
    def tried(self) -> bool:
        """Whether the model has run on rows without a record, or failed on them."""
        return self._tried_on is not None or self._failed

    def fit_or_fall_back(self, inputs: Any, targets: Any, method: Method, lam: float) -> None:
        """Choose ``rows``, where it is not given, and the engine, on rows without a record.

        For a model that runs on records only, few rows are taken, with a warning.
        """
        try:
            if self.rows is None:
                self.fit(inputs, targets, method, lam)
            else:  # without counting bytes: a pass on a row or two
                samples = self._samples(inputs, targets)
                self._tried_on = serving_engine(self._trial, samples, method, lam)
        except (DPBAMError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            self._failed = True
            if self.rows is not None:
                return
            self.rows = LOOP_ROWS
            warnings.warn(
                "memory is measured on rows without a record (numbers between 0 and 1, and whole "
                f"numbers 0 or 1), and the model fails on them ({type(error).__name__}: {error}): "
                f"{LOOP_ROWS} rows are computed at once; pass "
                "compute=dpbam.Compute(physical_batch_size=...) for more",
                stacklevel=4,
            )

    def physical(self, batch: LogicalBatch) -> Iterator[PhysicalBatch]:
        return batch.split(self._most_rows, self.views, device_of(self._model))

    def is_whole(self, batch: LogicalBatch) -> bool:
        fits = len(batch.ids) * self.views.multiplicity <= self._most_rows
        return fits and batch.regular

    def plain_sum(self, batch: LogicalBatch) -> Params:
        """sum_i g_i, neither clipped nor noised."""
        total = zeros(trainable(self._model))
        # by a runner of its own: what serves or fails here would else fix the engine of the method
        self._plain = self._plain or self._trial()
        for physical in self.physical(batch):
            directions = self._plain.directions(physical, DPSGD(), 0.0)
            for name, batch_sum in directions.weighted_sum(unclipped(directions.norms())).items():
                total[name] += batch_sum
        return total

    @property
    def _most_rows(self) -> int:
        return self.rows or MOST_ROWS
