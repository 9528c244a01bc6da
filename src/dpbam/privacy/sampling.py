"""Poisson sampling: every unit enters a batch on its own with probability q.

Guarantee: at each step every one of n units is included independently with probability q, at most
once, independently across steps. The accountant's amplification assumes this; shuffling or drawing
with replacement would need another accountant.

The batch size is random (mean q n, variance q (1 - q) n) and may be 0; an empty batch is a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.privacy.randomness import Randomness, derive

Indices = NDArray[np.int64]
LEAST_TAIL = 1e-20  # of a batch size that is not refused, two-sided
LEAST_RUN = 1e-12  # of a run of equal sizes that is not refused

_WAY_OUT = (
    "draw with oracle.batches(dataset), or make the oracle with sampling='unchecked', which "
    "charges each step without amplification by sampling"
)


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
        self.has_drawn = False

    def indices(self, step: int) -> Indices:
        """Return the units of one step, ascending: {i : u_i < q}, u_i uniform in [0, 1)."""
        self.has_drawn = True
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

    Proof: a unit's choice is a function of its number of records and of keys of its own, which are
    independent of those of the others, so its direction still depends on it alone. Keys follow the
    order of the names: one unit more may renumber the others, which permutes independent keys and
    leaves their joint distribution as it was.

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
        >>> records, units = index.records(np.array([0, 1]), Randomness(0), step=0)
        >>> units.tolist()
        [0, 0, 1]
    """

    def __init__(self, labels: object, max_records: int) -> None:
        self.max_records = _validate.count("max_records", max_records)
        if (shape := np.shape(np.asarray(labels))) != (len(np.asarray(labels)),):
            raise ArgumentError(
                f"units have shape {shape}: name the owner of each record by one value; of several "
                "columns make one, such as hospital and number joined"
            )
        _validate.owners("unit of privacy", labels)
        names, codes = np.unique(np.asarray(labels), return_inverse=True)
        self.n = len(names)
        self._order = np.argsort(codes, kind="stable")
        self._starts = np.searchsorted(codes[self._order], np.arange(self.n + 1))

    def records(self, units: Indices, randomness: Randomness, step: int) -> tuple[Indices, Indices]:
        """Return the records of these units at a step, and the unit of each: two arrays [N].

        Of a unit with more than ``max_records``, those with the smallest keys of (seed, step, unit,
        place). Draws of one generator for all units would be shifted by each unit that draws, so
        that a unit in the batch would change which records the next ones contribute.
        """
        counts = np.diff(self._starts)[units]
        owners = np.repeat(units, counts)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        records = self._order[self._starts[owners] + places]
        if not (counts > self.max_records).any():
            return records, owners
        from torch import from_numpy

        keys = derive(randomness.keys("records", step, from_numpy(owners)), from_numpy(places))
        by_key = np.lexsort((keys.numpy(), np.repeat(np.arange(len(units)), counts)))
        chosen = np.zeros(len(owners), dtype=np.bool_)
        chosen[by_key] = places < self.max_records  # units stay together in this order
        return records[chosen], owners[chosen]


class BatchSizes:
    """Refuses batch sizes that Poisson sampling cannot give. One object per oracle.

    The number of units in a Poisson batch is X ~ Binomial(m, q). The data set has m = n units, its
    neighbours n - 1 and n + 1; a size is refused only if it is impossible under all three, so that
    a refusal does not distinguish them.

    1. *Size.* A size k is refused if 2 min(P[X <= k], P[X >= k]) < 1e-20 under each m. False-alarm
       rate: at most 1e-20 per step.
    2. *Run.* With p_k = max over m of P[X = k], the r-th batch in a row with the same size k is
       refused if p_k^(r - 1) < 1e-12. False-alarm rate: a run that starts at step t has a first
       batch of some size k, and r - 1 further independent ones that equal it,

           sum_k P[X = k] P[X = k]^(r_k - 1) <= sum_k P[X = k] 1e-12 = 1e-12,

       so at most 1e-12 per step, and T 1e-12 in a training of T steps. A loader with batches of
       one size is refused at its 41st step at the latest (p_k <= 1/2), at 4096 of 50,000 units
       at its 7th.
    3. At q = 1 the size is one of n - 1, n, n + 1; runs are not checked.

    The run is kept in memory and starts again when a training is resumed: a realised batch size is
    not protected by privacy, so it is not in a checkpoint.

    Guarantee: sizes that are refused could not come, within the false-alarm rates above, from
    Poisson sampling of the plan or of a neighbour; a refusal charges nothing.

    Assumptions: refusals are seen by the operator only. Plausible sizes that were drawn wrongly
    pass.

    Proof: the two displayed inequalities.

    Args:
        n: number of units of privacy.
        batch_size: l, the expected number of units per step.

    Example:
        >>> sizes = BatchSizes(n=100, batch_size=10)
        >>> sizes.check(14)
        >>> sizes.check(80)
        Traceback (most recent call last):
        ...
        dpbam.errors.PlanViolationError: the batch has 80 units, but Poisson sampling gives 10...
    """

    def __init__(self, n: int, batch_size: int) -> None:
        self._n, self._q, self._expected = n, batch_size / n, batch_size
        self._size, self._length = -1, 0  # of the present run

    def check(self, size: int) -> None:
        """Refuse a next batch of ``size`` units, over all ranks, if it is impossible."""
        if self._q == 1.0:
            self._check_whole(size)
            return
        if self._tail(size) < LEAST_TAIL:
            deviation = math.sqrt(self._expected * (1 - self._q))
            raise PlanViolationError(
                f"the batch has {size} units, but Poisson sampling gives {self._expected} +- "
                f"{deviation:.2g} of n = {self._n}, and this size with probability below "
                f"{LEAST_TAIL:g}: {_WAY_OUT}"
            )
        length = self._length_with(size)
        if self._most_likely(size) ** (length - 1) < LEAST_RUN:
            raise PlanViolationError(
                f"{length} batches in a row have {size} units, which Poisson sampling gives with "
                f"probability below {LEAST_RUN:g}, and a loader with batches of one size always: "
                f"{_WAY_OUT}"
            )

    def count(self, size: int) -> None:
        self._size, self._length = size, self._length_with(size)

    def _length_with(self, size: int) -> int:
        return self._length + 1 if size == self._size else 1

    def _check_whole(self, size: int) -> None:
        if abs(size - self._n) > 1:
            raise PlanViolationError(
                f"the batch has {size} units, but the plan's batch is the whole data set, n = "
                f"{self._n}: {_WAY_OUT}"
            )

    def _tail(self, size: int) -> float:
        return max(two_sided_tail(size, m, self._q) for m in self._units())

    def _most_likely(self, size: int) -> float:
        """Return p_k, the largest probability of ``size`` over m."""
        return max(probability(size, m, self._q) for m in self._units())

    def _units(self) -> tuple[int, int, int]:
        return self._n - 1, self._n, self._n + 1


@lru_cache(maxsize=4096)  # sizes come again, and six incomplete beta functions take long
def two_sided_tail(k: int, m: int, q: float) -> float:
    """Return 2 min(P[X <= k], P[X >= k]), at most 1, for X ~ Binomial(m, q) with 0 < q < 1."""
    from scipy.special import betainc

    below = float(betainc(m - k, k + 1, 1 - q)) if k < m else 1.0  # P[X <= k]
    above = float(betainc(k, m - k + 1, q)) if 0 < k <= m else float(k <= 0)  # P[X >= k]
    return min(1.0, 2 * min(below, above))


@lru_cache(maxsize=4096)
def probability(k: int, m: int, q: float) -> float:
    """Return P[X = k] for X ~ Binomial(m, q) with 0 < q < 1."""
    if not 0 <= k <= m:
        return 0.0
    ways = math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1)
    return math.exp(ways + k * math.log(q) + (m - k) * math.log1p(-q))
