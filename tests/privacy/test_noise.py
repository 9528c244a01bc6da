"""The noise: N(0, std^2) on every coordinate, independent, from a generator of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from checks import check_gaussian, check_uncorrelated
from dpbam.privacy.noise import GaussianNoise
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
