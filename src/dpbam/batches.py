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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.engines.base import PhysicalBatch
from dpbam.errors import ArgumentError
from dpbam.params import map_rows, rows, select_rows
from dpbam.privacy.randomness import Randomness, derive

_AUGMENT = 1 << 20  # separates a view's augmentation draws from its dropout draws


@dataclass(frozen=True)
class Views:
    """Augmentation multiplicity: K augmented views per row.

    Attributes:
        augment: (inputs, keys [N]) -> inputs; None leaves the inputs as they are.
        multiplicity: K.
        augment_targets: the same for targets that move with the inputs, such as masks.
    """

    augment: Callable[[Any, Tensor], Any] | None = None
    multiplicity: int = 1
    augment_targets: Callable[[Any, Tensor], Any] | None = None

    def __post_init__(self) -> None:
        _validate.count("multiplicity", self.multiplicity)

    def of(self, inputs: Any, keys: Tensor) -> tuple[Any, Tensor]:
        """Map [N] rows to [N K] views, each with its own key."""
        k = self.multiplicity
        keys = torch.stack([derive(keys, view) for view in range(k)], dim=1).flatten()
        if k > 1:
            inputs = map_rows(lambda t: t.repeat_interleave(k, dim=0), inputs)
        if self.augment is not None:
            inputs = self.augment(inputs, derive(keys, _AUGMENT))
            if rows(inputs) != len(keys):
                raise ArgumentError(
                    f"augment returned {rows(inputs)} rows for {len(keys)}: it must change each "
                    "row by itself, and neither add nor drop any"
                )
        return inputs, keys


@dataclass(frozen=True)
class LogicalBatch:
    """The rows of one Poisson sample, ordered by unit.

    Attributes:
        inputs: leading axis N.
        targets: leading axis N.
        ids: [N] ascending; the unit of each row, a number that stays the same from step to step.
        places: [N] the row's place within its unit.
        keys: [N] the keys of the rows' random draws.
    """

    inputs: Any
    targets: Any
    ids: Tensor
    places: Tensor
    keys: Tensor

    @classmethod
    def of(cls, inputs: Any, targets: Any, units: Tensor | None, max_records: int) -> LogicalBatch:
        """Order rows by unit and check that no unit has more rows than the plan allows."""
        n = rows(inputs)
        if rows(targets) != n:
            raise ArgumentError(f"{n} inputs but {rows(targets)} targets: one target each")
        given = torch.arange(n) if units is None else torch.as_tensor(units)
        if n and (given.is_floating_point() or given.is_complex()):
            raise ArgumentError(
                f"units must be whole numbers, got {given.dtype}, of which two could round to one: "
                "number the units"
            )
        ids = given.long().cpu()
        if ids.shape != (n,):
            raise ArgumentError(f"units must have shape ({n},), got {tuple(ids.shape)}")
        order = torch.argsort(ids, stable=True)
        if not torch.equal(order, torch.arange(n)):
            ids = ids[order]
            inputs, targets = select_rows((inputs, targets), order)
        places = torch.arange(n) - torch.searchsorted(ids, ids)
        if n and int(places.max()) >= max_records:
            worst = int(ids[int(places.argmax())])
            raise ArgumentError(
                f"unit {worst} has {int(places.max()) + 1} rows in one batch, but the plan allows "
                f"{max_records}: a sample may enter a step once; raise the plan's max_records if "
                "units have several records"
            )
        return cls(inputs, targets, ids, places, torch.zeros_like(ids))

    @property
    def counts(self) -> Tensor:
        """The number of rows of each unit, [U], in the order of the units. Not to be shared."""
        counts: Tensor = torch.unique_consecutive(self.ids, return_counts=True)[1]
        return counts

    @property
    def size(self) -> int:
        """The number of units. Not to be shared."""
        return len(self.counts)

    def keyed(self, randomness: Randomness, step: int) -> LogicalBatch:
        """Return the batch with row keys of (seed, step, unit, place)."""
        return replace(self, keys=derive(randomness.keys("rows", step, self.ids), self.places))

    def split(self, most_rows: int, views: Views, device: torch.device) -> Iterator[PhysicalBatch]:
        """Split into physical batches of whole units: at most ``most_rows`` views, or one unit.

        Units come by their number of rows, and those with the same number in their order.
        """
        _validate.count("physical_batch_size", most_rows)
        counts = self.counts
        rows_of_unit = counts.repeat_interleave(counts)  # [N]
        allowed = max(1, most_rows // views.multiplicity)
        for count in torch.unique(counts).tolist():
            alike = (rows_of_unit == count).nonzero().flatten()
            for some in alike.split(max(1, allowed // count) * count):
                yield self._physical(some, count, views, device)

    def _physical(
        self, some: Tensor, count: int, views: Views, device: torch.device
    ) -> PhysicalBatch:
        """Return the rows ``some`` of units that have ``count`` rows each."""
        k, units = views.multiplicity, len(some) // count
        first, last = int(some[0]), int(some[-1])
        chosen = slice(first, last + 1) if last - first + 1 == len(some) else some  # no copy
        inputs, targets, keys = map_rows(
            lambda t: t[chosen].to(device), (self.inputs, self.targets, self.keys)
        )
        inputs, keys = views.of(inputs, keys)
        inputs, targets = map_rows(_within_reach, (inputs, targets))
        if k > 1:
            targets = map_rows(lambda t: t.repeat_interleave(k, dim=0), targets)
        if views.augment_targets is not None:
            targets = views.augment_targets(targets, derive(keys, _AUGMENT))
        unit = torch.arange(units, device=device).repeat_interleave(count * k)
        weights = torch.full((len(unit),), 1 / (count * k), dtype=torch.float64, device=device)
        return PhysicalBatch(inputs, targets, unit, units, weights, keys)


def _within_reach(t: Tensor) -> Tensor:
    """Replace numbers beyond the fourth root of the largest float by NaN, which drops their unit.

    Fourth powers of all other numbers are finite. Otherwise an engine's products could overflow, or
    not, by the shape of the whole batch; this rule depends on the unit alone. Infinity and the
    largest number stay: as inputs they are masks.
    """
    if not t.is_floating_point():
        return t
    largest = torch.finfo(t.dtype).max
    reach = torch.finfo(torch.float64 if t.dtype == torch.float64 else torch.float32).max ** 0.25
    if largest <= reach:  # float16
        return t
    if t.numel():
        low, high = torch.aminmax(t)
        if bool((low >= -reach) & (high <= reach)):  # the usual case, in one pass; not if NaN
            return t
    return torch.where((t.abs() > reach) & (t.abs() < largest), torch.nan, t)
