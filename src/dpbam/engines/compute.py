"""The settings of an oracle that change speed and memory only."""

from __future__ import annotations

from dataclasses import dataclass

from dpbam import _validate
from dpbam.engines.memory import LIMIT_BYTES


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How directions are computed: without effect on privacy and, except for rounding, on results.

    Attributes:
        engine: ``"auto"``, ``"fused"``, ``"functional"`` or ``"loop"``; auto uses the fastest that
            supports the model.
        physical_batch_size: the most rows (samples times views) computed at once; None measures
            the number that fits into ``memory_limit``.
        memory_limit: bytes that a step may allocate, where the physical batch size is measured.

    Example:
        >>> Compute(engine="loop", physical_batch_size=64).engine
        'loop'
    """

    engine: str = "auto"
    physical_batch_size: int | None = None
    memory_limit: int = LIMIT_BYTES

    def __post_init__(self) -> None:
        if self.physical_batch_size is not None:
            _validate.count("physical_batch_size", self.physical_batch_size)
        _validate.count("memory_limit", self.memory_limit)
