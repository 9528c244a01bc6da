"""Engines: the computation of per-unit directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

_ENGINES: dict[str, Callable[[nn.Module, Loss, Mapping[str, int]], Engine]] = {
    "auto": AutoEngine,
    "functional": FunctionalEngine,
    "fused": FusedEngine,
    "loop": LoopEngine,
}
ENGINES = tuple(_ENGINES)


def make_engine(name: str, model: nn.Module, loss: Loss, groups: Mapping[str, int]) -> Engine:
    """Return the engine called ``name``: "auto", "functional", "fused" or "loop".

    Example:
        >>> model = nn.Linear(2, 1)
        >>> make_engine("functional", model, nn.MSELoss(reduction="none"), {"weight": 0}).name
        'functional'
    """
    return _ENGINES[_validate.one_of("engine", name, ENGINES)](model, loss, groups)
