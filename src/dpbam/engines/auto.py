"""The default engine: the fastest that supports the model.

All engines compute the same directions, so that switching is safe at any physical batch. An engine
that has not computed a batch yet is given up at any error except interrupts and lack of memory; one
that has, only at an ``UnsupportedModelError``. All of this happens before a step is charged.
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
    "loop": "computes the same one sample at a time, many times slower",
}


ORDER = (FusedEngine.name, FunctionalEngine.name, LoopEngine.name)  # the fastest first


class AutoEngine:
    """The fused engine, else the functional one, else the loop; one warning gives the reason.

    Args:
        model: the model.
        loss: (output, targets) -> one value per row.
        groups: the clipping group of each trainable parameter.
        memory_limit: as of :class:`~dpbam.engines.fused.FusedEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        groups: Mapping[str, int],
        *,
        memory_limit: int = 2**28,
    ) -> None:
        self._engines: list[Engine] = [
            FusedEngine(model, loss, groups, memory_limit=memory_limit),
            FunctionalEngine(model, loss, groups),
            LoopEngine(model, loss, groups),
        ]
        self._served = False

    @property
    def name(self) -> str:
        """The engine in use."""
        return self._engines[0].name

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> PerSampleDirections:
        """Return directions by the fastest engine that supports the model.

        Raises:
            StatefulModelError: for a model that keeps state between passes, on any engine.
            Exception: the loop engine's, if no engine supports the model.
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
                reason = _first_line(error)
                reasons.append(f"the {engine.name} engine does not support this: {reason}")
                del self._engines[0]
            else:
                self._served = True
                break
        if reasons:
            warnings.warn(
                f"{'; '.join(reasons)}. The {engine.name} engine is used, which "
                f"{_SLOWER[engine.name]}; for speed, change what is named here",
                stacklevel=2,
            )
        return found


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
