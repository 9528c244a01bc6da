"""Secure noise: the exact distribution, the grid, the generator; and what floats get wrong.

Checks at level RARE fail by chance with probability 1e-10, 64 bits one by one with 64 times that.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom, chisquare, norm
from torch import nn

from checks import RARE, check_gaussian, check_poisson, check_uncorrelated
from dpbam import DPSGD
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness, SecureRandomness
from dpbam.privacy.secure_noise import SecureGaussianNoise, exactly_rounded, grid, rounded_gaussian
from support import cross_entropy, private_plan, sized_oracle

BITS = SecureRandomness()


@dataclass
class Fixed:
    """Stands in for the generator: every further bit is the same."""

    byte: bytes = b"\x00"

    def raw(self, count: int) -> bytes:
        return self.byte * count


def tail(edge: float, deviation: float) -> mpmath.mpf:
    """P[N(0, deviation^2) > edge], 60 digits."""
    with mpmath.workdps(60):
        return mpmath.erfc(mpmath.mpf(edge) / deviation / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.7, 40.0])
def test_every_integer_has_exactly_its_share_of_words(deviation: float) -> None:
    """|Z| >= j for exactly the words with U below Q(j - 1/2): try the two words at each edge."""
    for j in range(1, int(7 * deviation) + 2):
        with mpmath.workdps(60):
            share = tail(j - 0.5, deviation) * 2**64
            edge = int(mpmath.floor(share))  # words k < edge are >= j, k > edge are < j
        words = np.array([edge - 1, edge + 1], dtype=np.uint64) << np.uint64(1)
        found = rounded_gaussian(deviation, words, BITS)
        assert found[0] >= j > found[1]
        # the word at the edge is split by its further bits, in the right proportion
        split = [
            rounded_gaussian(deviation, words[:1] + np.uint64(2), Fixed(byte))[0]
            for byte in (b"\x00", b"\xff")
        ]
        assert split == [j, j - 1]


def test_a_naive_rounding_gives_some_integer_the_wrong_share() -> None:
    """The negative control: doubles alone put words on the wrong side of an edge."""
    deviation, wrong = 2.0**45, 0  # a grid so fine that it happens often
    ks = np.random.default_rng(0).integers(0, 2**63, 3000, dtype=np.uint64)
    x = -ndtri((ks.astype(np.float64) + 0.5) * 2.0**-64)
    close = np.flatnonzero(np.abs(deviation * x % 1 - 0.5) < 0.02)
    for k, guess in zip(ks[close], x[close], strict=True):
        right = exactly_rounded((int(k) << 128) | 2**127, 192, float(guess), deviation)
        wrong += right != int(np.floor(deviation * guess + 0.5))
    assert wrong


@given(st.integers(0, 2**63 - 1), st.sampled_from([0.5, 3.0, 2.0**20, 2.0**33]))
def test_a_draw_is_the_exactly_rounded_one(k: int, deviation: float) -> None:
    drawn = rounded_gaussian(deviation, np.array([k << 1], dtype=np.uint64), Fixed(b"\x80"))
    x = float(-ndtri((k + 0.5) * 2.0**-64))
    exact = exactly_rounded((k << 128) | int.from_bytes(b"\x80" * 16, "big"), 192, x, deviation)
    assert drawn[0] == exact


@given(
    st.integers(0, 2**63 - 1), st.booleans(), st.sampled_from([3.0, 2.0**20]), st.floats(-0.5, 0.5)
)
def test_a_draw_around_a_remainder_is_exactly_rounded(
    k: int, negative: bool, deviation: float, rest: float
) -> None:
    """Against Phi^-1 itself, by 70 digits."""
    words = np.array([k << 1 | negative], dtype=np.uint64)
    drawn = rounded_gaussian(deviation, words, Fixed(b"\x80"), np.array([rest]))
    with mpmath.workdps(70):
        u = (mpmath.mpf((k << 128) | int.from_bytes(b"\x80" * 16, "big")) + 0.5) / 2**192
        size = deviation * mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * u)
        ideal = mpmath.nint(rest - size if negative else rest + size)
    assert drawn[0] == int(ideal)


@pytest.mark.parametrize("rest", [-0.5, 0.3])
def test_counts_around_a_remainder_follow_the_exact_distribution(rest: float) -> None:
    """False alarms: RARE. Rounding the sum first, a remainder of 0, is seen."""
    z = rounded_gaussian(1.7, BITS.words(60_000), BITS, np.full(60_000, rest))
    values = np.arange(-5, 6)
    edges = [norm.cdf((values + half - rest) / 1.7) for half in (0.5, -0.5)]
    counts = np.array([(z == v).sum() for v in values])
    observed = np.append(counts, len(z) - counts.sum())
    expected = len(z) * np.append(edges[0] - edges[1], 1 - (edges[0] - edges[1]).sum())
    assert chisquare(observed, expected).pvalue > RARE
    rounded = rounded_gaussian(1.7, BITS.words(60_000), BITS)
    counts = np.array([(rounded == v).sum() for v in values])
    assert chisquare(np.append(counts, len(z) - counts.sum()), expected).pvalue < RARE


def test_words_of_zero_are_refined_far_into_the_tail() -> None:
    """U below 2^-64: nine deviations out and more, where 64 bits do not say how far."""
    near, far = (
        rounded_gaussian(10.0, np.zeros(1, np.uint64), Fixed(b))[0] for b in (b"\xff", b"\x00")
    )
    assert 90 < near < 95 < 150 < far


def test_ndtri_is_as_exact_as_assumed() -> None:
    rng = np.random.default_rng(1)
    u = np.concatenate([rng.random(1500) / 2, 10.0 ** -rng.uniform(0.4, 4.3, 500)])
    for value, found in zip(u, ndtri(u), strict=True):
        with mpmath.workdps(40):
            back = mpmath.erfc(-mpmath.mpf(float(found)) / mpmath.sqrt(2)) / 2
            error = abs((back - mpmath.mpf(float(value))) / mpmath.npdf(float(found)))
        assert error < 2.0**-47 * (abs(found) + 1) / 4  # with room to spare


@pytest.mark.parametrize("deviation", [0.4, 1.7, 6.0])
def test_counts_follow_the_exact_distribution(deviation: float) -> None:
    """False alarms: 2e-8 at 0.4, whose last cell has 11 draws; 2e-10 at the others."""
    z = rounded_gaussian(deviation, BITS.words(60_000), BITS)
    values = np.arange(-int(3 * deviation), int(3 * deviation) + 1)
    shares = norm.cdf((values + 0.5) / deviation) - norm.cdf((values - 0.5) / deviation)
    counts = np.array([(z == v).sum() for v in values])
    observed = np.append(counts, len(z) - counts.sum())
    expected = len(z) * np.append(shares, 1 - shares.sum())
    assert chisquare(observed, expected).pvalue > RARE
    assert chisquare(np.roll(observed, 1), expected).pvalue < RARE  # off by one is seen


def test_noise_is_gaussian_of_the_right_scale_on_every_parameter() -> None:
    sums = {"a": torch.zeros(100, 60), "b": torch.zeros(3000)}
    out = SecureGaussianNoise(BITS).add(sums, 1.5, 0)
    for part in out.values():
        check_gaussian(part.flatten().numpy(), 1.5, RARE)
        with pytest.raises(AssertionError):
            check_gaussian(part.flatten().numpy(), 1.5 * 1.5, RARE)
    check_uncorrelated(out["a"].flatten()[:3000], out["b"], RARE)


def test_what_is_released_is_on_the_grid_whatever_the_sum() -> None:
    """Mironov's attack looks at the last bits. Here they do not depend on the sum."""
    spacing = grid(1.0)
    for noise, on_grid in ((SecureGaussianNoise(BITS), True), (GaussianNoise(Randomness()), False)):
        out = noise.add({"w": torch.full((1000,), 1 / 3, dtype=torch.float64)}, 1.0, 0)["w"]
        assert bool((out / spacing % 1 == 0).all()) is on_grid


@given(st.floats(1e-6, 1e6))
def test_grid_is_a_power_of_two_with_a_million_cells_per_deviation(std: float) -> None:
    spacing = grid(std)
    assert np.frexp(spacing)[0] == 0.5
    assert 2.0**20 <= std / spacing < 2.0**21


def test_two_calls_never_share_noise() -> None:
    noise, zero = SecureGaussianNoise(BITS), {"w": torch.zeros(500)}
    check_uncorrelated(noise.add(zero, 1.0, 0)["w"], noise.add(zero, 1.0, 0)["w"], RARE)


def test_bits_are_even() -> None:
    words = BITS.words(20_000)
    for shift in range(64):
        ones = int(((words >> np.uint64(shift)) & np.uint64(1)).sum())
        assert 2 * min(binom.cdf(ones, 20_000, 0.5), binom.sf(ones - 1, 20_000, 0.5)) > RARE


def test_secure_batches_are_poisson() -> None:
    plan = private_plan(n=200, batch_size=40, steps=300)
    sampler = plan.sampler(secure=True)
    check_poisson([sampler.indices(t) for t in range(300)], 200, 0.2, RARE)


def test_a_secure_oracle_draws_secure_noise() -> None:
    model = nn.Linear(50, 20, bias=False)
    plan = private_plan(noise_multiplier=2.0, clip_norm=0.5)
    oracle = sized_oracle(model, cross_entropy, plan, DPSGD(), engine="functional", noise="secure")
    assert oracle.secure
    oracle.backward(torch.zeros(5, 50), torch.zeros(5, dtype=torch.long))
    check_gaussian(model.weight.grad.flatten() * 10, 1.0, RARE)


def test_what_cannot_be_secure_is_refused() -> None:
    plan = private_plan()
    with pytest.raises(ValueError, match="cannot have a seed"):
        sized_oracle(nn.Linear(2, 2), cross_entropy, plan, seed=1, noise="secure")
    with pytest.raises(ValueError, match="cannot have a seed"):
        plan.sampler(seed=1, secure=True)
    with pytest.raises(ValueError, match="did you mean 'secure'"):
        sized_oracle(nn.Linear(2, 2), cross_entropy, plan, noise="secur")
    with pytest.raises(ValueError, match="not finite"):
        SecureGaussianNoise(BITS).add({"w": torch.tensor([float("nan")])}, 1.0, 0)


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ValueError, match=r"dpbam\[secure\]"):
        SecureRandomness()
