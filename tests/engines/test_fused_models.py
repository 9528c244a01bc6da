"""The fused engine against one sample at a time, on whole models."""

import pytest
import torch
from agreement import METHODS, cast, errors
from reference import make_batch
from zoo import ROWS, ZOO, loss

from dpbam.engines.fused import FusedEngine

UNITS = {"K=1": 1, "K=4": 4, "ragged": [1, 3, 2, 2]}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", ZOO)
def test_float64_agrees_to_1e_9(name: str, units: str, method: str) -> None:
    torch.manual_seed(0)
    model, inputs, targets = ZOO[name]()
    model, inputs = model.double(), cast(inputs, torch.float64)
    batch = make_batch(inputs, targets, ROWS, UNITS[units], dtype=torch.float64)
    found = errors(FusedEngine(model, loss), model, loss, batch, method)
    assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
def test_float32_agrees_to_1e_4(name: str, method: str) -> None:
    torch.manual_seed(0)
    model, inputs, targets = ZOO[name]()
    batch = make_batch(inputs, targets, ROWS, [1, 3, 2, 2])
    wide = model.double()
    exact = make_batch(
        cast(inputs, torch.float64), targets, ROWS, [1, 3, 2, 2], dtype=torch.float64
    )
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
