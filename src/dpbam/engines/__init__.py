"""Engines: the computation of per-unit directions."""

from __future__ import annotations

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
    "Engine",
    "FunctionalEngine",
    "FusedEngine",
    "LoopEngine",
    "Loss",
    "PerSampleDirections",
    "PhysicalBatch",
    "StatefulModelError",
    "UnsupportedModelError",
]
