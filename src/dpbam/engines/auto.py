"""The engine a user gets who does not ask for one: the fastest that serves.

All engines compute the same directions, so that changing over is safe at any physical batch. An
engine that has not served yet is given up at any error but interrupts and lack of memory; one that
has served, only when it says that it cannot serve. All of it happens before a step is charged.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

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
from dpbam.methods import Method

_SLOWER = {
    "functional": "computes the same, with a gradient per sample in memory",
    "loop": "computes the same one sample after the other, many times slower",
}


class AutoEngine:
    """The fused engine, else the functional one, else the loop; one warning says which and why.

    Args:
        model: the model.
        loss: (output, targets) -> one value per row.
        groups: the clipping group of each trainable parameter.
    """

    def __init__(self, model: nn.Module, loss: Loss, groups: Mapping[str, int]) -> None:
        engines = (FusedEngine, FunctionalEngine, LoopEngine)
        self._engines: list[Engine] = [made(model, loss, groups) for made in engines]
        self._served = False

    @property
    def name(self) -> str:
        """The engine in use."""
        return self._engines[0].name

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> PerSampleDirections:
        """Return directions by the fastest engine that serves.

        Raises:
            StatefulModelError: for a model that keeps something of its rows: no engine serves it.
            Exception: the loop engine's, if no engine serves.
        """
        reasons: list[str] = []
        while True:
            engine = self._engines[0]
            try:
                found = engine.directions(batch, method, lam, plain=plain)
            except (StatefulModelError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                final = len(self._engines) == 1
                if final or (self._served and not isinstance(error, UnsupportedModelError)):
                    raise
                reasons.append(f"the {engine.name} engine cannot serve: {_first_line(error)}")
                del self._engines[0]
            else:
                self._served = True
                break
        if reasons:
            warnings.warn(
                f"{'; '.join(reasons)}. The {engine.name} engine serves, which "
                f"{_SLOWER[engine.name]}; change the model there to be faster",
                stacklevel=2,
            )
        return found


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
