"""The fused engine against one sample at a time, on whole models."""

from itertools import product
from typing import Any

import pytest
import torch
from agreement import METHODS, cast, errors
from reference import make_batch
from zoo import ROWS, ZOO, loss

from dpbam.engines.fused import FusedEngine
from support import in_turn

UNITS = {"K=1": 1, "K=2": 2, "K=4": 4}
LARGE = "wide_resnet_16_4"  # a smaller one is there, too


def grid(*others: list[str]) -> list[Any]:
    """Every model but the large one in turn; the rest is slow."""
    large = [pytest.param(LARGE, *rest, marks=pytest.mark.slow) for rest in product(*others)]
    return in_turn([name for name in ZOO if name != LARGE], *others) + large


@pytest.mark.parametrize(("name", "units", "method"), grid(list(UNITS), list(METHODS)))
def test_float64_agrees_to_1e_9(name: str, units: str, method: str) -> None:
    torch.manual_seed(0)
    model, inputs, targets = ZOO[name]()
    model, inputs = model.double(), cast(inputs, torch.float64)
    batch = make_batch(inputs, targets, ROWS, UNITS[units])
    found = errors(FusedEngine(model, loss), model, loss, batch, method)
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize(("name", "method"), grid(list(METHODS)))
def test_float32_agrees_to_1e_4(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, inputs, targets = ZOO[name]()
    batch = make_batch(inputs, targets, ROWS, 2)
    wide = model.double()
    exact = make_batch(cast(inputs, torch.float64), targets, ROWS, 2)
    narrow = FusedEngine(_float32_copy(wide), loss)
    found = errors(_Narrow(narrow, batch), wide, loss, exact, method)
    assert max(found.values()) < 1e-4, found


class _Narrow:
    """Runs the float32 engine where the float64 batch is given."""

    name = "narrow"

    def __init__(self, engine: FusedEngine, batch: object) -> None:
        self._engine, self._batch = engine, batch

    def directions(
        self, batch: object, method: object, lam: float, *, plain: bool = False
    ) -> object:
        return self._engine.directions(self._batch, method, lam, plain=plain)  # type: ignore[arg-type]


def _float32_copy(model: torch.nn.Module) -> torch.nn.Module:
    import copy

    return copy.deepcopy(model).float()
