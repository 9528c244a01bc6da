"""What an observer is given: ids, losses, norms, factors and shares of the very step."""

from __future__ import annotations

import builtins
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam import BAM, Method
from dpbam.bias import BiasLens
from dpbam.methods import DPSGD
from dpbam.observers import Observation, TrainingLoss
from support import (
    ENGINES,
    METHODS,
    cross_entropy,
    each_gradient,
    flat,
    private_plan,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)


class Collector:
    """Keeps all that a step shows, on the units' own numbers."""

    wants_plain = False

    def __init__(self) -> None:
        self.by_unit: dict[int, dict[str, Any]] = {}
        self.shares: list[float] = []

    def begin(self, facts: Any) -> bool:
        return True

    def observe(self, batch: Observation) -> None:
        layers = batch.layer_norms()
        self.shares.append(batch.clip_share)
        for k, unit in enumerate(batch.ids.tolist()):
            self.by_unit[unit] = {
                "loss": float(batch.losses()[k]), "norm": float(batch.norms[:, k].norm()),
                "factor": float(batch.factors[0, k]),
                "layers": {name: float(norms[k]) for name, norms in layers.items()},
            }  # fmt: skip

    def finish(self, clipped: Any, released: Any) -> None:
        pass


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_an_observer_gets_each_unit_by_its_number(engine: str, method: str) -> None:
    """Losses against ordinary autograd, at theta for every method; ids in any order and split."""
    model, (x, y), seen = smooth_net(), samples(7), Collector()
    units = torch.tensor([30, 4, 4, 17, 9, 9, 2])
    plan = quiet_plan(0.5, unit="patient", max_records=2)
    oracle = sized_oracle(
        model, cross_entropy, plan, METHODS[method](0.1), engine=engine, observers=seen,
        physical_batch_size=3,
    )  # fmt: skip
    losses = cross_entropy(model(x), y).detach()
    oracle.backward(x, y, units)
    assert set(seen.by_unit) == set(units.tolist())
    for unit, found in seen.by_unit.items():
        assert found["loss"] == pytest.approx(float(losses[units == unit].mean()))
        assert found["norm"] == pytest.approx(math.hypot(*found["layers"].values()))
        assert found["factor"] == pytest.approx(min(1.0, 0.5 / found["norm"]))
    if method == "dp-sgd":
        gradients = each_gradient(model, x, y)
        assert seen.by_unit[30]["norm"] == pytest.approx(float(flat(gradients[0]).norm()))
    assert set(seen.by_unit[30]["layers"]) == {"0", "2"}


def test_the_clip_share_counts_units_that_become_shorter() -> None:
    seen = Collector()
    oracle = sized_oracle(smooth_net(), cross_entropy, quiet_plan(1.5), observers=seen)
    oracle.backward(*samples(9))
    shortened = [unit["norm"] > 1.5 for unit in seen.by_unit.values()]
    assert seen.shares == [sum(shortened) / 9]
    assert 0 < sum(shortened) < 9


def test_several_observers_watch_one_step_and_change_nothing() -> None:
    runs = []
    for observers in ((), (Collector(), BiasLens(), TrainingLoss())):
        oracle = sized_oracle(
            smooth_net(), cross_entropy, private_plan(), BAM(0.1), seed=0, observers=observers
        )
        oracle.backward(*samples(9))
        runs.append(flat({n: p.grad for n, p in oracle.model.named_parameters()}))
    assert torch.equal(*runs)
    collector, lens, loss = observers
    mean = sum(unit["norm"] for unit in collector.by_unit.values()) / 9
    assert lens.records[0].non_private_norms.mean == pytest.approx(mean)
    each = [unit["loss"] for unit in collector.by_unit.values()]
    assert loss.non_private_losses == [pytest.approx(sum(each) / 9)]


def test_the_training_loss_takes_no_further_pass() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1  # of the class: the engines look at modules
            return super().forward(x)

    counts = []
    for observers in ((), TrainingLoss()):
        oracle = sized_oracle(
            Counting(4, 3).double(), cross_entropy, private_plan(), engine="functional",
            observers=observers,
        )  # fmt: skip
        oracle.backward(*samples(9))
        before = Counting.calls
        oracle.backward(*samples(9, seed=2))
        counts.append(Counting.calls - before)
    assert counts[0] == counts[1] > 0


def test_the_training_loss_of_an_empty_batch_is_not_a_number() -> None:
    loss = TrainingLoss()
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), observers=loss)
    oracle.backward(*samples(0))
    assert math.isnan(loss.non_private_losses[0])


class Elsewhere(Method):
    """Never asks for the gradient at theta."""

    def direction(self, grad: Any, theta: Any, lam: float) -> Any:
        return grad({n: t + 0.1 for n, t in theta.items()})


@pytest.mark.parametrize("engine", ["functional", "loop"])
def test_a_loss_that_no_pass_has_computed_is_not_a_number(engine: str) -> None:
    loss = TrainingLoss()
    oracle = sized_oracle(
        smooth_net(), cross_entropy, private_plan(), Elsewhere(), engine=engine, observers=loss
    )
    oracle.backward(*samples(3))
    assert len(loss.non_private_losses) == 1


@pytest.mark.parametrize("installed", [True, False])
def test_records_become_columns(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = BiasLens()
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), DPSGD(), observers=lens)
    for seed in range(2):
        oracle.backward(*samples(9, seed=seed))
    if not installed:
        monkeypatch.setattr("dpbam.bias.lens.find_spec", lambda name: None)
    elif "pandas" not in sys.modules:
        pytest.importorskip("pandas")
    frame = lens.to_frame()
    assert isinstance(frame, builtins.dict) != installed
    assert list(frame["step"]) == [0, 1]
    biases = [record.non_private_against_own.bias for record in lens.records]
    assert list(frame["non_private_against_own/bias"]) == biases
    assert len(frame["non_private_layers/0/norms/mean"]) == 2
