"""One record moves the clipped sum by at most C, whatever the model does, or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import pytest
import torch
from catalogue import METHODS
from mixing import RECORDS, SLACK, STATEFUL, STEPS, RefusedError, load, moves, world
from mixing_state import forget
from torch import nn

from dpbam import Compute, PrivateGradientOracle
from dpbam.engines.base import Loss, PhysicalBatch, call_model
from dpbam.engines.materialised import MaterialisedDirections
from dpbam.methods import Method
from support import in_turn, private_plan

ENGINES = ("auto", "fused", "functional", "loop")
SAMPLE = [
    "zero gate", "zero head", "gate that a step opens", "divided by the maximum",
    "cumulative sum", "encoder layer on batch first data", "only above a size", "buffer written",
    "queue in a list", "previous batch", "first batch for ever", "global list", "closure",
    "forward hook", "saved tensors replaced", "function with its own vmap rule", "backward hook",
    "loss minus its mean", "loss that keeps a level", "rows ordered by length",
]  # fmt: skip
#: torch refuses these on one record
WITHOUT_STATISTICS = {"batch norm as a function"}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    forget()


def check(name: str, engine: str, method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = moves(name, engine, method)
        except RefusedError:
            return
    assert len(found) == STEPS
    assert max(found) <= 1 + SLACK, f"one record moves the sum by {max(found):.1f} C: {found}"


@pytest.mark.parametrize(("name", "method"), in_turn(SAMPLE, ["DP-SGD", "exact BAM"]))
def test_clipped_sum_moves_by_at_most_C_on_a_sample(name: str, method: str) -> None:
    check(name, "auto", method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", load())
def test_clipped_sum_moves_by_at_most_C(name: str, engine: str, method: str) -> None:
    check(name, engine, method)


def check_loop(name: str) -> None:
    """A property that holds because everything is refused would say nothing."""
    everyone = list(range(RECORDS))
    if name in STATEFUL or name in WITHOUT_STATISTICS:
        with pytest.raises(RefusedError):
            world(name, "loop", "DP-SGD", everyone)
    else:
        assert len(world(name, "loop", "DP-SGD", everyone)) == STEPS


@pytest.mark.parametrize("name", SAMPLE)
def test_loop_engine_refuses_state_and_supports_the_rest_on_a_sample(name: str) -> None:
    check_loop(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in load() if n not in SAMPLE])
def test_loop_engine_refuses_state_and_supports_the_rest(name: str) -> None:
    check_loop(name)


@pytest.mark.parametrize(
    "name", ["buffer written", "closure", "forward hook", "loss that keeps a level"]
)
def test_refused_step_is_not_charged(name: str) -> None:
    made = load()[name]()
    x, y = made.records()
    oracle = PrivateGradientOracle(
        made.model.double(),
        made.loss,
        private_plan(),
        sampling="poisson-elsewhere",
        compute=Compute(engine="loop", physical_batch_size=RECORDS),
    )
    with pytest.raises(ValueError, match="forward pass"):
        oracle.backward(x, y)
    assert oracle.step == 0
    assert not list(oracle.ledger.entries())


def test_catalogue_has_forty_models() -> None:
    assert len(load()) >= 40


# --- negative control: an engine that shows the model the whole batch


class TogetherEngine:
    """Gradients of the single losses of one pass over all rows."""

    name = "together"

    def __init__(self, model: nn.Module, loss: Loss, groups: Mapping[str, int]) -> None:
        self._model, self._loss, self._groups = model, loss, groups

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> MaterialisedDirections:
        theta = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        values = self._loss(call_model(self._model, batch.inputs), batch.targets)
        found = []
        for value in values:
            g = torch.autograd.grad(
                value, list(theta.values()), retain_graph=True, allow_unused=True,
                materialize_grads=True,
            )  # fmt: skip
            found.append(dict(zip(theta, g, strict=True)))
        each = {n: torch.stack([g[n] for g in found]) for n in theta}
        return MaterialisedDirections(each, self._groups, torch.zeros(len(found)))


MUST_FAIL = ["zero gate", "cumulative sum", "divided by the maximum", "queue in a list",
             "loss minus its mean", "first batch for ever"]  # fmt: skip


@pytest.mark.parametrize("name", MUST_FAIL)
def test_engine_that_runs_the_batch_together_exceeds_the_bound(name: str) -> None:
    assert max(moves(name, TogetherEngine, "DP-SGD")) > 1.1


def test_bound_is_tight() -> None:
    """Row by row, a record whose gradient is longer than C moves the sum by C exactly."""
    found = moves("scaled by the size", "loop", "DP-SGD")
    assert found == pytest.approx([1.0] * STEPS, abs=1e-9)
