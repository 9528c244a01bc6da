"""The rule of the verdicts, case by case."""

from __future__ import annotations

import math

import pytest

from dpbam.estimates import Estimate, estimate
from reproduce.claims import Claim, count_verdicts


def found(low, high):
    return Estimate((low + high) / 2, 1.0, low, high, 5)


@pytest.mark.parametrize(
    ("kind", "low", "high", "verdict"),
    [
        ("above", 0.1, 0.3, "reproduced"),
        ("above", -0.1, 0.3, "inconclusive"),
        ("above", -0.3, -0.1, "not reproduced"),
        ("below", -0.3, -0.1, "reproduced"),
        ("below", -0.3, 0.1, "inconclusive"),
        ("below", 0.1, 0.3, "not reproduced"),
        ("same", -0.4, 0.4, "reproduced"),
        ("same", 0.1, 0.4, "reproduced"),
        ("same", -0.4, 0.6, "inconclusive"),
        ("same", 0.6, 0.9, "not reproduced"),
        ("same", -0.9, -0.6, "not reproduced"),
        ("different", 0.1, 0.3, "reproduced"),
        ("different", -0.3, -0.1, "reproduced"),
        ("different", -0.1, 0.3, "inconclusive"),
    ],
)
def test_the_rule(kind, low, high, verdict):
    assert Claim("", kind, found(low, high), margin=0.5).verdict == verdict


def test_one_seed_decides_nothing():
    claim = Claim("", "above", estimate([0.5]))
    assert claim.verdict == "inconclusive"
    assert claim.sentence() == "1 of the seeds: no interval"


def test_a_baseline_at_its_floor_decides_nothing():
    claim = Claim("", "above", found(0.1, 0.3), floor_missed=True)
    assert claim.verdict == "inconclusive"
    assert "floor" in claim.sentence()


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.001, 0.010, "reproduced"),  # 0.45 points to either side
        (0.001, 0.012, "inconclusive"),  # 0.55 points
        (-0.012, -0.001, "inconclusive"),
    ],
)
def test_an_interval_wider_than_the_resolution_decides_nothing(low, high, verdict):
    claim = Claim("", "above", found(low, high), "points", resolution=0.005)
    assert claim.verdict == verdict
    too_wide = "wider than ±0.50: needs more seeds" in claim.sentence()
    assert too_wide == (verdict == "inconclusive")
    assert Claim("", "above", found(low, high), "points").verdict != "inconclusive"


def test_inconclusive_says_what_could_have_been_seen():
    claim = Claim("", "above", estimate([0.01, -0.01, 0.02]), "points")
    seen = 100 * claim.difference.smallest_detectable
    assert claim.verdict == "inconclusive"
    assert math.isfinite(seen)
    assert f"visible from {seen:.2f} on" in claim.sentence()
    assert "visible" not in Claim("", "above", found(0.1, 0.3)).sentence()


def test_verdicts_are_counted():
    claims = {"a": [Claim("", "above", found(1, 2))], "b": [Claim("", "above", found(-1, 2))] * 2}
    assert count_verdicts(claims) == {"reproduced": 1, "not reproduced": 0, "inconclusive": 2}
