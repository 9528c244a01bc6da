"""Epsilon: known points, a peer's accountant, and calibration that never overshoots."""

from __future__ import annotations

import math
import warnings

import pytest

from dpbam.errors import ArgumentError
from dpbam.privacy import accounting
from dpbam.privacy.accounting import Charge, epsilon, total_epsilon
from dpbam.privacy.calibration import max_steps, noise_multiplier
from support import in_turn

CIFAR = {"sampling_rate": 4096 / 50_000, "steps": 1000}


@pytest.mark.parametrize(("accountant", "sigma"), [("pld", 1.731), ("rdp", 1.830)])
def test_known_points(accountant: str, sigma: float) -> None:
    """Epsilon 8 at delta 1e-5 for 1000 steps at q = 4096/50000."""
    found = noise_multiplier(8.0, 1e-5, **CIFAR, accountant=accountant)
    assert found == pytest.approx(sigma, abs=1e-3)
    spent = epsilon(found, **CIFAR, delta=1e-5, accountant=accountant)
    assert 8.0 * (1 - 1e-3) < spent <= 8.0


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [
        (1.731, 4096 / 50_000, 1000, 1e-5),
        pytest.param(1.0, 0.01, 500, 1e-5, marks=pytest.mark.slow),
        pytest.param(0.8, 0.1, 20, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_epsilon_agrees_with_opacus(sigma: float, q: float, steps: int, delta: float) -> None:
    """Its PRV accountant, within the larger of 1% and 0.011 (its own error bound is 0.01)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's own deprecations
        from opacus.accountants import PRVAccountant

        peer = PRVAccountant()
        peer.history = [(sigma, q, steps)]
        expected = peer.get_epsilon(delta)
    found = epsilon(sigma, q, steps, delta)
    assert abs(found - expected) <= max(0.01 * expected, 0.011)


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps", "accountant"),
    in_turn([(3.0, 1e-4, 512 / 1437, 56), (0.3, 1e-6, 0.01, 10)], ["pld", "rdp"]),
)
def test_calibration_never_overshoots(
    accountant: str, target: float, delta: float, q: float, steps: int
) -> None:
    sigma = noise_multiplier(target, delta, q, steps, accountant=accountant)
    assert epsilon(sigma, q, steps, delta, accountant=accountant) <= target
    assert epsilon(sigma * 0.998, q, steps, delta, accountant=accountant) > target  # nor wastes


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_max_steps_is_the_last_step_within_the_target(accountant: str) -> None:
    found = max_steps(1.5, 1e-5, 2.0, 0.1, accountant=accountant)
    assert epsilon(2.0, 0.1, found, 1e-5, accountant=accountant) <= 1.5
    assert epsilon(2.0, 0.1, found + 1, 1e-5, accountant=accountant) > 1.5


def test_no_step_is_affordable() -> None:
    assert max_steps(0.01, 1e-9, 0.5, 1.0) == 0


@pytest.mark.parametrize(
    "charges",
    [
        [Charge(1.1, 0.03, 1)],
        [Charge(1.1, 0.03, 77)],
        [Charge(0.7, 1.0, 3), Charge(2.5, 0.2, 10), Charge(1.1, 0.03, 77), Charge(40.0, 1e-6, 5)],
    ],
)
def test_rdp_is_that_of_dp_accounting_to_the_last_bit(charges: list[Charge]) -> None:
    """A step's divergences are computed once, and composed here, in dp-accounting's own order."""
    import dp_accounting as dp

    reference = dp.rdp.RdpAccountant()
    with accounting.quiet():
        for sigma, q, steps in charges:
            reference.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), steps)
        for delta in (1e-3, 1e-5, 1e-9):
            expected = reference.get_epsilon(delta)
            assert total_epsilon(charges, delta, accountant="rdp") == expected


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("target", "delta", "q", "words"),
    [
        (1e-6, 1e-9, 0.1, "no noise multiplier up to 1e6 is known to meet epsilon 1e-06"),
        (1e-3, 1e-300, 0.1, "no noise multiplier up to 1e6 is known to meet epsilon 0.001"),
        (1e300, 1e-9, 0.1, r"epsilon must be at most 1e\+09.*PrivacyPlan.non_private"),
        (1.0, 1e-3, 1e-9, "delta 0.001 is not below 1e-07, the probability that a unit is drawn"),
    ],
)
def test_a_target_out_of_reach_is_refused_in_a_sentence(
    accountant: str, target: float, delta: float, q: float, words: str
) -> None:
    """Before, scipy's "different signs", a domain error, or minutes of search."""
    with pytest.raises(ArgumentError, match=words):
        noise_multiplier(target, delta, q, 100, accountant=accountant)


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps", "accountant"),
    [
        (1e-9, 0.5, 0.1, 100, "rdp"),  # epsilon falls to 0 at once: a sigma of 1e-90 was refused
        pytest.param(1e-9, 0.5, 0.1, 100, "pld", marks=pytest.mark.slow),
        (1e9, 1e-9, 0.1, 100, "rdp"),
        (1e-6, 0.5, 1.0, 1, "rdp"),
    ],
)
def test_calibration_at_the_ends_neither_overshoots_nor_wastes(
    target: float, delta: float, q: float, steps: int, accountant: str
) -> None:
    sigma = noise_multiplier(target, delta, q, steps, accountant=accountant)
    assert epsilon(sigma, q, steps, delta, accountant=accountant) <= target
    assert epsilon(sigma * 0.998, q, steps, delta, accountant=accountant) > target


def test_pld_is_tighter_than_rdp() -> None:
    assert epsilon(2.0, 0.1, 20, 1e-5) < epsilon(2.0, 0.1, 20, 1e-5, accountant="rdp")


def test_a_large_epsilon_is_calibrated_too() -> None:
    sigma = noise_multiplier(200.0, 1e-5, 0.1, 100, accountant="rdp")
    assert 199 < epsilon(sigma, 0.1, 100, 1e-5, accountant="rdp") <= 200


def test_one_full_batch_gaussian_step_has_the_closed_form() -> None:
    """Balle and Wang 2018: delta = Phi(1/2s - e s) - e^e Phi(-1/2s - e s) at q = 1."""
    from scipy.stats import norm

    sigma = 1.5
    spent = epsilon(sigma, 1.0, 1, 1e-5)
    a, b = 1 / (2 * sigma), spent * sigma
    delta = norm.cdf(a - b) - math.exp(spent) * norm.cdf(-a - b)
    assert delta == pytest.approx(1e-5, rel=0.01)


def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise() -> None:
    base = epsilon(2.0, 0.1, 20, 1e-5)
    assert epsilon(2.0, 0.1, 40, 1e-5) > base
    assert epsilon(2.0, 0.2, 20, 1e-5) > base
    assert epsilon(2.5, 0.1, 20, 1e-5) < base


def test_charges_compose() -> None:
    parts = [Charge(2.0, 0.1, 15), Charge(2.0, 0.1, 5)]
    assert total_epsilon(parts, 1e-5) == pytest.approx(epsilon(2.0, 0.1, 20, 1e-5), rel=1e-3)
    mixed = total_epsilon([Charge(2.0, 0.1, 20), Charge(3.0, 0.2, 10)], 1e-5)
    assert mixed > epsilon(2.0, 0.1, 20, 1e-5)


def test_nothing_spent_is_zero_and_no_noise_is_infinite() -> None:
    assert total_epsilon([], 1e-5) == 0
    assert epsilon(1.0, 0.1, 0, 1e-5) == 0
    assert epsilon(0.0, 0.1, 1, 1e-5) == math.inf
    assert total_epsilon([Charge(1.0, 0.1, 5), Charge(0.0, 0.1, 1)], 1e-5) == math.inf


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be zero or positive and finite"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be a number, got NaN"),
        ({"sampling_rate": 0.0}, "sampling_rate must be positive"),
        ({"sampling_rate": 1.1}, "sampling_rate must be at most 1, got 1.1"),
        ({"sampling_rate": math.nan}, "sampling_rate must be a number, got NaN"),
        ({"delta": 0.0}, "delta must lie strictly between 0 and 1"),
        ({"delta": math.nan}, "delta must be a number, got NaN"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"accountant": "prv"}, "accountant 'prv' is unknown"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, object], words: str) -> None:
    right = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 5, "delta": 1e-5}
    with pytest.raises(ValueError, match=words):
        epsilon(**{**right, **changes})


def test_calibration_names_wrong_values_too() -> None:
    with pytest.raises(ValueError, match="accountant 'prv' is unknown"):
        noise_multiplier(1.0, 1e-5, 0.1, 10, accountant="prv")
    with pytest.raises(ValueError, match="accountant 'prv' is unknown"):
        max_steps(1.0, 1e-5, 1.0, 0.1, accountant="prv")
    with pytest.raises(ValueError, match="epsilon must be positive and finite, got -1"):
        noise_multiplier(-1, 1e-5, 0.1, 10)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        noise_multiplier(1.0, 1e-5, 0.1, 0)


def test_the_accountant_is_named_with_its_version() -> None:
    assert accounting.accountant_version("pld").startswith("dp-accounting ")
    assert accounting.accountant_version("rdp").endswith(", RDP")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("target", "before", "q"),
    [(6.0, 6.0, 1.0), pytest.param(14.0, 1.2, 0.3, marks=pytest.mark.slow)],
)
def test_sigma_leaves_room_for_what_was_spent(
    accountant: str, target: float, before: float, q: float
) -> None:
    spent = [Charge(before, q, 10)]
    sigma = noise_multiplier(target, 1e-5, q, 30, accountant=accountant, spent=spent)
    both = total_epsilon([*spent, Charge(sigma, q, 30)], 1e-5, accountant=accountant)
    less = total_epsilon([*spent, Charge(0.999 * sigma, q, 30)], 1e-5, accountant=accountant)
    assert both <= target < less


@pytest.mark.parametrize(
    "spent", [Charge(1.0, 1.0, 1), pytest.param(Charge(1.0, 0.05, 200), marks=pytest.mark.slow)]
)
def test_a_spent_budget_is_refused(spent: Charge) -> None:
    with pytest.raises(ValueError, match=r"earlier steps have spent epsilon .* nothing of 0.5"):
        noise_multiplier(0.5, 1e-5, 0.05, 200, spent=[spent])


@pytest.mark.parametrize(
    ("charge", "words"),
    [
        (Charge(1e300, 0.1, 10), "noise_multiplier must be 0 or between"),
        (Charge(1e-300, 0.1, 10), "noise_multiplier must be 0 or between"),
        (Charge(10**400, 0.1, 10), "noise_multiplier must be at most"),
        (Charge(1.0, 0.1, 10**300), "steps must be at most 1,000,000,000, got 1e300"),
        (Charge(1.0, 0.1, 10**5000), "steps must be at most 1,000,000,000, got 1e5000"),
        (Charge(1.0, 0.1, 1e300), "steps must be a whole number"),  # type: ignore[arg-type]
        (Charge(1.0, 0.1, 2.5), "steps must be a whole number"),  # type: ignore[arg-type]
        (Charge(1.0, 0.1, -1), "steps must be at least 0"),
        (Charge(1.0, math.inf, 1), "sampling_rate must be positive and finite"),
    ],
)
@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_extreme_charges_are_refused_in_a_sentence(
    charge: Charge, words: str, accountant: str
) -> None:
    """Before, the first three ended in a traceback and the next two in a hang."""
    with pytest.raises((ValueError, TypeError), match=words):
        accounting.total_epsilon([charge], 1e-5, accountant=accountant)


@pytest.mark.parametrize(
    "charge", [Charge(0.01, 0.1, 10), Charge(1.0, 0.1, 10**9), Charge(1e-6, 0.1, 1)]
)
def test_where_a_pld_would_take_hours_the_renyi_bound_is_given(
    charge: Charge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a PLD of this size does not end")

    monkeypatch.setattr(accounting, "_compose", never)
    assert accounting.total_epsilon([charge], 1e-5) == accounting.total_epsilon(
        [charge], 1e-5, accountant="rdp"
    )
    with pytest.raises(AssertionError, match="does not end"):  # an ordinary run has its PLD
        accounting.total_epsilon([Charge(1.03, 0.0777, 123)], 1e-5)
