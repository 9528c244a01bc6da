"""Poisson sampling: every unit enters a batch on its own with probability q.

Guarantee: at each step every one of n units is included independently with probability q, at most
once, independently across steps. The accountant's amplification assumes this; shuffling or drawing
with replacement would need another accountant.

The batch size is random (mean q n, variance q (1 - q) n) and may be 0; an empty batch is a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.randomness import Randomness

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class UnitShare:
    """The units of one of several processes: those i with i mod of = rank.

    The shares are a partition: the parts of a Poisson sample in them make up the whole sample, and
    no unit is on two ranks.

    Guarantee: every unit is in exactly one share.

    Assumptions: all ranks agree on their number.

    Proof: residues modulo ``of`` are a partition.

    Attributes:
        rank: from 0.
        of: how many shares there are.
    """

    rank: int = 0
    of: int = 1

    def owns(self, units: Indices) -> NDArray[np.bool_]:
        """Return which of these units are in the share."""
        owned: NDArray[np.bool_] = units % self.of == self.rank
        return owned


class PoissonSampler:
    """Yields the indices of ``steps`` Poisson batches; works as a DataLoader's ``batch_sampler``.

    Guarantee: every unit is in a step's sample with probability q, independently of all others and
    of other steps.

    Assumptions: n and q are the plan's, and the draws are uniform; q is rounded to 2^-53.

    Proof: P[u < q] = q for u uniform; at most once, since the sample is a set of indices.

    Args:
        n: number of units of privacy.
        sampling_rate: q.
        steps: number of batches in all.
        randomness: unseeded draws come from the operating system's entropy.
        start: the first step, for a resumed run.

    Example:
        >>> sampler = PoissonSampler(n=1000, sampling_rate=0.1, steps=3, randomness=Randomness(0))
        >>> [len(batch) for batch in sampler]
        [95, 113, 110]
    """

    def __init__(
        self,
        n: int,
        sampling_rate: float,
        steps: int,
        randomness: Randomness | None = None,
        *,
        start: int = 0,
    ) -> None:
        self.n = _validate.count("n", n)
        self.sampling_rate = _validate.positive("sampling_rate", sampling_rate)
        if sampling_rate > 1:
            raise ArgumentError(f"sampling_rate must be at most 1, got {sampling_rate}")
        self.steps = _validate.count("steps", steps, least=0)
        self.start = _validate.count("start", start, least=0)
        self.randomness = randomness or Randomness()

    def indices(self, step: int) -> Indices:
        """Return the units of one step, ascending: {i : u_i < q}, u_i uniform in [0, 1)."""
        uniform = self.randomness.uniform("sampling", step, self.n)
        return np.flatnonzero(uniform < self.sampling_rate)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.steps):
            yield self.indices(step).tolist()

    def __len__(self) -> int:
        return max(0, self.steps - self.start)


class UnitIndex:
    """Maps units of privacy to their records, with a cap on records per unit.

    Guarantee: all records of an owner are one unit; at most ``max_records`` of them enter a step,
    chosen within the unit.

    Assumptions: owners are named rightly, the same in every record.

    Proof: a unit's choice reads that unit's records alone, so its direction still depends on it
    alone.

    Args:
        labels: one per record: the patient (or other owner) that the record belongs to.
        max_records: the most records of one unit in a batch. Of a unit with more, so many are drawn
            at each step: a choice that depends on the unit alone.

    Raises:
        ValueError: if a record has no owner: NaN, None or an empty name.

    Example:
        >>> index = UnitIndex(["ann", "bob", "ann", "ann"], max_records=2)
        >>> index.n
        2
        >>> records, units = index.records(np.array([0, 1]), np.random.default_rng(0))
        >>> units.tolist()
        [0, 0, 1]
    """

    def __init__(self, labels: object, max_records: int) -> None:
        self.max_records = _validate.count("max_records", max_records)
        _validate.owners("unit of privacy", labels)
        names, codes = np.unique(np.asarray(labels), return_inverse=True)
        self.n = len(names)
        self._order = np.argsort(codes, kind="stable")
        self._starts = np.searchsorted(codes[self._order], np.arange(self.n + 1))

    def records(self, units: Indices, generator: np.random.Generator) -> tuple[Indices, Indices]:
        """Return the records of these units, and the unit of each: two arrays [N]."""
        chosen = [self._of(unit, generator) for unit in units]
        sizes = [len(c) for c in chosen]
        flat = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
        return flat, np.repeat(units, sizes)

    def _of(self, unit: int, generator: np.random.Generator) -> Indices:
        own = self._order[self._starts[unit] : self._starts[unit + 1]]
        if len(own) <= self.max_records:
            return own
        return np.sort(generator.choice(own, self.max_records, replace=False))
