"""What an attacker can do at best: closed forms, the second accountant, and the safe side."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from dpbam.app.audit import accountant
from dpbam.privacy import accounting, tradeoff
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.tradeoff import LEAST_ERROR, TradeOff, trade_off

RATES = (1e-6, 1e-3, 1e-2, 1e-1, 0.5)
GAUSSIANS = [Charge(2.0, 1.0, 1), pytest.param(Charge(1.0, 1.0, 3), marks=pytest.mark.slow)]
THIRTY = [Charge(2.0, 0.2, 30)]
SUBSAMPLED = [
    THIRTY,
    pytest.param([Charge(1.731, 4096 / 50_000, 1000)], marks=pytest.mark.slow),
    pytest.param([Charge(0.8, 0.01, 200), Charge(4.0, 0.5, 3)], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def thirty() -> TradeOff:
    found = trade_off(THIRTY)
    assert found is not None
    return found


@pytest.mark.parametrize("charge", GAUSSIANS)
def test_a_gaussian_has_its_closed_form_to_1e_6_and_never_a_stronger_one(charge: Charge) -> None:
    """mu = sqrt(T) / sigma; f(alpha) = Phi(Phi^-1(1 - alpha) - mu)."""
    found, mu = trade_off([charge]), math.sqrt(charge.steps) / charge.noise_multiplier
    assert found is not None
    assert 0 <= found.gaussian.mu - mu <= 1e-6
    assert 0 <= found.gaussian.regret <= 2e-4  # of nothing but the grid
    for rate in RATES:
        assert -1e-12 <= found.power(rate) - ndtr(mu + ndtri(rate)) <= 1e-6
    assert 0 <= found.advantage - (2 * ndtr(mu / 2) - 1) <= 1e-6
    for epsilon, delta in zip(found.epsilons[::400], found.deltas[::400], strict=True):
        exact = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
        assert -1e-12 <= delta - exact <= 1e-6


@pytest.mark.parametrize("charges", SUBSAMPLED)
def test_a_subsampled_plan_is_within_the_second_accountants_bracket(
    charges: list[Charge], thirty: TradeOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile, rates, advantage and mu lie between those of its two profiles."""
    monkeypatch.setattr(accountant, "_POINTS", 2**16)
    found = thirty if charges == THIRTY else trade_off(charges)
    assert found is not None
    low, high = accountant.profile(charges, found.epsilons, 1e-10)
    assert (low - 1e-9 <= found.deltas).all()
    assert (found.deltas <= high + 1e-9).all()
    keep = high > 1e-10
    weak, strong = (TradeOff(found.epsilons[keep], d[keep]) for d in (low, high))
    for rate in RATES:
        assert weak.power(rate) - 1e-6 <= found.power(rate) <= strong.power(rate) + 1e-6
    assert weak.advantage - 1e-9 <= found.advantage <= strong.advantage + 1e-9
    assert found.gaussian.mu <= math.sqrt(sum(c.steps / c.noise_multiplier**2 for c in charges))


def test_the_gaussian_bound_allows_at_least_what_the_trade_off_allows(
    thirty: TradeOff,
) -> None:
    """At every pair of errors of at least LEAST_ERROR, in both directions of the relation."""
    found, (mu, regret) = thirty, thirty.gaussian
    alpha = np.geomspace(LEAST_ERROR, 0.9, 500)
    bound = ndtr(-ndtri(alpha) - mu)
    assert (bound <= found(alpha) + 1e-12).all()
    assert (found(found(alpha)) <= alpha + 1e-9).all()  # its own inverse
    assert (found(np.minimum(1.0, alpha + regret)) - regret <= bound + 1e-12).all()
    smaller = ndtr(-ndtri(alpha) - 0.99 * mu)
    assert (smaller > found(alpha)).any()  # no much smaller mu would do


def test_the_point_of_epsilon_and_delta_lies_on_the_profile(thirty: TradeOff) -> None:
    epsilon = total_epsilon(THIRTY, 1e-5)
    assert np.interp(epsilon, thirty.epsilons, thirty.deltas) == pytest.approx(1e-5, rel=1e-3)


def test_a_finer_grid_only_lowers_what_is_stated(
    thirty: TradeOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "_GRIDS", ((1e-2, 0.0),))
    monkeypatch.setattr(tradeoff, "_POINTS", 100)
    coarse = tradeoff._trade_off.__wrapped__(tuple(THIRTY))
    assert coarse is not None
    assert coarse.gaussian.mu >= thirty.gaussian.mu
    assert all(coarse.power(rate) >= thirty.power(rate) for rate in RATES)


@pytest.mark.parametrize("charges", [[], [Charge(0.0, 0.1, 5)], [Charge(0.01, 1.0, 100)]])
def test_without_a_distribution_there_is_no_trade_off(charges: list[Charge]) -> None:
    assert trade_off(charges) is None
