"""A step's graph dies with its handle: a leak of one graph a step fills any memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from dpbam.engines import FusedEngine, PhysicalBatch
from dpbam.methods import BAM, DPSGD, Method
from dpbam.nn import build_model


@pytest.mark.parametrize("method", [DPSGD(), BAM(0.1, exact=True)])
@pytest.mark.parametrize("plain", [False, True])
def test_no_activation_outlives_the_handle(method: Method, plain: bool) -> None:
    model = build_model("resnet9", in_channels=3, image_size=8, num_classes=2, width=0.125, seed=0)
    alive: list[weakref.ref[Tensor]] = []

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        alive.append(weakref.ref(output))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(watch)
    engine = FusedEngine(model, nn.CrossEntropyLoss(reduction="none"))
    rows = torch.arange(4)
    batch = PhysicalBatch(torch.randn(4, 3, 8, 8), rows % 2, rows, 4, torch.ones(4), rows)
    directions = engine.directions(batch, method, 0.1, plain=plain)
    directions.weighted_sum(torch.ones_like(directions.norms()))
    del directions
    gc.collect()
    assert alive
    assert not any(ref() is not None for ref in alive)
