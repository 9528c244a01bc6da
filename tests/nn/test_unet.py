"""The U-Net: shapes, no mixing of samples, and agreement of the engines on it."""

from __future__ import annotations

import pytest
import torch

from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine
from dpbam.engines.base import PhysicalBatch
from dpbam.errors import ArgumentError
from dpbam.methods import BAM, DPSGD
from dpbam.nn import UNet, build_model
from dpbam.tasks.segmentation import Segmentation


@pytest.mark.parametrize(("side", "depth"), [((8, 8), 3), ((17, 10), 2), ((9, 31), 1)])
def test_every_pixel_has_scores(side, depth):
    net = UNet(1, 3, width=4, depth=depth)
    x = torch.randn(2, 1, *side)
    assert net(x).shape == (2, 3, *side)
    assert torch.allclose(net(x)[1:], net(x[1:]), atol=1e-5)


def test_it_is_built_by_name_and_refuses_what_is_too_small_or_deep():
    net = build_model("unet", in_channels=3, image_size=16, num_classes=2, width=4, seed=0)
    assert net(torch.zeros(1, 3, 16, 16)).shape == (1, 2, 16, 16)
    with pytest.raises(ArgumentError, match="unet needs images of at least 8x8"):
        build_model("unet", in_channels=1, image_size=7, num_classes=2)
    with pytest.raises(ArgumentError, match="depth must be 1, 2 or 3, got 4"):
        UNet(depth=4)


@pytest.mark.parametrize("method", [DPSGD(), BAM(0.05), BAM(0.05, exact=True)])
def test_the_engines_agree_on_weighted_masks(method):
    net = UNet(1, 3, width=4, depth=1, activation="tanh").double()
    task = Segmentation("abc", class_weights={"b": 3.0}, focal=2.0).double()
    batch = PhysicalBatch(
        torch.randn(4, 1, 8, 9).double(), torch.randint(0, 3, (4, 8, 9), dtype=torch.uint8),
        2, torch.arange(4), 2,
    )  # fmt: skip
    expected, *others = (
        engine(net, task).directions(batch, method, 0.05)
        for engine in (LoopEngine, FunctionalEngine, FusedEngine)
    )
    factors = torch.tensor([[0.3, 0.9]]).double()
    for handle in others:
        assert torch.allclose(handle.norms(), expected.norms(), rtol=1e-6)
        for name, value in handle.weighted_sum(factors).items():
            assert torch.allclose(value, expected.weighted_sum(factors)[name], atol=1e-8), name
