"""The interface of the oracle and a run to the other processes; without ``torchrun``, one process.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from dpbam.errors import DPBAMError
from dpbam.privacy.sampling import UnitShare

if TYPE_CHECKING:
    from dpbam.params import Params

T = TypeVar("T")
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankLostError(DPBAMError, ValueError):
    """Another process has ended or cannot be reached; the message has its rank and the way out."""


class EndedElsewhereError(DPBAMError, ValueError):
    """Another process ended the run and reports the cause; this one has no message."""

    def __init__(self) -> None:
        super().__init__("")


class Ranks:
    """The processes that train together; this class is a single process.

    Attributes:
        rank: the number of this process, from 0.
        world: W, the number of processes.

    Example:
        >>> alone = Ranks()
        >>> alone.rank, alone.world, alone.collect("a")
        (0, 1, ['a'])
    """

    rank = 0
    world = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes the ledger and all files."""
        return self.rank == 0

    @property
    def share(self) -> UnitShare:
        """The units of privacy of this rank."""
        return UnitShare(self.rank, self.world)

    def scatter(self, sums: Params) -> tuple[Params, int]:
        """Sum ``sums`` over all ranks; return this rank's part, and its first coordinate's number.

        The coordinates of all entries, one after another, are a vector, of which every rank has a
        part of the same length; a part of an entry is flat. Not to be shared.
        """
        return sums, 0

    def gather(self, rank_slice: Params, shapes: Params) -> Params:
        """Return the whole of which each rank has a :meth:`scatter` part, shaped as ``shapes``.

        Every rank gets the same result, bit for bit.
        """
        return rank_slice

    def total(self, sums: Params) -> Params:
        """Return the total of ``sums`` over all ranks, on every rank. Not to be shared."""
        return sums

    def sums(self, *values: float) -> list[float]:
        """Return the sum of each value over the ranks."""
        return list(values)

    def collect(self, value: T) -> list[T]:
        """Return ``value`` of every rank, in their order."""
        return [value]

    def from_leader(self, make: Callable[[], T]) -> T:
        """Return ``make()`` of the leader; the others do not call it, but wait until it is done."""
        return make()


def launched() -> bool:
    """Whether ``torchrun`` or a similar launcher started this process as one of several."""
    return all(name in os.environ for name in _LAUNCHED)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` has started; without it, a single process.

    ``DPBAM_RANK_TIMEOUT`` (seconds, default 600) is how long ranks wait for one another. It must
    exceed the time of an evaluation, which only the leader computes.

    Raises:
        RankLostError: within the time-out, on every remaining rank.
    """
    if not launched():
        yield Ranks()
        return
    from dpbam.distributed.process import opened

    with opened() as ranks:
        yield ranks
