"""Engines: how per-unit directions are computed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dpbam import _validate
from dpbam.engines.base import (
    CannotServe,
    Engine,
    Loss,
    PerSampleDirections,
    PhysicalBatch,
)
from dpbam.engines.functional import FunctionalEngine

__all__ = [
    "CannotServe",
    "Engine",
    "FunctionalEngine",
    "Loss",
    "PerSampleDirections",
    "PhysicalBatch",
    "make_engine",
]

ENGINES = ("auto", "functional")


def make_engine(name: str, model: nn.Module, loss: Loss, groups: Mapping[str, int]) -> Engine:
    """The engine called ``name``."""
    _validate.one_of("engine", name, ENGINES)
    return FunctionalEngine(model, loss, groups)
