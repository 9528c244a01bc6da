"""Composed privacy losses: the numbers of dp-accounting's own accountant, never stale."""

from __future__ import annotations

import dp_accounting
import pytest

from dpbam.privacy import accounting
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.ledger import Ledger


def by_dp_accounting(charges: list[Charge], delta: float, grid: float) -> float:
    accountant = dp_accounting.pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid
    )
    for sigma, q, count in charges:
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(step, count)
    return float(accountant.get_epsilon(delta))


def epsilon_on(charges: list[Charge], delta: float, grid: float) -> float:
    return float(accounting._compose(tuple(charges), grid).get_epsilon_for_delta(delta))


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
    assert epsilon_on(charges, delta, grid) == pytest.approx(expected, abs=1e-9)
    more = [charges[0]._replace(steps=charges[0].steps + 1), *charges[1:]]
    if expected:  # one step more is noticed
        assert abs(epsilon_on(more, delta, grid) - expected) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "little noise"])
def test_epsilon_is_that_of_dp_accounting_on_the_fine_grid(case: str) -> None:
    charges, delta, _ = CASES[case]
    expected = by_dp_accounting(charges, delta, 1e-4)
    # relative: 10,000 convolutions by FFT round in their last digits
    assert epsilon_on(charges, delta, 1e-4) == pytest.approx(expected, rel=1e-9, abs=1e-9)


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
            for cached in (accounting._on_grid, accounting._compose, accounting._step_loss):
                cached.cache_clear()
            assert total_epsilon(charges, delta) == value
