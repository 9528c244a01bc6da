"""A pass that moves a generator of random numbers counts the passes: refused before a charge.

Each claim fails with a mistake planted.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpbam.engines import StatefulModelError, generators
from planting import Mistake, catches
from support import ENGINES, cross_entropy, noticed_sums, private_plan, samples, sized_oracle

C, L = 0.01, 32
_MODULE_GENERATOR = "a generator of the model"


class Factors(nn.Module):
    """Multiplies each pass by a number, from one of the generators that torch does not key."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind = nn.Linear(4, 3).double(), kind
        self.generator = np.random.default_rng(0) if kind == _MODULE_GENERATOR else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "Python":
            factor = random.uniform(-1.0, 1.0)
        elif self.kind == "NumPy":
            factor = float(np.random.uniform(-1.0, 1.0))  # noqa: NPY002
        elif self.kind == "NumPy's normal":
            factor = float(np.random.randn())  # noqa: NPY002
        elif self.kind == "torch":
            seed = torch.default_generator.initial_seed() + 1
            torch.default_generator.manual_seed(seed)
            factor = math.sin(float(seed % 1000))
        else:
            assert self.generator is not None
            factor = float(self.generator.uniform(-1.0, 1.0))
        return self.linear(x * factor)


def next_sum(kind: str, engine: str, records: int) -> Tensor:
    """The clipped sum of a second step, after one on ``records`` records; the seeds are public."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    oracle = sized_oracle(
        Factors(kind), cross_entropy, private_plan(n=10 * L, batch_size=L, clip_norm=C), seed=0,
        engine=engine, physical_batch_size=8,
    )  # fmt: skip
    with noticed_sums() as sums:
        for n, seed in ((records, 1), (L, 2)):
            x, y = samples(n, seed=seed)
            oracle.backward(x + 1, y)
    return sums[1]


def check_no_pass_moves_a_generator(kind: str = "Python") -> None:
    """One record more in a step moves nothing in the next: the model is refused."""
    try:
        one, other = (next_sum(kind, "fused", n) for n in (L, L + 1))
    except StatefulModelError:
        return
    moved = float((one - other).norm()) / C
    assert moved <= 1e-5, f"the next step moves by {moved:.1f} C"


def check_no_pass_moves_the_generator_of_torch() -> None:
    check_no_pass_moves_a_generator("torch")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["Python", "NumPy", "NumPy's normal", "torch", _MODULE_GENERATOR])
def test_a_pass_that_moves_a_generator_is_refused(kind: str, engine: str) -> None:
    oracle = sized_oracle(Factors(kind), cross_entropy, private_plan(), engine=engine)
    held = kind == _MODULE_GENERATOR
    words = "change[sd] .*generator" if held else f"moves {kind.removesuffix(' normal')}"
    with pytest.raises(StatefulModelError, match=words):
        oracle.backward(*samples(10))
    assert (oracle.step, len(oracle.ledger)) == (0, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_refused_pass_leaves_the_global_generators_as_they_were(engine: str) -> None:
    """So the number of passes reaches nothing that is drawn afterwards."""
    for kind, draw in (("Python", random.random), ("NumPy", np.random.random)):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        expected = draw()
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        oracle = sized_oracle(Factors(kind), cross_entropy, private_plan(), engine=engine)
        with pytest.raises(StatefulModelError):
            oracle.backward(*samples(10))
        assert draw() == expected


def test_another_global_generator_of_numpy_is_watched_too() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        oracle = sized_oracle(Factors("NumPy"), cross_entropy, private_plan())
        with pytest.raises(StatefulModelError, match="moves NumPy's"):
            oracle.backward(*samples(10))
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_that_are_keyed_by_the_record_pass(engine: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    oracle = sized_oracle(model, cross_entropy, private_plan(), engine=engine)
    oracle.backward(*samples(10))
    assert oracle.step == 1


# --- the mistakes


def nothing(original: Any) -> Any:
    return lambda self: None


MISTAKES = {
    "a pass that moves Python's generator": Mistake(
        check_no_pass_moves_a_generator, generators.GlobalGenerators, "check", nothing
    ),
    "a pass that moves torch's generator": Mistake(
        check_no_pass_moves_the_generator_of_torch, generators.GlobalGenerators, "check", nothing
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
