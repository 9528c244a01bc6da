"""Composed privacy losses: the numbers of dp-accounting's own composition, never stale."""

from __future__ import annotations

import math
from functools import reduce

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from dpbam.privacy import accounting
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.composition import Losses, epsilon_at
from dpbam.privacy.ledger import Ledger


def by_dp_accounting(charges: list[Charge], delta: float, grid: float) -> float:
    steps = [
        privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=sigma,
            sampling_prob=q,
            value_discretization_interval=grid,
            neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        ).self_compose(count)
        for sigma, q, count in charges
    ]
    return float(reduce(lambda a, b: a.compose(b), steps).get_epsilon_for_delta(delta))


CASES = {
    "one kind": ([Charge(1.731, 4096 / 50_000, 1000)], 1e-5, 1e-3),
    "the whole data set": ([Charge(1.0, 1.0, 3)], 1e-5, 1e-3),
    "little noise": ([Charge(0.3, 0.1, 40)], 1e-5, 1e-2),
    "a small delta": ([Charge(2.0, 0.3, 100)], 1e-8, 1e-3),
    "many steps": ([Charge(1.0, 0.01, 10_000)], 1e-6, 1e-2),
    "one step": ([Charge(5.0, 0.001, 1)], 1e-5, 1e-4),
    "nothing to speak of": ([Charge(30.0, 0.01, 5)], 1e-2, 1e-3),
    "three kinds": ([Charge(1.7, 0.08, 500), Charge(1.2, 0.05, 300), Charge(3.0, 1.0, 5)], 1e-5,
                    1e-3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_epsilon_is_that_of_dp_accounting(case: str) -> None:
    charges, delta, grid = CASES[case]
    expected = by_dp_accounting(charges, delta, grid)
    assert accounting._by_pld(charges, delta, grid) == pytest.approx(expected, abs=1e-9)
    more = [charges[0]._replace(steps=charges[0].steps + 1), *charges[1:]]
    if expected:  # one step more is noticed
        assert abs(accounting._by_pld(more, delta, grid) - expected) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "little noise"])
def test_epsilon_is_that_of_dp_accounting_on_the_fine_grid(case: str) -> None:
    charges, delta, _ = CASES[case]
    expected = by_dp_accounting(charges, delta, 1e-4)
    assert accounting._by_pld(charges, delta, 1e-4) == pytest.approx(expected, abs=1e-9)


def test_a_ledger_reports_what_a_new_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing kept in memory answers for other charges, another delta, or another order."""
    monkeypatch.setattr(accounting, "_GRIDS", ((1e-2, 0.0),))  # the fine grids take long
    ledger, seen = Ledger(delta=1e-4), []
    kinds = [(3.0, 0.1), (2.0, 0.1), (3.0, 0.2), (3.0, 0.1), (2.0, 0.1)]
    for step, (sigma, q) in enumerate(kinds):
        ledger.charge("s", step, noise_multiplier=sigma, sampling_rate=q)
        seen.append((ledger.charges(), ledger.epsilon(), ledger.epsilon(1e-6)))
    assert len({value for *_, value in seen}) == len(kinds)
    for charges, *values in reversed(seen):
        for delta, value in zip((1e-4, 1e-6), values, strict=True):
            for cached in (accounting._on_grid, accounting._losses, accounting._step_losses):
                cached.cache_clear()
            assert total_epsilon(charges, delta) == value


def test_epsilon_at_the_ends() -> None:
    """An infinite loss above delta, a delta that covers all, and losses beyond exp's range."""
    coin = Losses(-10, np.eye(21)[0] / 2 + np.eye(21)[20] / 2, 0.0)  # loss -1 or 1
    assert epsilon_at(coin._replace(infinity=1e-3), 0.1, 1e-4) == math.inf
    assert epsilon_at(coin, 0.1, 0.5) == 0.0
    assert epsilon_at(coin, 0.1, 0.1) == pytest.approx(1 + math.log(0.8))  # (1 - e^(eps-1)) / 2
    far = Losses(8000, np.array([1.0]), 0.0)
    assert epsilon_at(far, 0.1, 0.1) == 800.0
