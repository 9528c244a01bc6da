"""The scattering transform equals its definition, and moves with the image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dpbam.features.wavelets import Scattering2d, mirrored_paths, morlet


def image(side: int = 32, channels: int = 1, n: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(seed))


def convolved(u: np.ndarray, psi: np.ndarray) -> np.ndarray:
    """The circular convolution, place by place."""
    out = np.zeros(u.shape, complex)
    for a in range(u.shape[0]):
        for b in range(u.shape[1]):
            out += u[a, b] * np.roll(psi, (a, b), (0, 1))
    return out


def between(c: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Trigonometric interpolation of c at places y, x, by sums of waves."""
    waves = [
        np.exp(2j * math.pi * np.outer(p, np.fft.fftfreq(s)))
        for p, s in zip((y, x), c.shape, strict=True)
    ]
    at_places = [
        np.exp(-2j * math.pi * np.outer(np.fft.fftfreq(s), np.arange(s))) / s for s in c.shape
    ]
    return (waves[0] @ at_places[0]) @ c @ (waves[1] @ at_places[1]).T


def averaged(u: np.ndarray, places: np.ndarray, cells: int) -> np.ndarray:
    """A Gaussian average of u, known at ``places`` of both axes, around the centres of cells."""
    out = np.zeros((cells, cells))
    size, sigma = 4 * cells + 8, 1.6
    for a in range(cells):
        for b in range(cells):
            weights = []
            for cell in (a, b):
                d = np.abs(places - (4 + 4 * cell + 1.5))
                g = np.exp(-(np.minimum(d, size - d) ** 2) / (2 * sigma**2))
                weights.append(g / g.sum())
            out[a, b] = weights[0] @ u @ weights[1]
    return out


def test_it_equals_the_definition_computed_by_convolutions() -> None:
    x = image(12, n=1)
    ours = Scattering2d((12, 12), angles=3)(x)[0].numpy()
    padded = np.pad(x[0, 0].numpy().astype(float), 4, mode="reflect")
    everywhere, coarse = np.arange(20.0), np.arange(0, 20, 2) + 0.5
    psi = [[morlet((20, 20), j, k * math.pi / 3).numpy() for k in range(3)] for j in range(2)]

    expected = [averaged(padded, everywhere, 3)]
    for j in range(2):
        for k in range(3):
            expected.append(averaged(abs(convolved(padded, psi[j][k])), everywhere, 3))
    for k in range(3):
        first = abs(convolved(padded, psi[0][k]))
        for m in range(3):
            second = abs(between(convolved(first, psi[1][m]), coarse, coarse))
            expected.append(averaged(second, coarse, 3))

    assert ours.shape == (16, 3, 3)
    np.testing.assert_allclose(ours, np.array(expected), atol=2e-6)


@pytest.mark.parametrize(("scales", "angles"), [(1, 4), (2, 8), (3, 2)])
def test_shapes(scales: int, angles: int) -> None:
    scattering = Scattering2d((16, 32), scales=scales, angles=angles)
    out = scattering(torch.rand(2, 3, 16, 32))
    assert out.shape == (2, 3 * scattering.paths, 16 // 2**scales, 32 // 2**scales)
    assert not list(scattering.parameters())


def test_a_sample_does_not_depend_on_others() -> None:
    scattering, x = Scattering2d((16, 16)), image(16, n=3)
    together, alone = scattering(x), scattering(x[1:2])
    torch.testing.assert_close(together[1:2], alone)


def test_a_mirrored_image_has_mirrored_maps_with_angles_swapped() -> None:
    scattering, x = Scattering2d((32, 32)), image()
    swapped = scattering(x)[:, mirrored_paths(2, 8)].flip(-1)
    torch.testing.assert_close(scattering(x.flip(-1)), swapped, atol=1e-5, rtol=0)
    assert not torch.allclose(scattering(x.flip(-1)), scattering(x).flip(-1), atol=1e-3)


def test_a_turned_image_has_turned_maps_with_angles_shifted() -> None:
    scattering, x = Scattering2d((32, 32)), image()
    shift = (torch.arange(8) + 4) % 8
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + shift, 9 + shift,
                       17 + (8 * shift[:, None] + shift).flatten()])  # fmt: skip
    turned = scattering(torch.rot90(x, 1, (-2, -1)))
    torch.testing.assert_close(
        turned, torch.rot90(scattering(x)[:, order], 1, (-2, -1)), atol=1e-5, rtol=0
    )


def test_wavelets_see_no_constant_and_the_average_keeps_it() -> None:
    out = Scattering2d((16, 16))(torch.full((1, 1, 16, 16), 0.7))[0]
    torch.testing.assert_close(out[0], torch.full((4, 4), 0.7))
    assert out[1:].abs().max() < 1e-5


def test_no_frequency_is_amplified() -> None:
    """Littlewood-Paley: 1/2 sum |psi^|^2 at w and -w; so that the transform hardly expands."""
    total = torch.zeros(40, 40, dtype=torch.float64)
    for j in range(2):
        for k in range(8):
            power = torch.fft.fft2(morlet((40, 40), j, k * math.pi / 8)).abs() ** 2
            total += (power + power.flip((0, 1)).roll((1, 1), (0, 1))) / 2
    assert 0.5 < total.max() < 1.6


def test_a_small_shift_changes_maps_less_than_pixels() -> None:
    x = image()
    moved = x.roll(1, -1)
    scattering = Scattering2d((32, 32))
    before, after = scattering(x), scattering(moved)
    assert (before - after).norm() / before.norm() < 0.5 * (x - moved).norm() / x.norm()


def test_sides_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        Scattering2d((30, 32))
