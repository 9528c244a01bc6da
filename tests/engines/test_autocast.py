"""Inside ``torch.autocast`` the clipped sum moves by at most C when a unit is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import make_batch
from torch import Tensor, nn

from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine
from dpbam.methods import BAM, DPSGD, Method
from dpbam.privacy.clipping import ROUNDING

C = 0.05  # C is below every norm, so that each unit moves the sum by exactly C
METHODS: dict[str, tuple[Method, float]] = {
    "dp-sgd": (DPSGD(), 0.0),
    "bam": (BAM(0.1), 0.1),
    "bam-exact": (BAM(0.1, exact=True), 0.1),
}


def largest_move(
    engine: Any,
    method: str,
    count: int = 4,
    in_precision: Callable[[Tensor], Tensor] = lambda norms: norms,
) -> float:
    """Return the largest move of the clipped sum by one unit, in multiples of C."""
    torch.manual_seed(0)
    norm_layers: list[nn.Module] = [nn.GroupNorm(2, 8), nn.LayerNorm(256)]
    if engine is FunctionalEngine:  # torch has no norms in mixed precision under vmap
        norm_layers = [nn.Identity(), nn.Identity()]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm_layers[0], nn.ReLU(), nn.Conv2d(8, 8, 1),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.ReLU(), nn.Flatten(), norm_layers[1], nn.Linear(256, 10),
    )  # fmt: skip
    x, y = torch.randn(count, 3, 4, 4), torch.arange(count) % 10
    made = engine(model, nn.CrossEntropyLoss(reduction="none"))

    def clipped_sum(units: list[int]) -> Tensor:
        batch = make_batch(x[units], y[units], len(units))
        with torch.autocast("cpu", torch.bfloat16):
            handle = made.directions(batch, *METHODS[method])
            norms = handle.norms()
            assert norms.dtype == torch.float32
            assert norms.min() > C
            total = handle.weighted_sum(C / in_precision(norms).float())
        return torch.cat([t.flatten().double() for t in total.values()])

    whole = clipped_sum(list(range(count)))
    others = [[v for v in range(count) if v != u] for u in range(count)]
    return max(float((whole - clipped_sum(units)).norm()) / C for units in others)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [FusedEngine, FunctionalEngine, LoopEngine])
def test_clipped_sum_inside_autocast_moves_by_at_most_C(engine: Any, method: str) -> None:
    assert 0.999 < largest_move(engine, method) <= 1 + ROUNDING


def test_norms_rounded_to_bfloat16_would_move_it_by_more() -> None:
    assert largest_move(FusedEngine, "dp-sgd", 12, Tensor.bfloat16) > 1 + ROUNDING
