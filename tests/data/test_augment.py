from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dpbam.data import ShiftFlip
from dpbam.privacy.randomness import Randomness, derive

SIZE = 12


def images(n: int, channels: int = 3, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (n, channels, size, size)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def keys(n: int, seed: int = 1) -> torch.Tensor:
    return Randomness(seed).keys("augment", 0, torch.arange(n))


def reference(image: np.ndarray, dy: int, dx: int, flip: str | None, padding: str) -> np.ndarray:
    """One image, the slow way: flip it, pad it, cut out the window at (dy, dx)."""
    if flip is not None:
        image = image[:, :, ::-1] if flip == "horizontal" else image[:, ::-1]
    mode = {"reflect": "reflect", "zero": "constant"}[padding]
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode=mode)
    return padded[:, 4 + dy : 4 + dy + SIZE, 4 + dx : 4 + dx + SIZE]


def shifts(augment: ShiftFlip, k: torch.Tensor) -> np.ndarray:
    """(dy, dx, flipped) of each key, read off the views of an image whose pixels are all different.

    The middle of the image never meets the padding, so what stands there says where it came from.
    """
    size = 2 * SIZE
    one = torch.arange(size * size).reshape(1, 1, size, size)
    views = augment(one.expand(len(k), 1, size, size), k)
    row = column = SIZE - 2
    here, beside, below = (views[:, 0, row + i, column + j] for i, j in ((0, 0), (0, 1), (1, 0)))
    flipped = ((beside - here) < 0) | ((below - here) < 0)
    y, x = here // size, here % size
    y = torch.where(below - here < 0, size - 1 - y, y)
    x = torch.where(beside - here < 0, size - 1 - x, x)
    return torch.stack([y - row, x - column, flipped.long()], 1).numpy()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("padding", ["reflect", "zero"])
@pytest.mark.parametrize("flip", ["horizontal", "vertical", None])
def test_every_view_is_a_window_of_the_padded_image(dtype, padding, flip):
    augment = ShiftFlip(shift=4, flip=flip, padding=padding)
    x, k = images(150).to(dtype), keys(150)
    got = augment(x, k)
    assert got.dtype == dtype
    drawn = shifts(augment, k)
    assert len(np.unique(drawn, axis=0)) > 40
    for n, (dy, dx, flipped) in enumerate(drawn):
        expected = reference(x[n].numpy(), dy, dx, flip if flipped else None, padding)
        assert np.array_equal(got[n].numpy(), expected), (n, dy, dx, flipped)


def test_the_images_are_left_alone():
    x = images(50)
    before = x.clone()
    ShiftFlip(padding="zero")(x, keys(50))
    assert torch.equal(x, before)


@given(n=st.integers(1, 30), pick=st.integers(0, 10**6), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_a_row_depends_on_its_key_alone(n, pick, seed):
    """Alone, among others, in another order: the same view, bit for bit."""
    x, k, augment = images(n, seed=seed), keys(n, seed), ShiftFlip()
    whole, row = augment(x, k), pick % n
    assert torch.equal(augment(x[row : row + 1], k[row : row + 1])[0], whole[row])
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(augment(x[order], k[order]), whole[order])
    others = images(n, seed=seed + 1)
    others[row] = x[row]
    other_keys = keys(n, seed + 1)
    other_keys[row] = k[row]
    assert torch.equal(augment(others, other_keys)[row], whole[row])


def test_views_of_one_sample_differ():
    x, k, augment = images(64), keys(64), ShiftFlip()
    one, two = augment(x, derive(k, 0)), augment(x, derive(k, 1))
    same = (one == two).flatten(1).all(1).float().mean()
    assert same < 0.3  # 0.13 is expected: 1/2 for the flip times 0.26 for the shift


DRAWS = 4000


def p_values(drawn: np.ndarray, p: float) -> dict[str, float]:
    """Of the shift's uniformity given that there is one, of its rate, and of the flip's rate."""
    moved = drawn[(drawn[:, 0] != 0) | (drawn[:, 1] != 0)]
    cells = (moved[:, 0] + 4) * 9 + moved[:, 1] + 4
    counts = np.delete(np.bincount(cells, minlength=81), 40)  # all but the cell (0, 0)
    n = len(drawn)
    rate = p * 80 / 81  # a shift drawn as (0, 0) is not seen
    flips = drawn[:, 2].sum()
    return {
        "uniform": chisquare(counts).pvalue,
        "shift rate": chisquare([len(moved), n - len(moved)], [n * rate, n * (1 - rate)]).pvalue,
        "flip rate": chisquare([flips, n - flips], [n * p, n * (1 - p)]).pvalue,
    }


@pytest.mark.parametrize("p", [0.5, 0.2])
@pytest.mark.parametrize("flip", ["horizontal", "vertical"])
def test_shifts_are_uniform_and_rates_are_p(p, flip):
    drawn = shifts(ShiftFlip(shift=4, flip=flip, probability=p), keys(DRAWS, seed=5))
    found = p_values(drawn, p)
    assert min(found.values()) > 1e-3, found


def test_flip_and_shift_are_independent():
    drawn = shifts(ShiftFlip(), keys(DRAWS, seed=6))
    moved = (drawn[:, 0] != 0) | (drawn[:, 1] != 0)
    table = np.array([(moved == a) & (drawn[:, 2] == b) for a in (0, 1) for b in (0, 1)]).sum(1)
    rate = 0.5 * 80 / 81
    expected = [DRAWS * 0.5 * share for share in (1 - rate, 1 - rate, rate, rate)]
    assert chisquare(table, expected).pvalue > 1e-3


@pytest.mark.parametrize(
    ("mistake", "seen_by"),
    [
        ({"shift": 3}, "uniform"),
        ({"probability": 0.55}, "shift rate"),
        ({"probability": 0.45}, "flip rate"),
        ({"flip": None}, "flip rate"),
    ],
)
def test_the_chi_square_tests_see_a_mistake(mistake, seen_by):
    """The negative control: each mistake fails the test that is there for it."""
    drawn = shifts(ShiftFlip(**({"shift": 4, "probability": 0.5} | mistake)), keys(DRAWS, seed=5))
    assert p_values(drawn, 0.5)[seen_by] < 1e-3


def test_the_uniformity_test_sees_rounding_to_the_nearest():
    """Rounding where the draw should be floored makes the outermost shifts half as likely."""
    drawn = shifts(ShiftFlip(), keys(DRAWS, seed=5))
    u = np.random.default_rng(0).random((DRAWS, 2))
    drawn[:, :2] = np.where(drawn[:, :2].any(1, keepdims=True), np.round(u * 8) - 4, 0)
    assert p_values(drawn, 0.5)["uniform"] < 1e-3


@pytest.mark.parametrize("padding", ["reflect", "zero"])
def test_probability_zero_is_the_identity(padding):
    x = images(50)
    assert torch.equal(ShiftFlip(probability=0, padding=padding)(x, keys(50)), x)
    assert torch.equal(ShiftFlip(shift=0, flip=None, probability=1)(x, keys(50)), x)


def test_probability_one_always_flips():
    x = images(50)
    assert torch.equal(ShiftFlip(shift=0, probability=1)(x, keys(50)), x.flip(3))
    assert torch.equal(ShiftFlip(shift=0, flip="vertical", probability=1)(x, keys(50)), x.flip(2))


def test_content_is_kept_under_a_shift():
    """Every pixel of the window that was in the image is still there, at the shifted place."""
    augment = ShiftFlip(shift=4, flip=None, probability=1, padding="zero")
    x, k = images(60).float() + 1, keys(60)  # no pixel is 0
    got = augment(x, k)
    for n, (dy, dx, _) in enumerate(shifts(augment, k)):
        kept = (got[n] != 0).sum().item()
        assert kept == 3 * (SIZE - abs(dy)) * (SIZE - abs(dx))
        a, b = slice(max(dy, 0), SIZE + min(dy, 0)), slice(max(dx, 0), SIZE + min(dx, 0))
        c, d = slice(max(-dy, 0), SIZE - max(dy, 0)), slice(max(-dx, 0), SIZE - max(dx, 0))
        assert torch.equal(got[n][:, c, d], x[n][:, a, b])


def test_images_that_are_not_square_or_small():
    x = torch.arange(5 * 9, dtype=torch.float32).reshape(1, 1, 5, 9).expand(40, 1, 5, 9)
    assert ShiftFlip(shift=4)(x, keys(40)).shape == (40, 1, 5, 9)
    with pytest.raises(
        ValueError, match=r"5x9 are too small to reflect 5 pixels: .*padding='zero'"
    ):
        ShiftFlip(shift=5)(x, keys(40))
    assert ShiftFlip(shift=20, padding="zero", probability=1)(x, keys(40)).eq(0).any()


def test_an_empty_batch():
    assert ShiftFlip()(images(0), keys(0)).shape == (0, 3, SIZE, SIZE)


def test_keys_must_match():
    with pytest.raises(ValueError, match=r"one key per row: 3 rows, keys \(2,\)"):
        ShiftFlip()(images(3), keys(2))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shift": -1}, "shift must be at least 0"),
        ({"flip": "horizontl"}, "did you mean 'horizontal'"),
        ({"padding": "mirror"}, "padding 'mirror' is unknown"),
        ({"probability": 1.5}, "probability must lie between 0 and 1, got 1.5"),
        ({"probability": -0.1}, "probability must lie between 0 and 1"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ShiftFlip(**options)
