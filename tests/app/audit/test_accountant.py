"""The second accountant brackets dp-accounting's answer, and notices a wrong one."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from dpbam.app.audit import accountant
from dpbam.app.audit.accountant import bracket
from dpbam.privacy.accounting import Charge, total_epsilon

CASES: list[tuple[list[Charge], float]] = [
    ([Charge(1.0, 1.0, 1)], 1e-5),
    ([Charge(1.1, 0.01, 50)], 1e-6),
    ([Charge(0.7, 0.2, 10), Charge(2.0, 0.05, 100)], 1e-5),
    ([Charge(20.0, 0.5, 3)], 1e-5),
]


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarser grid: wider brackets, sooner."""
    monkeypatch.setattr(accountant, "_POINTS", 2**17)


@pytest.mark.parametrize(("charges", "delta"), CASES)
@pytest.mark.slow
def test_bracket_holds_the_accountants_epsilon(charges: list[Charge], delta: float) -> None:
    low, high = bracket(charges, delta)
    epsilon = total_epsilon(charges, delta)
    assert low <= epsilon * (1 + 1e-6)
    assert epsilon <= high * 1.002  # dp-accounting rounds up on a coarser grid
    assert high - low < 0.1 * high


def test_bracket_holds_the_gaussian_mechanisms_closed_form() -> None:
    """Delta of mu-Gaussian DP: Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)."""

    def delta(epsilon: float) -> float:  # mu = 1
        return float(norm.cdf(0.5 - epsilon) - math.exp(epsilon) * norm.cdf(-0.5 - epsilon))

    low, high = bracket([Charge(2.0, 1.0, 4)], 1e-5)  # four steps at sigma 2: mu = 1
    assert delta(high) <= 1e-5 <= delta(low)


def test_an_epsilon_of_another_rate_falls_outside() -> None:
    """The mistake q = 1 / len(loader), with the last batch a short one."""
    low, _ = bracket([Charge(1.1, 0.011, 200)], 1e-6)
    assert total_epsilon([Charge(1.1, 0.01, 200)], 1e-6) < low


def test_no_steps_cost_nothing_and_no_noise_everything() -> None:
    assert bracket([], 1e-5) == (0.0, 0.0)
    assert bracket([Charge(0.0, 0.1, 1)], 1e-5) == (math.inf, math.inf)
