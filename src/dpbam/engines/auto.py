"""The engine a user gets who does not ask for one: fused where it serves, functional elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn

from dpbam.engines.base import (
    CannotServe,
    Engine,
    Loss,
    PerSampleDirections,
    PhysicalBatch,
)
from dpbam.engines.functional import FunctionalEngine
from dpbam.engines.fused import FusedEngine
from dpbam.methods import Method


class AutoEngine:
    """The fused engine until it says that it cannot serve, then the functional one, with a line.

    Both compute the same directions, so changing over is safe at any physical batch.

    Args:
        model: the model.
        loss: (output, targets) -> one value a row.
        groups: the clipping group of each trainable parameter.
    """

    def __init__(self, model: nn.Module, loss: Loss, groups: Mapping[str, int]) -> None:
        self._functional = FunctionalEngine(model, loss, groups)
        self._engine: Engine = FusedEngine(model, loss, groups)

    @property
    def name(self) -> str:
        """The engine in use."""
        return self._engine.name

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> PerSampleDirections:
        """Directions by the engine in use; falls back at the first refusal."""
        try:
            return self._engine.directions(batch, method, lam, plain=plain)
        except CannotServe as reason:
            warnings.warn(
                f"the fused engine cannot serve here ({reason}); the functional engine takes over, "
                "which computes the same, slower",
                stacklevel=2,
            )
            self._engine = self._functional
            return self._functional.directions(batch, method, lam, plain=plain)
