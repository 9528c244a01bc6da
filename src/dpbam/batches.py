"""The logical batch: one Poisson sample, whole, and its split into physical batches.

A unit of privacy may have several records (a patient's images), and every record K augmented
views. Both are rows of the unit, averaged before it is clipped. Units are never split, and a row's
random draws depend on its own key, so the split does not change the result.

All units of a physical batch have the same number of rows. Otherwise shapes, and with them the
order of float32 sums, would follow the unit with the most rows, and where activations are rounded
to bfloat16 one unit would change the directions of all others: by up to 1% with BAM's ascent step,
so that one unit of two rows moved the clipped sum of 255 others by 1.12 C.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam import _validate
from dpbam.engines.base import PhysicalBatch
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.own_code import (
    check_not_refused,
    is_built_in_function,
    other_batches,
    refuse,
    run_kept_apart,
)
from dpbam.params import map_rows, rows, select_rows, tensors_in
from dpbam.privacy.randomness import Randomness, derive

Keys = Callable[[], Tensor]  # keys of rows, computed where a draw needs them
_RELATIVE, _ROUNDING = 1e-3, 1e-4  # of a number, and of the largest of its unit
_CANCELLING = 16  # units in the last place of the unit's largest input
_COMPARED_AGAIN = 1 / 8  # of the later physical batches
_AUGMENT = 1 << 20  # separates a view's augmentation draws from its dropout draws


@dataclass(frozen=True)
class Views:
    """Augmentation multiplicity: K augmented views per row.

    Attributes:
        augment: (inputs, keys [N]) -> inputs; None leaves the inputs as they are.
        multiplicity: K.
        augment_targets: the same for targets that move with the inputs, such as masks.

    Guarantee: an augmentation that mixes units (mixup, a batch's mean) is refused at the first
    physical batch of several units, and one that keeps something in its attributes at any. One that
    mixes them in some batches only is looked for in an eighth of the later ones.

    Assumptions: units that change one another do so in one of the batches that are compared, which
    is a search, and no proof (:mod:`dpbam.own_code`); what is kept is in the attributes.

    Proof: the units of that batch, with all rows and views of each, are augmented again in other
    batches, and compared; attributes are compared around each call.
    """

    augment: Callable[[Any, Tensor], Any] | None = None
    multiplicity: int = 1
    augment_targets: Callable[[Any, Tensor], Any] | None = None
    _compared: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _refused: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate.count("multiplicity", self.multiplicity)

    def of(self, inputs: Any, keys: Keys, units: int) -> Any:
        """Map [N] rows of ``units`` units to [N K] views; ``keys`` are those of the views."""
        k = self.multiplicity
        if k > 1:
            inputs = map_rows(lambda t: t.repeat_interleave(k, dim=0), inputs)
        if self.augment is not None:
            row_keys = keys()
            view_keys = derive(row_keys, _AUGMENT)
            inputs = self._augment_units("augment", self.augment, inputs, view_keys, units)
            if rows(inputs) != len(row_keys):
                raise ArgumentError(
                    f"augment returned {rows(inputs)} rows for {len(row_keys)}: it must change "
                    "each row by itself, and neither add nor drop any"
                )
        return inputs

    def of_targets(self, targets: Any, keys: Keys, units: int) -> Any:
        """Map the targets of [N K] views to those that move with them."""
        if self.augment_targets is None:
            return targets
        view_keys = derive(keys(), _AUGMENT)
        augment = self.augment_targets
        return self._augment_units("augment_targets", augment, targets, view_keys, units)

    def _augment_units(
        self, name: str, augment: Callable[[Any, Tensor], Any], batch: Any, keys: Tensor, units: int
    ) -> Any:
        """Return the augmented batch, compared with its units in other batches now and then."""
        # units, not rows: every other row of K views may be a view of every unit. A single unit
        # shows nothing: memory is measured on one row without a record
        check_not_refused(augment, refused=name in self._refused)
        was_compared = name in self._compared
        if units < 2 or (was_compared and not self._compares_again(augment)):
            return run_kept_apart(augment, batch, keys)
        before = map_rows(torch.clone, batch)  # an augmentation may write to what it gets
        together = run_kept_apart(augment, batch, keys)
        if rows(together) != len(keys):
            return together
        rows_per_unit = len(keys) // units
        others = other_batches(units, keys.device)
        for places in random.SystemRandom().sample(others, 1) if was_compared else others:
            steps = torch.arange(rows_per_unit, device=keys.device)
            index = (places[:, None] * rows_per_unit + steps).flatten()
            inputs = select_rows(before, index)
            apart = run_kept_apart(augment, map_rows(torch.clone, inputs), keys[index])
            if not _alike(select_rows(together, index), apart, inputs, len(places)):
                refuse(augment)
                self._refused.add(name)  # also where the object takes no mark
                raise PlanViolationError(
                    f"{name} gives a row other values when other rows are left out, so that one "
                    "unit would change the others: change each row by itself, and draw from its key"
                )
        self._compared.add(name)
        return together

    def _compares_again(self, augment: Callable[..., Any]) -> bool:
        """Whether a later physical batch is compared with one other: of the user's code, some."""
        if is_built_in_function(augment):
            return False
        return random.SystemRandom().random() < _COMPARED_AGAIN  # no global generator may move

    def keys_of(self, keys: Tensor) -> Tensor:
        """Map the keys of [N] rows to those of their views, [N K]."""
        each = [derive(keys, view) for view in range(self.multiplicity)]
        return torch.stack(each, dim=1).flatten()


@dataclass(frozen=True)
class LogicalBatch:
    """The rows of one Poisson sample, ordered by unit.

    Attributes:
        inputs: leading axis N.
        targets: leading axis N.
        ids: [N] ascending; the unit of each row, a number that stays the same from step to step.
        places: [N] the row's place within its unit.
        counts: [U] the number of rows of each unit, in the order of the units. Not to be shared.
        keys: returns [N] the keys of the rows' random draws, computed where one is needed.
    """

    inputs: Any
    targets: Any
    ids: Tensor
    places: Tensor
    counts: NDArray[np.int64]
    keys: Keys

    @classmethod
    def of(cls, inputs: Any, targets: Any, units: Tensor | None, max_records: int) -> LogicalBatch:
        """Order rows by unit and check that no unit has more rows than the plan allows."""
        n = rows(inputs)
        if rows(targets) != n:
            raise ArgumentError(f"{n} inputs but {rows(targets)} targets: one target each")
        if units is None:  # every row is a unit of its own
            alone = torch.arange(n), torch.zeros(n, dtype=torch.int64)
            return cls(inputs, targets, *alone, np.ones(n, np.int64), partial(_no_keys, n))
        ids = _whole_numbers(torch.as_tensor(units))
        if ids.shape != (n,):
            raise ArgumentError(f"units must have shape ({n},), got {tuple(ids.shape)}")
        if (ids[1:] > ids[:-1]).all():  # as :meth:`dpbam.oracle.batches` gives them, one row each
            placed = torch.from_numpy(ids), torch.zeros(n, dtype=torch.int64)
            return cls(inputs, targets, *placed, np.ones(n, np.int64), partial(_no_keys, n))
        if (ids[1:] < ids[:-1]).any():
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            inputs, targets = select_rows((inputs, targets), torch.from_numpy(order))
        places = np.arange(n) - np.searchsorted(ids, ids)
        if n and places.max() >= max_records:
            raise ArgumentError(
                f"unit {ids[places.argmax()]} has {places.max() + 1} rows in one batch, but the "
                f"plan allows {max_records}: a sample may enter a step once; raise the plan's "
                "max_records if units have several records"
            )
        counts = np.unique(ids, return_counts=True)[1]
        placed = torch.from_numpy(ids), torch.from_numpy(places)
        return cls(inputs, targets, *placed, counts, partial(_no_keys, n))

    @property
    def size(self) -> int:
        """The number of units. Not to be shared."""
        return len(self.counts)

    @property
    def regular(self) -> bool:
        """Whether all units have the same number of rows. Not to be shared."""
        if len(self.counts) == len(self.ids):  # one row each, the usual case, or no unit
            return True
        return bool((self.counts == self.counts[0]).all())

    def order_as_split(self) -> Tensor:
        """Return [U] the places of the units in the order in which :meth:`split` gives them."""
        return torch.from_numpy(self.counts.argsort(kind="stable"))

    def ids_as_split(self) -> Tensor:
        """Return [U] the numbers of the units in the order in which :meth:`split` gives them."""
        return torch.from_numpy(np.unique(self.ids.numpy()))[self.order_as_split()]

    def keyed(self, randomness: Randomness, step: int) -> LogicalBatch:
        """Return the batch with row keys of (seed, step, unit, place)."""

        @cache
        def keys() -> Tensor:
            return derive(randomness.keys("rows", step, self.ids), self.places)

        return replace(self, keys=keys)

    def split(self, most_rows: int, views: Views, device: torch.device) -> Iterator[PhysicalBatch]:
        """Split into physical batches of whole units: at most ``most_rows`` views, or one unit.

        Units come by their number of rows, and those with the same number in their order.
        """
        _validate.count("physical_batch_size", most_rows)
        # for the logical batch at once, and so in one read; augmented inputs when they are there
        augmented = views.augment is not None
        numbers = (None if augmented else self.inputs, self.targets)
        inputs, targets = reached = within_reach(numbers)
        batch = self  # the usual case: none is beyond reach
        if reached is not numbers:
            batch = replace(self, inputs=self.inputs if augmented else inputs, targets=targets)
        allowed = max(1, most_rows // views.multiplicity)
        for count, alike in self._rows_by_count():
            length = max(1, allowed // count) * count
            for start in range(0, len(alike), length):
                yield batch._physical(alike[start : start + length], count, views, device)

    def _rows_by_count(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each number of rows that units have, and the rows of those units."""
        if self.regular:  # the usual case
            if len(self.counts):
                yield int(self.counts[0]), np.arange(len(self.ids))
            return
        rows_of_unit = self.counts.repeat(self.counts)  # [N]
        for count in np.unique(self.counts).tolist():
            yield count, (rows_of_unit == count).nonzero()[0]

    def _physical(
        self, chosen: NDArray[np.int64], count: int, views: Views, device: torch.device
    ) -> PhysicalBatch:
        """Return the rows ``chosen`` of units that have ``count`` rows each."""
        k, units = views.multiplicity, len(chosen) // count
        first, last = int(chosen[0]), int(chosen[-1])
        consecutive = last - first + 1 == len(chosen)
        index = slice(first, last + 1) if consecutive else torch.from_numpy(chosen)  # no copy
        has_all_rows = len(chosen) == len(self.ids)

        @cache
        def keys() -> Tensor:
            return views.keys_of(self.keys()[index].to(device))

        def place(t: Tensor) -> Tensor:
            return (t if has_all_rows else t[index]).to(device)

        inputs, targets = map_rows(place, (self.inputs, self.targets))
        inputs = views.of(inputs, keys, units)
        if views.augment is not None:
            inputs = map_rows(_cut, inputs)  # without a read: once per physical batch it would wait
        if k > 1:
            targets = map_rows(lambda t: t.repeat_interleave(k, dim=0), targets)
        targets = views.of_targets(targets, keys, units)
        return PhysicalBatch(inputs, targets, units, keys, count * k)


def _alike(one: Any, other: Any, inputs: Any, units: int) -> bool:
    """Whether nested batches have the same values, up to the rounding of their kernels."""
    ones, others, before = map(tensors_in, (one, other, inputs))
    if [t.shape for t in ones] != [t.shape for t in others]:
        return False
    sizes = [_sizes(t, units) for t in before]
    if len(sizes) != len(ones):  # by the largest of all, where results are not one per input
        sizes = [torch.stack(sizes).amax(0)] * len(ones)
    return all(_is_close(a, b, s, units) for a, b, s in zip(ones, others, sizes, strict=True))


def _is_close(a: Tensor, b: Tensor, input_sizes: Tensor, units: int) -> bool:
    """Whether results are equal up to rounding; ``input_sizes`` [U] are those of the inputs.

    What rounding may change is relative to the unit's numbers: an absolute bound would let small
    inputs pass. Of numbers that nearly cancel, the rounding is that of the inputs.
    """
    if not a.numel():
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    cancelling = _CANCELLING * torch.finfo(a.dtype).eps * input_sizes.to(a.device)  # [U]
    rounding = torch.maximum(_ROUNDING * _sizes(a, units), cancelling)
    close = torch.isclose(a, b, rtol=_RELATIVE, atol=0.0, equal_nan=True)
    near = (a - b).abs().double().reshape(units, -1) <= rounding[:, None]
    return bool((close.reshape(units, -1) | near).all())


def _sizes(t: Tensor, units: int) -> Tensor:
    """Return the largest finite size of each unit's numbers, [U]."""
    if not t.numel():
        return torch.zeros(units, dtype=torch.float64, device=t.device)
    real = t.detach().abs() if t.is_complex() else t.detach()
    sizes = real.double().abs().reshape(units, -1)
    return torch.where(sizes.isfinite(), sizes, 0.0).amax(1)


def _no_keys(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def _whole_numbers(units: Tensor) -> NDArray[np.int64]:
    """Return units on the host, where they are ordered and counted."""
    if len(units) and (units.is_floating_point() or units.is_complex()):
        raise ArgumentError(
            f"units must be whole numbers, got {units.dtype}, of which two could round to one: "
            "number the units"
        )
    numbers: NDArray[np.int64] = units.long().cpu().numpy()
    return numbers


def within_reach(batch: Any) -> Any:
    """Replace numbers beyond the fourth root of the largest float by NaN, which drops their unit.

    Fourth powers of all other numbers are finite. Otherwise an engine's products could overflow, or
    not, by the shape of the whole batch; this rule depends on the unit alone. Infinity and the
    largest number stay: as inputs they are masks.
    """
    leaves = [t for t in tensors_in(batch) if t.numel() and _reach(t.dtype)]
    if not leaves:
        return batch
    ends = [end for t in leaves for end in torch.aminmax(t)]
    if len({t.dtype for t in leaves}) > 1:
        ends = [end.float() for end in ends]  # what is infinite then is looked at below
    if len({t.device for t in leaves}) == 1:
        numbers = torch.stack(ends).tolist()  # read once
    else:
        numbers = [end.item() for end in ends]
    reach = min(_reach(t.dtype) for t in leaves)
    if all(-reach <= number <= reach for number in numbers):  # the usual case; False for NaN
        return batch
    return map_rows(_cut, batch)


@cache
def _reach(dtype: torch.dtype) -> float:
    """Return the largest number that stays, or 0 for a dtype without larger ones."""
    if not dtype.is_floating_point:
        return 0.0
    reach = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).max ** 0.25
    return 0.0 if torch.finfo(dtype).max <= reach else reach  # float16


def _cut(t: Tensor) -> Tensor:
    reach = _reach(t.dtype)
    if not reach:
        return t
    size = t.abs()
    return torch.where((size > reach) & (size < torch.finfo(t.dtype).max), torch.nan, t)
