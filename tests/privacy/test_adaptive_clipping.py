"""Clippings against their formulas in numpy, and the norm of all that a unit releases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbam import PrivacyPlan
from dpbam.catalogue import CLIPPINGS
from dpbam.contenders.clippings import (
    NormalisedClipping,
    PSACClipping,
    QuantileClipping,
    SlackClipping,
)
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.privacy.clipping import Clipping, check_factors, measure
from support import cross_entropy, private_plan, quiet_plan, samples, sized_oracle, smooth_net

NORMS = torch.tensor([[0.0, 1e-12, 0.05, 0.3, 0.7, 1.0, 4.0, 1e6]])


@pytest.mark.parametrize("name", CLIPPINGS)
@settings(max_examples=60)
@given(
    norms=st.lists(st.floats(0, 2.0**59, width=32), min_size=1, max_size=6), c=st.floats(1e-3, 1e3)
)
def test_direction_and_extra_coordinates_together_stay_within_the_sensitivity(
    name: str, norms: list[float], c: float
) -> None:
    clipping = CLIPPINGS.load(name)(c)
    lengths = torch.tensor([norms])
    factors = clipping.factors(lengths)
    extra = clipping.extra(lengths, factors)
    bound = clipping.sensitivity
    check_factors(clipping, bound, [measure(clipping, lengths, factors, extra)])
    assert clipping.sensitivity == pytest.approx(c)


def test_normalised_scales_to_c_and_drops_what_has_no_direction() -> None:
    kept = NORMS * NormalisedClipping(0.5).factors(NORMS)
    torch.testing.assert_close(kept, torch.tensor([[0.0, 0.0] + [0.5] * 6]))


def test_psac_is_the_papers_weight() -> None:
    n = NORMS.double().numpy()
    expected = 0.5 / (n + 0.1 / (n + 0.1))
    np.testing.assert_allclose(PSACClipping(0.5).factors(NORMS).numpy(), expected, rtol=1e-6)


def andrew(norms: np.ndarray, c: float, quantile: float, rate: float) -> float:
    """One noise-free step of Andrew et al. 2021, Algorithm 1."""
    return float(c * np.exp(-rate * ((norms <= c).mean() - quantile)))


def test_quantile_follows_andrew_et_al_and_finds_the_quantile() -> None:
    norms = np.random.default_rng(0).lognormal(0, 1, 500)
    clipping, lengths = QuantileClipping(20.0, quantile=0.7), torch.tensor(norms)[None]
    for _ in range(150):
        expected = andrew(norms, clipping.bound, 0.7, 0.2)
        clipping.update(clipping.extra(lengths, clipping.factors(lengths)).mean(1))
        assert clipping.bound == pytest.approx(expected)
    assert (norms <= clipping.bound).mean() == pytest.approx(0.7, abs=0.01)


def test_quantile_is_charged_as_andrew_et_al_charge_it() -> None:
    """sigma^-2 = z^-2 + (2 sigma_b)^-2, z and sigma_b as the oracle adds the noise."""
    sigma, clipping = 1.7, QuantileClipping(1.0, share=0.3)
    std = sigma * clipping.sensitivity
    z, sigma_b = std / clipping.bound, std / (2 * clipping.share * clipping.bound)
    assert (z**-2 + (2 * sigma_b) ** -2) ** -0.5 == pytest.approx(sigma)


def slack_vector(norm: float, c: float, slots: int) -> np.ndarray:
    """The slack of one unit as the authors of SlaClip encode it: full slots, then the rest."""
    width = c / math.sqrt(slots)
    left = max(c - norm, 0.0) * math.sqrt(slots)
    found = np.zeros(slots)
    for k in range(slots):
        found[k] = min(left, width)
        left -= found[k]
    return found


@pytest.mark.parametrize("bins", [1, 4, 7])
def test_slack_is_encoded_as_by_its_authors_and_rounded_down(bins: int) -> None:
    clipping = SlackClipping(2.0, bins=bins)
    found = clipping.extra(NORMS, clipping.factors(NORMS)).numpy()
    for i, norm in enumerate(NORMS[0].tolist()):
        expected = slack_vector(norm, 2.0, bins)
        assert (found[:, i] <= expected + 1e-6).all()
        np.testing.assert_allclose(found[:, i], expected, atol=2.0 / math.sqrt(bins) * 2**-11)


def test_slack_moves_c_as_its_authors_do_until_half_the_units_are_clipped() -> None:
    norms = np.random.default_rng(1).lognormal(0, 0.5, 2000)
    clipping, lengths = SlackClipping(30.0, bins=32), torch.tensor(norms)[None]
    for _ in range(200):
        c, width = clipping.bound, clipping.bound / math.sqrt(32)
        indicator = np.mean([slack_vector(x, c, 32) for x in norms[:50]], axis=0) / width
        clipping.update(clipping.extra(lengths[:, :50], clipping.factors(lengths[:, :50])).mean(1))
        wanted = 1 - (1 - min(indicator[-1] / c, 1.0)) / 2
        assert clipping.bound == pytest.approx(
            c * math.exp(0.5 * (wanted - indicator[0])), rel=1e-3
        )
    assert (norms[:50] <= clipping.bound * (1 - 1 / 64)).mean() == pytest.approx(0.5, abs=0.05)


def test_the_released_slacks_are_the_distribution_of_norms_below_c() -> None:
    norms = np.random.default_rng(2).uniform(0, 2, 4000)
    clipping, lengths = SlackClipping(1.0, bins=4), torch.tensor(norms)[None]
    clipping.update(clipping.extra(lengths, clipping.factors(lengths)).mean(1))
    assert clipping.below is not None
    middles = 1 - (np.arange(4) + 0.5) / 4  # of the bins; the distribution is linear
    np.testing.assert_allclose(clipping.below, [(norms <= m).mean() for m in middles], atol=0.01)


@pytest.mark.parametrize("name", ["quantile", "slaclip"])
def test_the_norm_adapts_in_training_and_resumes(name: str) -> None:
    model, plan = smooth_net(), private_plan(clipping=name)
    oracle = sized_oracle(model, cross_entropy, plan, seed=0)
    for _ in range(3):
        oracle.backward(*samples(10))
    other = sized_oracle(model, cross_entropy, plan, seed=0, ledger=oracle.ledger)
    other.load_state_dict(oracle.state_dict())
    assert oracle.clipping.sensitivity == other.clipping.sensitivity != 1.0
    assert 0.1 / 2.2 <= oracle.noise_std <= 0.1 * 2.2  # three steps of exp(rate / 2) at most


def test_extra_coordinates_beyond_the_sensitivity_are_refused() -> None:
    class Greedy(Clipping):
        coordinates = 1
        sensitivity = 1.0

        def scales(self, norms: torch.Tensor) -> torch.Tensor:
            return 1 / norms.clamp(min=1.0)

        def extra(self, norms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            return torch.ones(1, norms.shape[1])

    oracle = sized_oracle(smooth_net(), cross_entropy, quiet_plan(1.0), clipping=Greedy())
    with pytest.raises(PlanViolationError, match="Greedy lets a unit through"):
        oracle.backward(*samples(3))
    assert oracle.step == 0


def test_schedules_have_phases_of_equal_length() -> None:
    plan = private_plan(steps=30, noise_schedule=(1.5, 1.0, 0.75), clip_schedule=(2.0, 1.0))
    assert [plan.noise_multiplier_at(t) for t in (0, 9, 10, 29)] == [1.5, 1.5, 1.0, 0.75]
    assert [plan.clip_factor_at(t) for t in (0, 14, 15, 29)] == [2, 2, 1, 1]
    charged = [(c.noise_multiplier, c.steps) for c in plan.charges(25, replays=2)]
    assert charged == [(0.75, 7), (1.0, 10), (1.5, 10)]
    with pytest.raises(ArgumentError, match="noise_schedule must have from 1 to 8 factors"):
        private_plan(noise_schedule=(1.0,) * 9)


@pytest.mark.slow
def test_calibration_composes_the_phases() -> None:
    plan = PrivacyPlan.calibrate(
        epsilon=2, delta=1e-4, n=1000, batch_size=100, steps=30, accountant="rdp",
        noise_schedule=(1.5, 1.0, 0.75),
    )  # fmt: skip
    assert 1.99 < plan.epsilon() <= 2
    assert plan.epsilon(30, replays=2) > plan.epsilon(30) > plan.epsilon(20)
