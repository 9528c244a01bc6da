"""A ResNet as timm builds them: refused with batch norm, trained exactly once it is repaired."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, Compute, PrivacyPlan, PrivateGradientOracle
from dpbam.nn import check_model, replace_batch_norm
from support import (
    clip_and_sum,
    cross_entropy,
    each_gradient,
    flat,
    one_step,
    poisson_batches,
    quiet_plan,
)


class BasicBlock(nn.Module):
    """conv, norm, act, conv, norm, shortcut: in place where timm is."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.act2(x)


class ResNet(nn.Module):
    """timm's names: a stem, layers of blocks, a pool, fc."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2))
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.fc(self.global_pool(self.layer2(self.layer1(x))))


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 3


def test_batch_norm_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 'bn1' \(BatchNorm2d\).*replace_batch_norm"):
        PrivateGradientOracle(ResNet(), cross_entropy, quiet_plan())


def test_the_repaired_model_has_gradients_of_its_own(images: tuple[Tensor, Tensor]) -> None:
    """sum_i clip(g_i) by the fused engine, and by autograd sample for sample."""
    model = replace_batch_norm(ResNet()).double()
    check_model(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    expected = clip_and_sum(each_gradient(model, *images), clip_norm=0.5)
    found = (
        flat(one_step(model, quiet_plan(0.5), *images, engine="fused", physical_batch_size=6)) * 10
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_scale_and_shift_are_kept() -> None:
    model = ResNet()
    with torch.no_grad():
        model.layer1[0].bn1.weight.uniform_(0.5, 1.5)
    before = {n: p.clone() for n, p in model.named_parameters()}
    after = dict(replace_batch_norm(model).named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_it_trains_privately(images: tuple[Tensor, Tensor]) -> None:
    plan = PrivacyPlan(
        n=60, batch_size=6, steps=3, noise_multiplier=1.0, delta=1e-3, accountant="rdp"
    )
    model = replace_batch_norm(ResNet()).double()
    optimizer = torch.optim.NAdam(model.parameters())
    oracle = PrivateGradientOracle(
        model,
        cross_entropy,
        plan,
        BAM(0.02),
        compute=Compute(physical_batch_size=64),
        sampling="poisson-elsewhere",
    )
    before = flat(dict(model.named_parameters()))
    x, y = images
    for batch in poisson_batches(plan, (x.repeat(10, 1, 1, 1), y.repeat(10))):
        oracle.backward(*batch)
        optimizer.step()
    assert oracle.engine.name == "fused"
    assert (flat(dict(model.named_parameters())) - before).abs().max() > 0
    assert oracle.ledger.epsilon() == plan.epsilon()


def test_a_frozen_backbone_keeps_its_batch_norm(images: tuple[Tensor, Tensor]) -> None:
    model = ResNet().double().eval()
    model.requires_grad_(False).fc.requires_grad_(True)
    statistics = model.bn1.running_mean.clone()
    found = one_step(model, quiet_plan(0.5), *images, engine="fused", physical_batch_size=6)
    assert set(found) == {"fc.weight", "fc.bias"}
    assert torch.equal(model.bn1.running_mean, statistics)
    with pytest.raises(ValueError, match="layer 'bn1'"):
        one_step(model.train(), quiet_plan(0.5), *images)
