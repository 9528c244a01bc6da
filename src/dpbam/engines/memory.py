"""The rows of a physical batch: as many as are worth while, and fit into memory.

**Speed.** The time of a step is a part per row and a constant part: calls of operations, and passes
over the parameters. More rows are worth while until the constant part is negligible: some dozen
for a convolutional net, thousands for a perceptron. The work of a step is counted on a few rows,
not timed, so that the same model gets the same split on every machine and in every repetition, and
rounds alike. See :func:`worthwhile_units`.

**Memory.** The peak of a step is the largest of several phases, each a constant (parameters, sums)
plus bytes per row: linear for many rows. So the rows are doubled until the slope is constant and
the limit near. Tensors are counted by their storage when they are allocated and freed: the same on
every machine, without the allocator's overhead, for which ``physical_batch_size`` leaves a tenth
free.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpbam.engines.base import Engine, PhysicalBatch, StatefulModelError
from dpbam.methods import Method
from dpbam.params import select_rows

MOST_ROWS = 4096
LOOP_ROWS = 16  # the loop engine gains nothing by more, and holds every unit's gradient
LIMIT_BYTES = 2**31  # fixed, so that the same model gets the same split on every machine
_FEW = 2
_CALL = 2**15  # a call of an operation takes about the time of allocating and filling these bytes
_CONSTANT = 0.05  # the share of a step's work that may be constant


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of tensors allocated under this mode: ``now``, and the ``peak``.

    Tensors that exist before, such as parameters, do not count. ``work`` is the sum of all bytes
    ever allocated, plus some for each call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak, self.work = 0, 0, 0
        self._seen: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch import its compiler (1.6 s)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # a result may be a view of it
                self._count(leaf.untyped_storage(), 0)
        out = func(*args, **(kwargs or {}))
        self.work += _CALL
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._count(storage, storage.nbytes())
        return out

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.work += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_bytes(engine: Engine, batch: PhysicalBatch, method: Method, lam: float) -> int:
    """Return the most bytes allocated at once in one step on ``batch``, without its inputs."""
    return int(count_work(engine, batch, method, lam).peak)


def count_work(engine: Engine, batch: PhysicalBatch, method: Method, lam: float) -> LiveBytes:
    """Count the bytes and the work of one step on ``batch``."""
    live = LiveBytes()
    with live:
        handle = engine.directions(batch, method, lam)
        handle.weighted_sum(handle.norms().clamp_min(1.0).reciprocal())
    return live


def worthwhile_units(engine: Engine, sample: PhysicalBatch, method: Method, lam: float) -> int:
    """Return the least units for which the constant part of a step is 5% of its work.

    The first unit of ``sample`` is repeated, so that its values do not matter.
    """
    few, more = (
        count_work(engine, _repeat_first(sample, k), method, lam).work for k in (4 * _FEW, 8 * _FEW)
    )
    return max(8 * _FEW, worthwhile(few, more, 4 * _FEW))


def worthwhile(few: float, more: float, units: int) -> int:
    """Return the same from the work of a step on ``units`` units, and on twice as many.

    Example:
        >>> worthwhile(1010.0, 1020.0, 10)  # 1 per unit, and 1000 for any number of them
        20000
    """
    share = max(1.0, (more - few) / units)  # work per unit
    constant = max(0.0, few - units * share)
    return math.ceil(constant / (_CONSTANT * share))


def physical_batch_size(
    engine: Engine,
    sample: PhysicalBatch,
    method: Method,
    lam: float,
    limit_bytes: int,
    *,
    most: int = 4096,
) -> int:
    """Return the most units whose step stays within ``limit_bytes``, from 1 to ``most``.

    The limit is for everything that the step allocates. The first unit of ``sample`` is repeated.

    Example:
        >>> from dpbam.engines import FusedEngine
        >>> from dpbam.methods import DPSGD
        >>> model = torch.nn.Linear(100, 10)
        >>> engine = FusedEngine(model, torch.nn.CrossEntropyLoss(reduction="none"))
        >>> sample = PhysicalBatch(
        ...     torch.zeros(1, 100), torch.zeros(1, dtype=torch.int64), 1, torch.zeros(1).long())
        >>> small = physical_batch_size(engine, sample, DPSGD(), 0.0, 100_000)
        >>> small < physical_batch_size(engine, sample, DPSGD(), 0.0, 1_000_000)
        True
    """
    engine.directions(_repeat_first(sample, _FEW), method, lam)  # allocates what later steps reuse
    limit = 0.9 * limit_bytes
    units, before, share = _FEW, peak_bytes(engine, _repeat_first(sample, _FEW), method, lam), 0.0
    while 2 * units <= most and before < limit:
        now = peak_bytes(engine, _repeat_first(sample, 2 * units), method, lam)
        last, share = share, max(1.0, (now - before) / units)  # bytes per unit
        units, before = 2 * units, now
        fitting = units + (limit - before) / share
        if abs(share - last) <= 0.02 * share and fitting < 3 * units:
            break  # linear, and too near the limit for another phase to become the largest
    return int(max(1, min(most, units + (limit - before) / max(share, 1.0))))


class Fit(NamedTuple):
    """Rows at once, the name of the engine, and the bytes of a step."""

    rows: int
    engine: str
    bytes: int


def fit_rows(
    make: Callable[[], Engine],
    samples: Sequence[PhysicalBatch],
    method: Method,
    lam: float,
    *,
    rows: int | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Fit:
    """Return the rows to compute at once within ``limit_bytes``; or, given ``rows``, the bytes.

    ``make`` creates an engine for the trial only, so that it does not affect the one in use. Each
    of ``samples`` is a unit that no record is part of; the first that suits the model is repeated.
    """
    with warnings.catch_warnings():  # the engine in use will warn
        warnings.simplefilter("ignore")
        engine, sample = _select(make, samples, method, lam)
        each = sample.rows_per_unit
        if rows is None:
            most = max(1, LOOP_ROWS // each)
            if engine.name != "loop":
                enough = worthwhile_units(engine, sample, method, lam)
                most = min(max(1, MOST_ROWS // each), enough)
            rows = each * physical_batch_size(engine, sample, method, lam, limit_bytes, most=most)
        taken = _estimate_bytes(engine, sample, method, lam, max(1, rows // each))
    return Fit(rows, engine.name, taken)


def serving_engine(
    make: Callable[[], Engine], samples: Sequence[PhysicalBatch], method: Method, lam: float
) -> str:
    """Return the name of the engine that serves on rows without a record, as :func:`fit_rows`."""
    with warnings.catch_warnings():  # the engine in use will warn
        warnings.simplefilter("ignore")
        return _select(make, samples, method, lam)[0].name


def _select(
    make: Callable[[], Engine], samples: Sequence[PhysicalBatch], method: Method, lam: float
) -> tuple[Engine, PhysicalBatch]:
    """Return the engine that serves, and the sample: one on which it is the first choice, if any.

    A model may fail on a sample, or compute NaN, that no record is like: a sequence of length 0, a
    mask that leaves nothing.

    Raises:
        Exception: that of the first sample, if the model fails on all.
    """
    errors: list[Exception] = []
    choices: list[tuple[bool, bool, Engine, PhysicalBatch]] = []
    for sample in samples:
        engine = make()
        first_choice = engine.name
        try:
            norms = engine.directions(sample, method, lam).norms()
        except (StatefulModelError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            errors.append(error)
            continue
        slower, broken = engine.name != first_choice, not bool(norms.isfinite().all())
        if not slower and not broken:
            return engine, sample
        if slower:
            _check_repeats(make(), sample, method, lam, engine.name)
        choices.append((slower, broken, engine, sample))
    if not choices:
        raise errors[0]
    *_, engine, sample = min(choices, key=lambda choice: choice[:2])
    return engine, sample


def _check_repeats(
    engine: Engine, sample: PhysicalBatch, method: Method, lam: float, served: str
) -> None:
    """Refuse a model whose first use changes which engine serves the same sample."""
    engine.directions(sample, method, lam)
    if engine.name != served:
        raise changed_engine(served, engine.name)


def changed_engine(before: str, now: str) -> StatefulModelError:
    """Return the refusal of a model that ran on one engine at first, and then on a faster one."""
    return StatefulModelError(
        f"the model ran on the {before} engine alone when it was first tried, without a record, "
        f"and runs on the {now} engine now: a pass has changed something outside the model that it "
        "reads, such as a number that is fixed at first use; set it before the training, to a "
        "value that is public"
    )


def _estimate_bytes(
    engine: Engine, sample: PhysicalBatch, method: Method, lam: float, units: int
) -> int:
    """Return the peak of a step on ``units`` units, extrapolated from two small ones."""
    few, more = (
        peak_bytes(engine, _repeat_first(sample, k), method, lam) for k in (4 * _FEW, 8 * _FEW)
    )
    share = max(0.0, (more - few) / (4 * _FEW))  # bytes per unit
    return int(more + share * max(0, units - 8 * _FEW))


def _repeat_first(sample: PhysicalBatch, units: int) -> PhysicalBatch:
    """Return the first unit of ``sample``, ``units`` times."""
    index = torch.arange(sample.rows_per_unit).repeat(units)
    rows = (sample.inputs, sample.targets, sample.row_keys())
    inputs, targets, keys = select_rows(rows, index)
    return PhysicalBatch(inputs, targets, units, keys, sample.rows_per_unit)
