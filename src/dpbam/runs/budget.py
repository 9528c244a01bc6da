"""A data set's own budget over all its runs: a JSON file that refuses what would exceed it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpbam.accounting import Charge


class Budget:
    """The budget file at ``path``: ``{"epsilon": 8.0, "delta": 1e-5}`` and what runs have taken.

    Concurrent runs reserve under a lock; a run that died keeps its reservation, an upper bound.
    """

    def __init__(self, path: str | Path) -> None:
        raise NotImplementedError

    @classmethod
    def create(
        cls, path: str | Path, *, epsilon: float, delta: float, accountant: str = "pld"
    ) -> Budget:
        """A new budget file; an existing one is refused."""
        raise NotImplementedError

    def reserve(self, run: str, charges: Sequence[Charge], *, unit: str, label: str = "") -> None:
        """Reserve ``charges`` for ``run`` in place of what it had, or raise RunError."""
        raise NotImplementedError

    def settle(self, run: str, charges: Sequence[Charge]) -> None:
        """Replace the reservation of ``run`` by what it really spent."""
        raise NotImplementedError

    def epsilon(self) -> float:
        """Epsilon of everything reserved and spent, at the budget's delta."""
        raise NotImplementedError
