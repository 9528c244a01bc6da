"""What a model fixes at its first use does not come from a record.

``if scale is None: scale = float(x.abs().max())``, kept where no check sees it (here: the
environment), would move every later step by what one record was. Each claim fails with a mistake
planted.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam import Compute, PrivateGradientOracle
from dpbam.compute import Runner
from dpbam.engines import StatefulModelError, synthetic
from planting import Mistake, catches
from support import cross_entropy, noticed_sums, private_plan, samples

C = 0.01
_SCALE = "DPBAM_TEST_SCALE"
CONFIG = SimpleNamespace(scale=None)


class Scaled(nn.Module):
    """Divides by the largest input that it saw first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3).double()

    def scale(self, x: Tensor) -> float:
        if _SCALE not in os.environ:
            os.environ[_SCALE] = str(float(x.abs().max()))
        return float(os.environ[_SCALE])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / self.scale(x))


class NamedScale(Scaled):
    """Keeps the number in an object that its code names."""

    def scale(self, x: Tensor) -> float:
        if CONFIG.scale is None:
            CONFIG.scale = float(x.abs().max())
        return CONFIG.scale


def first_sum(x: Tensor, y: Tensor, model: type[nn.Module], **compute: Any) -> Tensor:
    """The clipped sum of a new training's first step."""
    os.environ.pop(_SCALE, None)
    CONFIG.scale = None
    plan = private_plan(n=10 * len(x), batch_size=len(x), clip_norm=C)
    oracle = PrivateGradientOracle(
        model(),
        cross_entropy,
        plan,
        seed=0,
        compute=Compute(**compute),
        sampling="poisson-elsewhere",
    )
    try:
        with warnings.catch_warnings(), noticed_sums() as sums:
            warnings.simplefilter("ignore")  # the loop engine is slow
            oracle.backward(x, y)
    finally:
        os.environ.pop(_SCALE, None)
    return sums[0]


def moved(model: type[nn.Module] = Scaled, **compute: Any) -> float:
    """How far the first record, a large one, moves the sum, in units of C."""
    x, y = samples(12)
    x[0] = 1e4
    one, other = (first_sum(x[k:], y[k:], model, **compute) for k in (0, 1))
    return float((one - other).norm()) / C


def check_no_number_is_fixed_by_a_record_where_memory_is_measured() -> None:
    assert moved(engine="loop") <= 1 + 1e-5


def check_no_number_is_fixed_by_a_record_where_the_rows_are_given() -> None:
    assert moved(engine="loop", physical_batch_size=64) <= 1 + 1e-5


@pytest.mark.parametrize("rows", [None, 64])
def test_a_model_that_changes_engines_by_its_first_use_is_refused(rows: int | None) -> None:
    """Fixed, the number is no obstacle to the fused engine any more."""
    with pytest.raises(StatefulModelError, match=r"ran on the loop engine alone.*on the fused"):
        moved(engine="auto", physical_batch_size=rows)


def check_no_record_chooses_the_engine() -> None:
    """A target out of range in the first batch fails on every engine: the fastest is kept."""
    for rows in (None, 64):
        plan = private_plan(n=120, batch_size=12)
        oracle = PrivateGradientOracle(
            nn.Linear(4, 3).double(), cross_entropy, plan, sampling="poisson-elsewhere",
            compute=Compute(physical_batch_size=rows),
        )  # fmt: skip
        x, y = samples(12)
        with warnings.catch_warnings(), suppress(IndexError):
            warnings.simplefilter("ignore")
            oracle.backward(x, torch.where(torch.arange(12) == 3, 99, y))
        assert (oracle.engine.name, len(oracle.ledger)) == ("fused", 0)


@pytest.mark.parametrize("rows", [None, 64])
def test_a_number_in_an_object_that_the_code_names_is_refused_by_name(rows: int | None) -> None:
    with pytest.raises(StatefulModelError, match=r"changes .*NamedScale.scale\[global CONFIG\]"):
        moved(NamedScale, physical_batch_size=rows)


def test_the_rows_of_a_trial_are_those_of_any_other_data() -> None:
    (x, y), (other, _) = samples(5), samples(9, seed=2)
    for one, two in zip(
        synthetic.synthetic_rows(x, y), synthetic.synthetic_rows(other, 0 * y[:1]), strict=True
    ):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


# --- the mistakes


def of_the_first_record(original: Any) -> Any:
    return lambda t, integer: t[:1]


def gives_up_for_good(original: Any) -> Any:
    def directions(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return original(self, *args, **options)
        except IndexError:
            self._engines = self._engines[-1:]
            raise

    return directions


MISTAKES = {
    "memory measured on a record": Mistake(
        check_no_number_is_fixed_by_a_record_where_memory_is_measured, synthetic, "_row",
        of_the_first_record,
    ),
    "the first use on a record, where the rows are given": Mistake(
        check_no_number_is_fixed_by_a_record_where_the_rows_are_given, synthetic, "_row",
        of_the_first_record,
    ),
    "the engine chosen by a record": Mistake(
        check_no_record_chooses_the_engine, Runner, "directions", gives_up_for_good
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
