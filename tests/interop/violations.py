"""Batches and clipping that a plan does not account for, for the trainers of other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dpbam import FlatClipping, PrivacyPlan
from dpbam.interop import trainers

N, BATCH = 40, 8
LONG = PrivacyPlan(
    n=N, batch_size=BATCH, steps=20, noise_multiplier=1.0, delta=1e-2, clip_norm=0.01,
    accountant="rdp",
)  # fmt: skip


def shuffled(self: trainers.EpochSampler) -> Any:
    """A loader with batches of one size."""
    return ([(i, 0) for i in torch.randperm(N)[:BATCH].tolist()] for _ in range(len(self)))


def everything(self: trainers.EpochSampler) -> Any:
    return ([(i, 0) for i in range(N)] for _ in range(len(self)))


class Lenient(FlatClipping):
    def scales(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


#: How the sampler draws (None: as it should), what makes the oracle's options (an object that was
#: refused stays refused), the error, the steps before it.
VIOLATIONS = pytest.mark.parametrize(
    ("batches", "options", "words", "taken"),
    [
        (shuffled, dict, "this oracle has drawn no batch", 0),
        (everything, dict, "this oracle has drawn no batch", 0),
        (None, lambda: {"clipping": Lenient(0.01)}, "Lenient lets a unit through", 0),
    ],
)


def draw_with(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every epoch draw its samples by ``batches``."""
    if batches:
        monkeypatch.setattr(trainers.EpochSampler, "__iter__", batches)
