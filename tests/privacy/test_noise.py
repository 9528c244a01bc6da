"""The noise: N(0, std^2) on every coordinate, independent, from a generator of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from checks import LEVEL, check_gaussian, check_normal, check_uncorrelated
from dpbam.privacy import noise as noise_module
from dpbam.privacy.noise import BLOCK, CHUNKS, GaussianNoise, standard_normals
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


def one_counter(self: Randomness, name: str, step: int, block: int) -> np.random.SFC64:
    return GENERATOR(self, name, step, 0)


def two_by_two(self: Randomness, name: str, step: int, block: int) -> np.random.SFC64:
    return GENERATOR(self, name, step, block // 2)


def overlapping(self: Randomness, name: str, step: int, block: int) -> np.random.SFC64:
    """One stream, entered a few draws apart."""
    generator = GENERATOR(self, name, step, 0)
    generator.random_raw(block)
    return generator


GENERATOR = Randomness.noise_generator


@pytest.mark.parametrize("mistake", [one_counter, two_by_two])
def test_blocks_that_repeat_are_noticed(mistake: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Randomness, "noise_generator", mistake)
    with pytest.raises(AssertionError, match="correlated"):
        check_blocks()


def check_no_draw_twice() -> None:
    """Of 524,388 doubles no two are equal, but for 2^-50 of the pairs."""
    noise = long_draw()
    assert len(np.unique(noise)) > len(noise) - 10


def test_blocks_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    check_no_draw_twice()
    monkeypatch.setattr(Randomness, "noise_generator", overlapping)
    with pytest.raises(AssertionError):
        check_no_draw_twice()


@pytest.mark.parametrize(
    "start", [1, CHUNKS[0] - 1, CHUNKS[0], BLOCK - 1, BLOCK, 2 * BLOCK + 7, 4 * BLOCK + 99]
)
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


# --- the draws of a chunk: Box and Muller's, and a fine uniform term


class Words:
    """Bits that are given, then random ones."""

    def __init__(self, words: np.ndarray, more: object) -> None:
        self._words, self._more = [words], more

    def random_raw(self, count: int) -> np.ndarray:
        return self._words.pop() if self._words else self._more(count)


COUNT = 2**14
HALF = COUNT // 2


def words_of_a_chunk(seed: int) -> np.ndarray:
    return np.random.SFC64(seed).random_raw(COUNT).view(np.uint32)


def test_chunks_make_up_a_block() -> None:
    assert sum(CHUNKS) == BLOCK
    assert all(size % 2 == 0 for size in CHUNKS)


@pytest.mark.parametrize("shift", [0, 4, 8, 12, 15])
def test_draws_are_those_of_exact_arithmetic(shift: int) -> None:
    """Of the same bits, to float32's rounding; a shift makes u small, and r large."""
    words, b = words_of_a_chunk(shift), 2.0**-8
    words[:HALF] = np.maximum(words[:HALF] >> np.uint32(shift), 2**16)
    z = standard_normals(Words(words.copy().view(np.uint64), None), COUNT)
    r = np.sqrt(2 * np.log(2.0**32 / words[:HALF]))
    t, w = np.split(words[HALF:].view(np.int32).astype(float), [HALF])
    circle = np.concatenate([r * np.cos(math.pi * t / 2**31), r * np.sin(math.pi * t / 2**31)])
    exact = (circle + b * w * math.sqrt(12) / 2**32) / math.sqrt(1 + b * b)
    r = np.concatenate([r, r])
    assert float((np.abs(z - exact) / (1 + np.abs(exact) + 1 / r)).max()) < 2.0**-19
    assert float(np.abs(z - exact).max()) > 0  # float32's rounding


def check_the_tail(more: object) -> None:
    """Where 16 bits of u are 0, ln(1/u) - 16 ln 2 is exponential; false alarms: LEVEL."""
    words = words_of_a_chunk(1)
    words[:HALF] >>= 16
    words[COUNT:] = 0  # without the fine term, so that r can be read
    z = standard_normals(Words(words.view(np.uint64), more), COUNT)
    squares = np.square(z[:HALF]) + np.square(z[HALF:])
    exponential = squares * (1 + 2.0**-16) / 2 - 16 * math.log(2)
    assert kstest(exponential, "expon").pvalue > LEVEL, "the tail ends, or is of another shape"


def test_the_tail_does_not_end() -> None:
    bits = np.random.SFC64(2)
    check_the_tail(bits.random_raw)
    for few in (0, 2, 4):  # bits, and then a one

        def coarse(count: int, few: int = few) -> np.ndarray:
            kept = bits.random_raw(count) & np.uint64(2**64 - 2 ** (64 - few))
            return kept | np.uint64(2 ** (63 - few))

        with pytest.raises(AssertionError, match="the tail"):
            check_the_tail(coarse)


def check_noise_has_no_gaps() -> None:
    """Some 1e-9 of float64 draws are float32 numbers; between two of those lie others."""
    noise = GaussianNoise(Randomness(0)).add({"w": torch.zeros(BLOCK).double()}, 1.0, 0)["w"]
    assert float((noise.float() == noise).double().mean()) < 1e-3


def test_noise_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    check_noise_has_no_gaps()
    monkeypatch.setattr(noise_module, "_FINE", 0.0)
    with pytest.raises(AssertionError):
        check_noise_has_no_gaps()
