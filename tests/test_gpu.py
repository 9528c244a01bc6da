"""One step of each method on each engine, on the GPU and on the CPU: the same gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, DPSAT, DPSGD, Compute, Method, PrivacyPlan, PrivateGradientOracle
from dpbam.methods import SAM, SGD
from dpbam.nn.models import SmallCNN

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: run the tests where there is one"
)
METHODS = {
    "dp-sgd": DPSGD(),
    "dp-sat": DPSAT(0.05),
    "bam": BAM(0.05),
    "bam-exact": BAM(0.05, exact=True),
    "sgd": SGD(),
    "sam": SAM(0.05),
}
STEPS = 2  # DP-SAT ascends along the step before


def gradients(
    device: str, engine: str, method: Method, clip_norm: float = 0.5
) -> dict[str, Tensor]:
    """Clipped gradients without noise, which is drawn differently on a GPU, after two steps."""
    torch.manual_seed(0)
    model = SmallCNN().to(device)
    inputs, targets = torch.randn(12, 1, 8, 8), torch.arange(12) % 10
    plan = PrivacyPlan.non_private(n=24, batch_size=12, steps=STEPS, clip_norm=clip_norm)
    loss = nn.CrossEntropyLoss(reduction="none")
    oracle = PrivateGradientOracle(
        model, loss, plan, method, seed=0, compute=Compute(engine=engine, physical_batch_size=12)
    )
    for _ in range(STEPS):
        oracle.backward(inputs.to(device), targets.to(device))
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of an element, over the largest element."""
    assert one.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in one.values())
    return max(float((one[k] - other[k]).abs().max()) for k in one) / largest


@needs_gpu
@pytest.mark.parametrize("engine", ["fused", "functional"])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_that_of_the_cpu(name: str, engine: str) -> None:
    """To 1e-3: convolutions on a GPU may round their inputs to TF32, with 10 bits."""
    one, other = (gradients(device, engine, METHODS[name]) for device in ("cuda", "cpu"))
    assert furthest(one, other) < 1e-3


@pytest.mark.parametrize("engine", ["fused", "functional"])
def test_the_comparison_sees_another_clip_norm_and_another_method(engine: str) -> None:
    """Negative control, on the CPU."""
    own = gradients("cpu", engine, METHODS["bam"])
    assert furthest(own, gradients("cpu", engine, METHODS["bam"])) == 0
    assert furthest(own, gradients("cpu", engine, METHODS["bam"], clip_norm=0.49)) > 1e-3
    assert furthest(own, gradients("cpu", engine, METHODS["dp-sgd"])) > 1e-3
