"""Factors from norms: bounded sensitivity whatever the direction."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpbam.catalogue import CLIPPINGS
from dpbam.contenders.clippings import PSACClipping
from dpbam.privacy.clipping import (
    MOST_SUMMED,
    AutomaticClipping,
    FlatClipping,
    PerLayerClipping,
    portions,
    unclipped,
)

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
    for whole in (factors[:, :MOST_SUMMED], factors.double()):
        ((part, span),) = portions(whole)
        assert part is whole
        assert span == slice(0, whole.shape[1])
