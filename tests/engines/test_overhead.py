"""Kernels and host reads of a private step stay within limits: what a GPU waits for.

``benchmarks/kernels.py`` counts. The limits are what was reached, never more than the least that
was asked for where that is met; a change that needs more kernels has to say why here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, Compute, PrivacyPlan, PrivateGradientOracle
from dpbam.nn.standardise import StandardisedConv2d

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import kernels
import nets

PER_PLAIN = {  # kernels of a whole step, as multiples of the plain forward and backward pass
    ("convolutions", "dp-sgd"): 3.0,
    ("convolutions", "bam"): 6.0,
    ("convolutions", "bam-exact"): 15.5,
    ("resnet9", "dp-sgd"): 3.9,
    ("resnet9", "bam"): 8.0,
    ("resnet9", "bam-exact"): 12.5,
    ("vit", "dp-sgd"): 2.4,
    ("vit", "bam"): 4.4,
    ("vit", "bam-exact"): 9.8,
    ("lstm", "dp-sgd"): 14.5,  # torch runs a plain LSTM of 32 steps as one kernel, 20 in all
    ("lstm", "bam"): 45.0,
    ("lstm", "bam-exact"): 40.5,
}
READS = 2, 2  # per physical and per logical batch
QUICK = [key for key in PER_PLAIN if key[0] == "convolutions"]
SLOW = [key for key in PER_PLAIN if key[0] != "convolutions"]


def check(net: str, method: str) -> None:
    rows = kernels.ROWS[net]
    plain = kernels.counted(kernels.plain_step(net, rows), private=False).kernels
    count = kernels.counted(kernels.private_step("fused", method, net, rows))
    assert count.reads <= sum(READS)
    assert count.kernels <= PER_PLAIN[net, method] * plain


@pytest.mark.parametrize(("net", "method"), QUICK)
def test_kernels_and_reads_stay_within_limits(net: str, method: str) -> None:
    check(net, method)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "method"), SLOW)
def test_kernels_and_reads_stay_within_limits_on_other_nets(net: str, method: str) -> None:
    check(net, method)


@pytest.mark.parametrize("method", ["dp-sgd", "bam", "bam-exact"])
def test_reads_do_not_depend_on_layers_and_grow_by_two_per_physical_batch(method: str) -> None:
    """Eleven layers and three; one physical batch and four."""
    reads = {}
    for net in ("convolutions", "mlp-tiny"):
        for parts in (1, 4):
            run = kernels.private_step("fused", method, net, 8, parts=parts)
            reads[net, parts] = kernels.counted(run).reads
            assert reads[net, parts] <= READS[0] * parts + READS[1]
    assert reads["convolutions", 1] == reads["mlp-tiny", 1]


def standardised() -> nn.Module:
    return nn.Sequential(
        StandardisedConv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        StandardisedConv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def jitter(inputs: Tensor, keys: Tensor) -> Tensor:
    return inputs + (keys % 7).to(inputs.dtype).view(-1, 1, 1, 1)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("model", "method", "options"),
    [
        (nets.convolutions, BAM(), {}),  # lambda follows |theta|
        (nets.convolutions, BAM(), {"augment": jitter, "multiplicity": 2}),
        (nets.convolutions, BAM(0.02, exact=True), {"augment": jitter}),
        (standardised, BAM(0.02, exact=True), {}),
    ],
    ids=["relative lambda", "augmented", "augmented exact", "standardised exact"],
)
def test_reads_stay_within_limits_in_other_configurations(
    model: Callable[[], nn.Module], method: BAM, options: dict[str, Any], parts: int
) -> None:
    torch.manual_seed(0)
    rows, views = 6, options.get("multiplicity", 1)
    x, y = torch.randn(rows, 16, 8, 8), torch.arange(rows) % 10
    plan = PrivacyPlan(n=600, batch_size=rows, steps=9, noise_multiplier=1.0, delta=1e-7)
    net = model()
    oracle = PrivateGradientOracle(
        net, nets.loss, plan, method, sampling="unchecked", **options,
        compute=Compute(engine="fused", physical_batch_size=rows * views // parts),
    )  # fmt: skip
    oracle.backward(x, y)
    torch.optim.SGD(net.parameters(), 1e-3).step()
    assert kernels.counted(lambda: oracle.backward(x, y)).reads <= READS[0] * parts + READS[1]


def test_a_seeded_step_reads_its_release_once_more() -> None:
    counts = [
        kernels.counted(kernels.private_step("fused", "dp-sgd", "mlp-tiny", 8, seed=seed)).reads
        for seed in (None, 0)
    ]
    assert counts[1] - counts[0] <= 2  # to the host, and to NumPy there


def test_counter_sees_kernels_and_every_kind_of_read() -> None:
    """Without this the limits above could hold because nothing is counted."""
    x = torch.arange(4.0)
    with kernels.Kernels() as count:
        (x + 1).view(2, 2).detach()
    assert (count.kernels, count.reads) == (1, 0)
    reads = (
        lambda t: t.item(), lambda t: t.tolist(), lambda t: t.numpy(), lambda t: t.nonzero(),
        lambda t: t.cpu(), lambda t: bool(t.sum()), lambda t: torch.equal(t, t),
        lambda t: t[t > 1], lambda t: np.asarray(t),
    )  # fmt: skip
    for number, read in enumerate(reads):
        with kernels.Kernels() as count:
            read(x[:1])
        assert count.reads >= 1, number
    assert "tolist" not in vars(Tensor)  # the counter leaves torch as it was
