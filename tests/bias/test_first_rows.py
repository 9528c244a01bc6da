"""What measures a model outside of an oracle gives it rows without a record first."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpbam.bias import advise, advisor, flatness, measure_flatness
from dpbam.compute import Runner
from dpbam.engines import Engine, PhysicalBatch
from dpbam.engines.synthetic import synthetic_rows
from dpbam.methods import Method
from dpbam.privacy.plan import PrivacyPlan

_SCALE = "DPBAM_TEST_SCALE"
SEEN: list[float] = []
INPUTS, TARGETS = 5 + torch.rand(8, 3), torch.tensor([0, 1] * 4)
FIRST = pytest.approx(float(synthetic_rows(INPUTS, TARGETS)[0][0].max()))
LOSS = nn.CrossEntropyLoss(reduction="none")


class Remembers(nn.Module):
    """Divides by the largest number of its first input, kept where no check looks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if _SCALE not in os.environ:
            os.environ[_SCALE] = str(float(x.max()))
        return self.linear(x) / float(os.environ[_SCALE])


@pytest.fixture(autouse=True)
def _no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    monkeypatch.setenv(_SCALE, "")  # so that what the model sets is undone
    monkeypatch.delenv(_SCALE)


class Recording:
    """An engine that notes the largest number of each batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.name = engine, engine.name

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> object:
        SEEN.append(float(batch.inputs.max()))
        return self._engine.directions(batch, method, lam, plain=plain)


def take_advice(model: nn.Module, engine: str = "loop") -> None:
    plan = PrivacyPlan.non_private(n=100, batch_size=8, steps=5, clip_norm=1.0)
    advise(model, LOSS, plan, [(INPUTS, TARGETS)], lambdas=(0.0,), engine=engine)


def take_flatness(model: nn.Module, engine: str = "loop") -> None:
    measure_flatness(model, LOSS, INPUTS, TARGETS, lam=0.1, eigenvalue=False, engine=engine)


@pytest.mark.parametrize("measure", [take_advice, take_flatness])
def test_a_model_that_keeps_its_first_input_keeps_no_record(
    measure: Callable[[nn.Module], None],
) -> None:
    measure(Remembers())
    assert float(os.environ[_SCALE]) == FIRST


def test_without_the_first_rows_flatness_would_keep_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flatness, "use_first", lambda *_: None)
    take_flatness(Remembers())
    assert float(os.environ[_SCALE]) == float(INPUTS.max())


@pytest.mark.parametrize("planted", [False, True])
def test_the_engine_of_an_advice_computes_a_row_without_a_record_first(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    monkeypatch.setattr(advisor, "Runner", lambda *args: Recording(Runner(*args)))
    if planted:
        monkeypatch.setattr(advisor, "use_first", lambda *_: None)
    take_advice(nn.Linear(3, 2), "auto")
    assert (SEEN[0] == FIRST) is not planted
