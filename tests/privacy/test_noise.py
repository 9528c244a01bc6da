"""The noise: N(0, std^2) on every coordinate, independent, from a generator of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from checks import check_gaussian, check_normal, check_uncorrelated
from dpbam.privacy.noise import BLOCK, GaussianNoise
from dpbam.privacy.randomness import Randomness

ZEROS = {"a": torch.zeros(100, 100), "b": torch.zeros(10_000), "c": torch.zeros(7)}


def draw(seed: int | None = 0, std: float = 1.0, step: int = 0) -> dict[str, np.ndarray]:
    noise = GaussianNoise(Randomness(seed))
    return {n: t.flatten().numpy() for n, t in noise.add(ZEROS, std, step).items()}


@pytest.mark.parametrize("std", [1e-3, 1.0, 40.0])
def test_standard_deviation(std: float) -> None:
    draws = np.concatenate(list(draw(std=std).values()))
    check_gaussian(draws, std)
    for wrong in (2 / 3, 3 / 2):
        with pytest.raises(AssertionError, match="not N"):
            check_gaussian(draws, wrong * std)


def test_independent_across_parameters_and_steps() -> None:
    first, second = draw(step=0), draw(step=1)
    check_uncorrelated(first["a"], first["b"])
    check_uncorrelated(first["b"], second["b"])
    check_uncorrelated(first["b"][:-1], first["b"][1:])
    with pytest.raises(AssertionError, match="correlated"):
        check_uncorrelated(first["b"], draw(step=0)["b"])


def test_seeded_noise_repeats_and_unseeded_does_not() -> None:
    assert np.array_equal(draw(seed=3, step=5)["a"], draw(seed=3, step=5)["a"])
    one, two = draw(seed=None), draw(seed=None)
    assert (one["b"] == two["b"]).mean() < 0.01
    noise = GaussianNoise(Randomness(None))  # the same object at the same step, too
    again = [noise.add(ZEROS, 1.0, 0)["b"] for _ in range(2)]
    assert not torch.equal(*again)


def test_torchs_generator_is_neither_read_nor_advanced() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = draw(seed=None)["b"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert not np.array_equal(one, draw(seed=None)["b"])


def test_noise_is_added_in_the_dtype_of_the_sum() -> None:
    noise = GaussianNoise(Randomness(0))
    for dtype in (torch.float32, torch.float64):
        out = noise.add({"w": torch.full((5,), 1e6, dtype=dtype)}, 1.0, 0)["w"]
        assert out.dtype == dtype
        assert float((out - 1e6).abs().max()) < 6
    assert noise.add({"w": torch.zeros(5, dtype=torch.float16)}, 1.0, 0)["w"].dtype == torch.float32


def test_no_noise_changes_nothing() -> None:
    sums = {"w": torch.randn(5)}
    assert torch.equal(GaussianNoise(Randomness(0)).add(sums, 0.0, 0)["w"], sums["w"])


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_a_wrong_standard_deviation_is_refused(std: float) -> None:
    with pytest.raises(ValueError, match="std must be"):
        GaussianNoise(Randomness(0)).add(ZEROS, std, 0)


def test_complex_sums_are_refused() -> None:
    """Real noise would leave the imaginary part as it is."""
    with pytest.raises(ValueError, match="complex parameters"):
        GaussianNoise(Randomness(0)).add({"w": torch.zeros(2, dtype=torch.complex64)}, 1.0, 0)


# --- blocks: each has a generator of its own


def long_draw(start: int = 0, end: int = 4 * BLOCK + 100, seed: int | None = 0) -> np.ndarray:
    zeros = {"w": torch.zeros(end - start, dtype=torch.float64)}
    return GaussianNoise(Randomness(seed)).add(zeros, 2.0, 1, start=start)["w"].numpy()


def check_blocks(seed: int | None = 0) -> None:
    """Scale and tails of all, and no two blocks alike. False alarms 5 RARE; here seeded."""
    noise = long_draw(seed=seed)
    check_normal(noise, 2.0)
    blocks = [noise[k : k + BLOCK] for k in range(0, 4 * BLOCK, BLOCK)]
    for i, a in enumerate(blocks):
        for b in blocks[:i]:
            check_uncorrelated(a, b, 1e-10)
    check_uncorrelated(noise[:-1], noise[1:], 1e-10)


@pytest.mark.parametrize("seed", [0, None])
def test_blocks_are_independent_and_of_full_scale(seed: int | None) -> None:
    check_blocks(seed)


def one_counter(self: Randomness, name: str, step: int, block: int) -> np.random.Generator:
    return GENERATOR(self, name, step, 0)


def two_by_two(self: Randomness, name: str, step: int, block: int) -> np.random.Generator:
    return GENERATOR(self, name, step, block // 2)


def overlapping(self: Randomness, name: str, step: int, block: int) -> np.random.Generator:
    """One stream, entered a few draws apart."""
    generator = GENERATOR(self, name, step, 0)
    generator.bit_generator.random_raw(block)
    return generator


GENERATOR = Randomness.noise_generator


@pytest.mark.parametrize("mistake", [one_counter, two_by_two])
def test_blocks_that_repeat_are_noticed(mistake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Randomness, "noise_generator", mistake)
    with pytest.raises(AssertionError, match="correlated"):
        check_blocks()


def check_no_draw_twice() -> None:
    """Of 262,244 doubles no two are equal, but for 2^-50 of the pairs."""
    noise = long_draw()
    assert len(np.unique(noise)) > len(noise) - 10


def test_blocks_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_draw_twice()
    monkeypatch.setattr(Randomness, "noise_generator", overlapping)
    with pytest.raises(AssertionError):
        check_no_draw_twice()


@pytest.mark.parametrize("start", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 7, 4 * BLOCK + 99])
def test_a_coordinate_has_its_noise_in_every_slice(start: int) -> None:
    whole = long_draw()
    assert np.array_equal(long_draw(start), whole[start:])
    assert np.array_equal(long_draw(0, start), whole[:start])
    assert not np.array_equal(long_draw(0, len(whole) - start), whole[start:])  # by coordinate


def test_the_number_of_threads_does_not_change_the_noise() -> None:
    alone, threads = long_draw(), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert np.array_equal(long_draw(), alone)
    finally:
        torch.set_num_threads(threads)


def test_no_coordinates_are_no_noise() -> None:
    noise = GaussianNoise(Randomness(0))
    assert noise.add({}, 1.0, 0, start=5) == {}
    assert noise.add({"w": torch.zeros(3, 0)}, 1.0, 0)["w"].shape == (3, 0)
