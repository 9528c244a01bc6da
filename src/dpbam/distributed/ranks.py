"""What the oracle and a run ask of the other processes, and the answers of a process alone.

No torch here: without ``torchrun`` nothing of it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from dpbam.errors import DPBAMError
from dpbam.privacy.sampling import Share

if TYPE_CHECKING:
    from dpbam.params import Params

T = TypeVar("T")
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankLostError(DPBAMError, ValueError):
    """Another process is gone, or out of reach; the message says which, and what to do."""


class EndedElsewhereError(DPBAMError, ValueError):
    """Another process ended the run, and has said why: this one ends without a word."""

    def __init__(self) -> None:
        super().__init__("")


class Ranks:
    """The processes that train together; this class: one alone.

    Attributes:
        rank: this process's number, from 0.
        world: W, how many there are.

    Example:
        >>> alone = Ranks()
        >>> alone.release({"w": 1.0}, lambda total: {"w": total["w"] + 0.5})
        {'w': 1.5}
    """

    rank = 0
    world = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: it draws the noise, keeps the ledger, and writes files."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """The units of privacy that are this rank's."""
        return Share(self.rank, self.world)

    def release(self, own: Params, privatise: Callable[[Params], Params]) -> Params:
        """``privatise`` of the sum of all ranks' ``own``; called by the leader, and once.

        Every rank gets the same result, bit for bit.
        """
        return privatise(own)

    def total(self, own: Params) -> Params:
        """The sum of all ranks' ``own``, on every rank. Not private."""
        return own

    def sums(self, *values: float) -> list[float]:
        """The sum of each value over the ranks."""
        return list(values)

    def from_leader(self, make: Callable[[], T]) -> T:
        """What ``make()`` gives on the leader; the others do not call it."""
        return make()


def launched() -> bool:
    """Whether something like ``torchrun`` has started this process as one of several.

    Example:
        >>> launched()
        False
    """
    return all(name in os.environ for name in _LAUNCHED)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Meet the other processes that ``torchrun`` has started; alone without it.

    ``DPBAM_RANK_TIMEOUT`` (seconds, 600 unless set) is how long ranks wait for one another. It must
    exceed an evaluation, which is the leader's work.

    Raises:
        RankLostError: within the time-out, on every rank that is left.
    """
    if not launched():
        yield Ranks()
        return
    from dpbam.distributed.process import opened

    with opened() as ranks:
        yield ranks
