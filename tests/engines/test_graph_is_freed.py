"""A step's graph dies with its handle: a leak of one graph a step fills any memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from dpbam.engines import PhysicalBatch
from dpbam.engines.fused import FusedEngine
from dpbam.engines.fused.uses import RecordedUse
from dpbam.methods import BAM, DPSGD, Method
from dpbam.nn import build_model


@pytest.mark.parametrize("method", [DPSGD(), BAM(0.1, exact=True)])
@pytest.mark.parametrize("plain", [False, True])
def test_recorded_gradients_of_a_group_norm_are_freed_with_the_handle(
    method: Method, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its autograd node holds the site that it tells; the site must not hold the node's graph.

    Such a circle runs through torch's own pointers, where Python's collector cannot see it.
    """
    told: list[weakref.ref[RecordedUse]] = []
    right = RecordedUse.record

    def watch(self: RecordedUse, gradient: Tensor) -> None:
        told.append(weakref.ref(self))
        right(self, gradient)

    monkeypatch.setattr(RecordedUse, "record", watch)
    model = build_model("resnet9", in_channels=3, image_size=8, num_classes=2, width=0.125, seed=0)
    engine = FusedEngine(model, nn.CrossEntropyLoss(reduction="none"))
    rows = torch.arange(4)
    batch = PhysicalBatch(torch.randn(4, 3, 8, 8), rows % 2, 4, rows)
    directions = engine.directions(batch, method, 0.1, plain=plain)
    directions.weighted_sum(torch.ones_like(directions.norms()))
    del directions
    gc.collect()
    assert told
    assert sum(site() is not None for site in told) == 0
