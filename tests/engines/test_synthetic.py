"""Rows without a record, and models that do not run on the first guess."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpbam import Compute, PrivateGradientOracle, compute
from dpbam.engines import LoopEngine, UnsupportedModelError
from dpbam.engines.base import PhysicalBatch
from dpbam.engines.fused import FusedEngine
from dpbam.engines.memory import LOOP_ROWS
from dpbam.engines.synthetic import synthetic_rows, synthetic_units
from dpbam.methods import DPSGD
from support import cross_entropy, gradients, quiet_plan, samples


def test_floats_are_between_0_and_1_and_whole_numbers_0_or_1() -> None:
    inputs = {"x": torch.randn(7, 2, 3).half(), "ids": torch.full((7, 4), 99), "none": None}
    rows = synthetic_rows(inputs, torch.full((7,), 5, dtype=torch.uint8))
    assert len(rows) == 3
    for (x, y), (first, last) in zip(rows, [(0, 0), (1, 0), (1, 1)], strict=True):
        assert x["x"].shape == (1, 2, 3)
        assert x["x"].dtype == torch.float16
        assert bool(((x["x"] > 0) & (x["x"] < 1)).all())
        assert x["ids"].tolist() == [[first] * 4]
        assert x["none"] is None
        assert (y.tolist(), y.dtype) == ([last], torch.uint8)
    assert len(synthetic_rows(torch.randn(3, 2), torch.randn(3))) == 1


def test_a_unit_of_an_empty_batch_has_a_row() -> None:
    x, y = samples(2)
    rows = PhysicalBatch(x, y, 2, torch.arange(2))
    for unit in synthetic_units(rows):
        assert (unit.units, len(unit.inputs), len(unit.targets)) == (1, 1, 1)
        assert unit.rows_per_unit == 1
    assert synthetic_rows(x[:0], y[:0])[0][0].shape == (1, 4)


class Packed(nn.Module):
    """Refuses sequences of length 0, as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.out(packed.data.mean(0, keepdim=True))


class Masked(nn.Module):
    """NaN where a mask leaves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.out((self.words(ids) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


class OnlyLarge(nn.Module):
    """Runs on values above 5 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not bool((x > 5).any()):
            raise ValueError("all values are small")
        return self.out(x)


def first_step(model: nn.Module, inputs: object, **compute: object) -> PrivateGradientOracle:
    oracle = PrivateGradientOracle(
        model, cross_entropy, quiet_plan(1.0), seed=0, compute=Compute(**compute)
    )
    oracle.backward(inputs, torch.zeros(5, dtype=torch.long))
    return oracle


def test_a_model_that_needs_lengths_above_0_is_measured_on_lengths_of_1() -> None:
    ids, lengths = torch.randint(0, 9, (5, 6)), torch.tensor([3, 6, 1, 2, 6])
    oracle = first_step(Packed(), (ids, lengths), engine="loop")
    assert oracle.physical_batch_size == LOOP_ROWS
    assert all(bool(g.isfinite().all()) for g in gradients(oracle.model).values())


def test_a_model_that_gives_nan_under_an_empty_mask_is_measured_under_a_full_one() -> None:
    from dpbam.engines import memory

    measured, real = [], memory.physical_batch_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            memory, "physical_batch_size",
            lambda engine, sample, *args, **options: (
                measured.append(sample.inputs[1]) or real(engine, sample, *args, **options)
            ),
        )  # fmt: skip
        first_step(Masked(), (torch.randint(0, 9, (5, 6)), torch.ones(5, 6, dtype=torch.long)))
    assert [bool(mask.all()) for mask in measured] == [True]


def test_a_model_that_runs_on_records_only_is_not_given_one_by_the_loop_engine() -> None:
    """Its own error, with a note."""
    x, y = samples(5)
    x = x.float() + 10
    with (
        pytest.raises(ValueError, match="all values are small") as raised,
        pytest.warns(UserWarning, match=r"fails on them .*physical_batch_size=\.\.\."),
    ):
        first_step(OnlyLarge(), x)
    assert "before the loop engine gives it a record" in raised.value.__notes__[-1]
    batch = PhysicalBatch(x, y, 5, torch.arange(5))
    engine = LoopEngine(OnlyLarge(), cross_entropy)
    for _ in range(2):
        with pytest.raises(ValueError, match="all values are small"):
            engine.directions(batch, DPSGD(), 0.0)


class Tight(nn.Module):
    """Runs under vmap, on 6 features of the right class of numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids - 5).mean(1))


def test_a_model_that_fails_without_a_record_gets_few_rows_on_a_fast_engine() -> None:
    """Its ids begin at 5: under vmap nothing of a record can become a Python number."""
    with pytest.warns(UserWarning, match="16 rows are computed at once"):
        oracle = first_step(Tight(), torch.randint(5, 14, (5, 6)))
    assert (oracle.engine.name, oracle.physical_batch_size) == ("fused", LOOP_ROWS)


@pytest.mark.parametrize("how", ["fit", "a first step"])
def test_no_record_changes_the_engine(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines round differently: the directions of all others would change with it."""
    real = FusedEngine.directions

    def fails(self, batch, method, lam, **more):
        if batch.inputs.isnan().any():
            raise UnsupportedModelError("it does not support this record")
        return real(self, batch, method, lam, **more)

    monkeypatch.setattr(FusedEngine, "directions", fails)
    monkeypatch.setattr(compute, "_MEASURED", {})
    x, y = samples(4)
    oracle = PrivateGradientOracle(
        nn.Linear(4, 3).double(), cross_entropy, quiet_plan(), sampling="unchecked"
    )
    if how == "fit":
        oracle.fit(x, y)
    else:
        oracle.backward(x, y)
    before, charged = oracle.engine.name, len(oracle.ledger)
    with pytest.raises(UnsupportedModelError, match=r"must not depend on a record.*'loop'"):
        oracle.backward(torch.cat([x[:-1], torch.full_like(x[:1], torch.nan)]), y)
    assert (oracle.engine.name, len(oracle.ledger)) == (before, charged)


def test_an_engine_that_fails_from_the_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: nothing but the rows differs."""

    def fails(self, batch, method, lam, **more):
        raise UnsupportedModelError("it does not support this model")

    monkeypatch.setattr(FusedEngine, "directions", fails)
    monkeypatch.setattr(compute, "_MEASURED", {})
    oracle = PrivateGradientOracle(
        nn.Linear(4, 3).double(), cross_entropy, quiet_plan(), sampling="unchecked"
    )
    with pytest.warns(UserWarning, match="functional engine is used"):
        oracle.backward(*samples(4))
    assert oracle.engine.name == "functional"
