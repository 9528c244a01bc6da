"""Inside ``torch.autocast`` the clipped sum moves by at most C when a unit is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from reference import make_batch
from torch import Tensor, nn

from dpbam.batches import LogicalBatch, Views
from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine, PhysicalBatch
from dpbam.engines.precision import full_precision
from dpbam.methods import BAM, DPSGD, Method
from dpbam.privacy.clipping import ROUNDING

CPU = torch.device("cpu")
cross_entropy = nn.CrossEntropyLoss(reduction="none")
C = 0.05  # C is below every norm, so that each unit moves the sum by exactly C
METHODS: dict[str, tuple[Method, float]] = {
    "dp-sgd": (DPSGD(), 0.0),
    "bam": (BAM(0.1), 0.1),
    "bam-exact": (BAM(0.1, exact=True), 0.1),
}


def network(engine: Any) -> nn.Module:
    torch.manual_seed(0)
    norm_layers: list[nn.Module] = [nn.GroupNorm(2, 16), nn.LayerNorm(256)]
    if engine is FunctionalEngine:  # torch has no norms in mixed precision under vmap
        norm_layers = [nn.Identity(), nn.Identity()]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), norm_layers[0], nn.ReLU(), nn.Conv2d(16, 8, 1),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.ReLU(), nn.Flatten(), norm_layers[1], nn.Linear(256, 10),
    )  # fmt: skip


def clipped_sum(
    made: Any,
    method: str,
    batches: Iterable[PhysicalBatch],
    in_precision: Callable[[Tensor], Tensor] = lambda norms: norms,
) -> Tensor:
    total = torch.zeros(())
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            handle = made.directions(batch, *METHODS[method])
            norms = handle.norms()
            assert norms.dtype == torch.float32
            assert norms.min() > C
            part = handle.weighted_sum(C / in_precision(norms).float())
        total = total + torch.cat([t.flatten().double() for t in part.values()])
    return total


def largest_move(engine: Any, method: str, count: int = 4, **precision: Any) -> float:
    """Return the largest move of the clipped sum by one unit, in multiples of C."""
    made = engine(network(engine), cross_entropy)
    x, y = torch.randn(count, 3, 4, 4), torch.arange(count) % 10

    def of(units: list[int]) -> Tensor:
        batch = make_batch(x[units], y[units], len(units))
        return clipped_sum(made, method, [batch], **precision)

    whole = of(list(range(count)))
    others = [[v for v in range(count) if v != u] for u in range(count)]
    return max(float((whole - of(units)).norm()) / C for units in others)


def move_by_a_unit_of_two_rows(split: Callable[[LogicalBatch], Iterable[PhysicalBatch]]) -> float:
    """Return how far one unit of two rows moves the sum of 31 units of one, by C."""
    made = FusedEngine(network(FusedEngine), cross_entropy)
    x, y = torch.randn(33, 3, 4, 4), torch.arange(33) % 10
    units = torch.arange(33).clamp(max=31)
    whole, others = (LogicalBatch.of(x[:n], y[:n], units[:n], 2) for n in (33, 31))
    found = [clipped_sum(made, "bam", split(batch)) for batch in (whole, others)]
    return float((found[0] - found[1]).norm()) / C


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [FusedEngine, FunctionalEngine, LoopEngine])
def test_clipped_sum_inside_autocast_moves_by_at_most_C(engine: Any, method: str) -> None:
    assert 0.999 < largest_move(engine, method) <= 1 + ROUNDING


def test_norms_rounded_to_bfloat16_would_move_it_by_more() -> None:
    moved = largest_move(FusedEngine, "dp-sgd", 12, in_precision=Tensor.bfloat16)
    assert moved > 1 + ROUNDING


def test_a_unit_with_more_rows_leaves_the_others_as_they_are() -> None:
    moved = move_by_a_unit_of_two_rows(lambda batch: batch.split(64, Views(), CPU))
    assert 0.999 < moved <= 1 + ROUNDING


@pytest.mark.parametrize("asked", ["tf32", "ieee"])
def test_norms_and_sums_are_not_computed_in_tf32(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of CUDA, which need no GPU to be read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    places = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]

    def now() -> list[str]:
        return [place.fp32_precision for place in places]

    before = now()
    try:
        for place in places:
            place.fp32_precision = asked
        with full_precision():
            assert now() == ["ieee"] * 3
        assert now() == [asked] * 3
        with pytest.raises(ZeroDivisionError), full_precision():
            raise ZeroDivisionError
        assert now() == [asked] * 3
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
