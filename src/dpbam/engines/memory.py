"""How many rows fit: the memory of a step, measured on a few rows and extrapolated.

A step's peak is the largest of several phases, each a constant (parameters, sums) and a share a
row: for many rows a line. So the rows are doubled until the slope stays the same and the limit is
near. Tensors are counted as they come and go, by their storage: the same on every machine, and
without the allocator's own slack, for which ``physical_batch_size`` leaves a tenth free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpbam.engines.base import Engine, PhysicalBatch
from dpbam.methods import Method
from dpbam.params import map_rows

_FEW = 2


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors made while it is on: ``now``, and the ``peak``.

    Example:
        >>> with LiveBytes() as live:
        ...     a = torch.ones(1000)
        ...     b = a + a
        ...     del a
        >>> live.peak, live.now
        (8000, 4000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self._seen: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler (1.6 s) only to keep it out of here."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_bytes(engine: Engine, batch: PhysicalBatch, method: Method, lam: float) -> int:
    """The most bytes alive at once in one step on ``batch``, its inputs apart."""
    with LiveBytes() as live:
        handle = engine.directions(batch, method, lam)
        handle.weighted_sum(handle.norms().clamp_min(1.0).reciprocal())
    return int(live.peak)


def physical_batch_size(
    engine: Engine,
    sample: PhysicalBatch,
    method: Method,
    lam: float,
    limit_bytes: int,
    *,
    most: int = 4096,
) -> int:
    """The most units whose step stays within ``limit_bytes``, from 1 to ``most``.

    Args:
        engine: any engine.
        sample: one unit at least; its first is repeated, so its values do not matter.
        method: whose directions.
        lam: its lambda.
        limit_bytes: for everything that the step allocates.
        most: where to stop.

    Example:
        >>> from dpbam.engines import FusedEngine
        >>> from dpbam.methods import DPSGD
        >>> model = torch.nn.Linear(100, 10)
        >>> engine = FusedEngine(model, torch.nn.CrossEntropyLoss(reduction="none"))
        >>> sample = PhysicalBatch(
        ...     torch.zeros(1, 100), torch.zeros(1, dtype=torch.int64), torch.zeros(1).long(), 1,
        ...     torch.ones(1), torch.zeros(1).long())
        >>> small = physical_batch_size(engine, sample, DPSGD(), 0.0, 100_000)
        >>> small < physical_batch_size(engine, sample, DPSGD(), 0.0, 1_000_000)
        True
    """
    engine.directions(_repeated(sample, _FEW), method, lam)  # what is done once is done now
    limit = 0.9 * limit_bytes
    units, before, share = _FEW, peak_bytes(engine, _repeated(sample, _FEW), method, lam), 0.0
    while 2 * units <= most and before < limit:
        now = peak_bytes(engine, _repeated(sample, 2 * units), method, lam)
        last, share = share, max(1.0, (now - before) / units)  # bytes a unit
        units, before = 2 * units, now
        room = units + (limit - before) / share
        if abs(share - last) <= 0.02 * share and room < 3 * units:
            break  # the line is found, and another phase has hardly room to overtake it
    return int(max(1, min(most, units + (limit - before) / max(share, 1.0))))


def estimated_bytes(
    engine: Engine, sample: PhysicalBatch, method: Method, lam: float, units: int
) -> int:
    """The peak of a step on ``units`` units, from the line through two small ones."""
    few, more = (
        peak_bytes(engine, _repeated(sample, k), method, lam) for k in (4 * _FEW, 8 * _FEW)
    )
    share = max(0.0, (more - few) / (4 * _FEW))  # bytes a unit
    return int(more + share * max(0, units - 8 * _FEW))


def _repeated(sample: PhysicalBatch, units: int) -> PhysicalBatch:
    """The first unit of ``sample``, ``units`` times."""
    index = (sample.unit == 0).nonzero()[:, 0].repeat(units)
    each = index.shape[0] // units

    def take(t: Tensor) -> Tensor:
        return t[index]

    inputs, targets, weights, keys = map_rows(
        take, (sample.inputs, sample.targets, sample.weights, sample.keys)
    )
    unit = torch.arange(units, device=sample.unit.device).repeat_interleave(each)
    return PhysicalBatch(inputs, targets, unit, units, weights, keys)
