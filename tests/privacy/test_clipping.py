"""Clippings, fixed and adaptive: factors, sensitivity, and what adapts to what was released."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpbam import PrivacyPlan
from dpbam.catalogue import CLIPPINGS
from dpbam.contenders.clippings import (
    NormalisedClipping,
    PSACClipping,
    QuantileClipping,
    SlackClipping,
)
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.privacy.clipping import (
    MOST_SUMMED,
    AutomaticClipping,
    Clipping,
    FlatClipping,
    PerLayerClipping,
    check_factors,
    measure,
    portions,
    unclipped,
)
from support import cross_entropy, private_plan, quiet_plan, samples, sized_oracle, smooth_net

anything = st.floats(width=32, allow_nan=True, allow_infinity=True)
norms_of = arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=anything)


@pytest.mark.parametrize("kind", CLIPPINGS)
@given(norms=norms_of, clip_norm=st.floats(1e-3, 1e3))
def test_no_unit_exceeds_the_sensitivity(kind: str, norms, clip_norm: float) -> None:
    """sqrt(sum_g (factor norm)^2) <= C, and a unit that is not finite has no part at all."""
    clipping, given_norms = CLIPPINGS.load(kind)(clip_norm), torch.tensor(abs(norms))
    if kind != "per-layer":
        given_norms = given_norms[:1]
    factors = clipping.factors(given_norms)
    finite = given_norms.isfinite().all(0)
    assert bool((factors[:, ~finite] == 0).all())
    assert bool(factors.isfinite().all())
    lengths = (factors * given_norms)[:, finite].double().norm(dim=0)
    assert bool((lengths <= clipping.sensitivity * (1 + 1e-6)).all())


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.1, 5))
def test_flat_is_one_over_the_larger_of_one_and_norm_over_c(norms: list[float], c: float) -> None:
    expected = [1 / max(1.0, norm / c) for norm in norms]
    found = FlatClipping(c).factors(torch.tensor([norms], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx(expected)


def test_a_small_gradient_is_left_alone_and_zero_does_not_divide() -> None:
    assert FlatClipping(1.0).factors(torch.tensor([[0.0, 1e-30, 1.0]])).tolist() == [[1, 1, 1]]
    assert AutomaticClipping(1.0).factors(torch.zeros(1, 1)).tolist() == [[pytest.approx(100)]]


def test_automatic_clipping_normalises() -> None:
    factors = AutomaticClipping(2.0, gamma=0.1).factors(torch.tensor([[0.9, 9.9]]))
    assert factors[0].tolist() == pytest.approx([2.0, 0.2])


def test_a_bad_layer_removes_the_unit_from_all_layers() -> None:
    norms = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [0.1, 0.1]])
    assert PerLayerClipping(10.0).factors(norms).tolist() == [[0, 1], [0, 1], [0, 1]]


def test_groups_of_parameters() -> None:
    names = ["a.weight", "a.bias", "b.c.weight", "scale"]
    assert list(PerLayerClipping(1.0).groups(names).values()) == [0, 0, 1, 2]
    assert set(FlatClipping(1.0).groups(names).values()) == {0}


def test_infinity_clips_nothing_but_the_non_finite() -> None:
    norms = torch.tensor([[1e18, math.inf, math.nan]])
    assert FlatClipping(math.inf).factors(norms).tolist() == [[1, 0, 0]]
    assert unclipped(norms).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("kind", CLIPPINGS)
@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, -math.inf])
def test_a_wrong_clip_norm_is_refused(kind: str, clip_norm: float) -> None:
    with pytest.raises(ValueError, match="clip_norm must be"):
        CLIPPINGS.load(kind)(clip_norm)


@pytest.mark.parametrize("kind", CLIPPINGS)
def test_a_clip_norm_that_float32_cannot_hold_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"at least 1e-10.*vanish in float32"):
        CLIPPINGS.load(kind)(1e-20)


def test_the_least_r_of_psac_keeps_the_bound_in_float32() -> None:
    with pytest.raises(ValueError, match=r"r must be at least 1e-12.*vanishes in float32"):
        PSACClipping(1.0, r=1e-44)
    norms = torch.logspace(-37, 9, 1000)[None]
    assert float((norms.double() * PSACClipping(1.0, r=1e-12).factors(norms)).max()) <= 1 + 1e-6


def test_gamma_is_positive() -> None:
    with pytest.raises(ValueError, match="gamma must be positive"):
        AutomaticClipping(1.0, gamma=0.0)


@pytest.mark.parametrize(
    ("clip_norm", "gamma"), [(1.0, 1e-8), (1.0, 1e-50), (1e-3, 1e-7), (1e5, 0.01)]
)
def test_a_gamma_that_rounds_away_is_refused(clip_norm: float, gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma must be at least .* rounds away"):
        AutomaticClipping(clip_norm, gamma)


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e4])
def test_the_least_gamma_does_not_round_away(clip_norm: float) -> None:
    """Below C at norm C, finite at norm 0, and a unit that is not finite has factor 0."""
    clipping = AutomaticClipping(clip_norm, gamma=1e-6 * max(1.0, clip_norm))
    norms = torch.tensor([[clip_norm, 0.0, math.nan, 1e-18]])
    factors = clipping.factors(norms)
    assert bool(factors.isfinite().all())
    assert float(factors[0, 0]) * clip_norm < clip_norm
    assert float(factors[0, 2]) == 0
    assert float(factors[0, 3]) * 1e-18 < clip_norm * 1e-10


def test_portions_have_each_factor_once() -> None:
    factors = torch.rand(2, 2 * MOST_SUMMED + 5)
    parts, spans = zip(*portions(factors), strict=True)
    assert [int((part != 0).any(0).sum()) for part in parts] == [MOST_SUMMED, MOST_SUMMED, 5]
    assert torch.equal(torch.stack(parts).sum(0), factors)
    for part, span in zip(parts, spans, strict=True):
        assert bool((part[:, span] != 0).all())
    assert len(list(portions(factors.double()))) == 3  # an engine may add them in float32
    for whole in (factors[:, :MOST_SUMMED], factors[:, :5].double()):
        ((part, span),) = portions(whole)
        assert part is whole
        assert span == slice(0, whole.shape[1])


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
    check_factors(clipping, bound, [measure(clipping, lengths, factors, extra).tolist()])
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


def test_a_factor_for_a_norm_that_has_vanished_in_float32_is_refused() -> None:
    """The gradient has norm 1.4e-24, its float32 norm is 0, and the factor would make it 1e14."""

    class Normalised(Clipping):
        sensitivity = 1.0

        def scales(self, norms: torch.Tensor) -> torch.Tensor:
            return 1 / norms.clamp(min=torch.finfo(norms.dtype).tiny)

    model = torch.nn.Linear(2, 1, bias=False)
    oracle = sized_oracle(
        model, lambda output, scale: output[:, 0] * scale, quiet_plan(1.0), clipping=Normalised()
    )
    with pytest.raises(PlanViolationError, match="Normalised lets a unit through"):
        oracle.backward(torch.ones(3, 2), torch.tensor([1e-24, 1.0, 1.0]))
    assert oracle.step == 0


def test_a_clipping_that_can_be_called_keeps_nothing_either() -> None:
    class Callable(Clipping):
        sensitivity = 1.0
        largest = 0.0

        def __call__(self) -> None:
            """Make it callable."""

        def scales(self, norms: torch.Tensor) -> torch.Tensor:
            self.largest = float(norms.max()) if norms.numel() else 0.0
            return 1 / norms.clamp(min=1.0)

    oracle = sized_oracle(smooth_net(), cross_entropy, quiet_plan(1.0), clipping=Callable())
    with pytest.raises(PlanViolationError, match="in an attribute"):
        oracle.backward(*samples(3))


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
