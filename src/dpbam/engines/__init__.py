"""Engines: the computation of per-unit directions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dpbam import _validate
from dpbam.engines.auto import AutoEngine
from dpbam.engines.base import (
    Engine,
    Loss,
    PerSampleDirections,
    PhysicalBatch,
    StatefulModelError,
    UnsupportedModelError,
)
from dpbam.engines.functional import FunctionalEngine
from dpbam.engines.fused import FusedEngine
from dpbam.engines.loop import LoopEngine
from dpbam.engines.memory import LIMIT_BYTES

__all__ = [
    "AutoEngine",
    "Engine",
    "FunctionalEngine",
    "FusedEngine",
    "LoopEngine",
    "Loss",
    "PerSampleDirections",
    "PhysicalBatch",
    "StatefulModelError",
    "UnsupportedModelError",
    "make_engine",
]

ENGINES = ("auto", "functional", "fused", "loop")
_SHARE = 8  # of a step's memory, what one layer's norm may take


def make_engine(
    name: str,
    model: nn.Module,
    loss: Loss,
    groups: Mapping[str, int],
    memory_limit: int = LIMIT_BYTES,
) -> Engine:
    """Return the engine called ``name``: "auto", "functional", "fused" or "loop".

    ``memory_limit`` is that of a step; one layer's norm of the fused engine may take an eighth.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> make_engine("functional", model, nn.MSELoss(reduction="none"), {"weight": 0}).name
        'functional'
    """
    _validate.one_of("engine", name, ENGINES)
    if name == "functional":
        return FunctionalEngine(model, loss, groups)
    if name == "loop":
        return LoopEngine(model, loss, groups)
    engine = AutoEngine if name == "auto" else FusedEngine
    return engine(model, loss, groups, memory_limit=max(1, memory_limit // _SHARE))
