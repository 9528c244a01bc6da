"""The memory estimate against what is measured."""

import pytest
import torch
from torch import nn

from dpbam.compute import Compute, Runner
from dpbam.engines.base import PhysicalBatch
from dpbam.engines.fused import FusedEngine
from dpbam.engines.memory import LiveBytes, peak_bytes, physical_batch_size
from dpbam.methods import BAM, DPSGD
from dpbam.nn.models import SmallCNN

METHODS = {"dp-sgd": DPSGD(), "ascent": BAM(0.1), "exact": BAM(0.1, exact=True)}


def batch(rows: int) -> PhysicalBatch:
    n = torch.arange(rows)
    return PhysicalBatch(torch.randn(rows, 1, 16, 16), n % 10, rows, n)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_chosen_batch_size_fits_and_uses_most_of_the_limit(name: str) -> None:
    limit = 12 * 2**20
    engine = FusedEngine(SmallCNN(), nn.CrossEntropyLoss(reduction="none"))
    method, lam = METHODS[name], 0.0 if name == "dp-sgd" else 0.1
    rows = physical_batch_size(engine, batch(1), method, lam, limit)
    measured = peak_bytes(engine, batch(rows), method, lam)
    assert 0.6 * limit < measured < limit, (rows, measured / limit)


def test_memory_does_not_grow_with_batch_times_parameters() -> None:
    """A wide layer has 256 KiB of weights: a row must take far less than that."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Mish(), nn.Linear(256, 10))
    engine = FusedEngine(model, nn.CrossEntropyLoss(reduction="none"))

    def peak(rows: int) -> int:
        n = torch.arange(rows)
        data = PhysicalBatch(torch.randn(rows, 256), n % 10, rows, n)
        engine.directions(data, METHODS["exact"], 0.1)
        return peak_bytes(engine, data, METHODS["exact"], 0.1)

    share = (peak(192) - peak(64)) / 128
    assert share < 0.15 * 256 * 256 * 4


def test_live_bytes_does_not_count_freed_tensors() -> None:
    with LiveBytes() as live:
        for _ in range(3):
            x = torch.ones(1000, requires_grad=True)
            (x * 2).exp().sum().backward()
            del x
    assert live.now == 0
    assert 12_000 <= live.peak <= 24_000


def test_memory_limit_of_a_step_reaches_the_norms_of_the_fused_engine() -> None:
    """By an eighth; with a limit of few bytes norms are computed unit by unit, and agree."""
    torch.manual_seed(0)
    model, n = torch.nn.Linear(8, 8), torch.arange(6)
    data = PhysicalBatch(torch.randn(6, 40, 8), torch.randn(6, 40, 8), 6, n)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output - targets).square().flatten(1).sum(1)

    norms = []
    for name, limit in (("fused", 2**31), ("fused", 1000), ("auto", 1000)):
        engine = Runner(
            Compute(engine=name, memory_limit=limit), model, loss, {"weight": 0, "bias": 0}
        )
        fused = engine._engines[0]
        assert isinstance(fused, FusedEngine)
        assert fused._limit == limit // 8
        norms.append(engine.directions(data, DPSGD(), 0.0).norms())
    assert torch.allclose(norms[0], norms[1], rtol=1e-6)
    assert torch.equal(norms[1], norms[2])
