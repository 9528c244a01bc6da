"""The scattering transform: fixed features of images, neither learnt nor private.

Wavelets, a modulus, wavelets again, a modulus, and a local average (Oyallon and Mallat 2015). With
x an image, psi_{j,l} a Morlet wavelet of scale 2^j and angle pi l / L, phi a Gaussian of scale 2^J:

    S_0 = x * phi
    S_1 = |x * psi_{j,l}| * phi                          J L maps
    S_2 = ||x * psi_{j,l}| * psi_{k,m}| * phi            j < k: L^2 J (J-1) / 2 maps

Tramèr and Boneh (2021) found that a linear classifier on these maps is better than deep nets
trained with DP-SGD at small epsilon: the noise of DP-SGD grows with the number of weights, and here
few suffice.

Convolutions are products of Fourier transforms of the image, reflected at its borders. Each map is
sampled once per cell of 2^J x 2^J pixels, at the cell's centre, so that mirroring the image mirrors
the maps exactly (and swaps the angles: :func:`mirrored_paths`).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam.errors import ArgumentError

ANGLES = 8  # L
_SIGMA = 0.8  # width of a wavelet's envelope at scale 1, in pixels
_XI = 3 * math.pi / 4  # its central frequency at scale 1


class Scattering2d(nn.Module):
    """Scattering of order 2: [n, c, y, x] -> [n, c P, y / 2^J, x / 2^J]; P paths per channel.

    Args:
        image_size: (height, width), multiples of 2^J.
        scales: J; the maps are averages over some 2^J pixels.
        angles: L.

    Example:
        >>> scattering = Scattering2d((32, 32))
        >>> scattering(torch.zeros(2, 3, 32, 32)).shape, scattering.paths
        (torch.Size([2, 243, 8, 8]), 81)
    """

    def __init__(
        self, image_size: tuple[int, int], *, scales: int = 2, angles: int = ANGLES
    ) -> None:
        super().__init__()
        self.scales, self.angles = scales, angles
        self.cell = 2**scales
        for side in image_size:
            if side % self.cell or side <= self.cell:
                raise ArgumentError(
                    f"a side of {side} pixels is no multiple of 2^J = {self.cell} above it: resize "
                    "the images, or use fewer scales"
                )
        self._cells = tuple(side // self.cell for side in image_size)
        padded = tuple(side + 2 * self.cell for side in image_size)
        for j in range(scales):
            bank = torch.stack([morlet(padded, j, k * math.pi / angles) for k in range(angles)])
            spectrum = torch.fft.fft2(bank)  # [L, y, x]
            self.register_buffer(f"psi{j}", spectrum.to(torch.complex64))
            centred = spectrum * _half_shift(padded, 2**j) / 4**j  # to fold: see _coarse_modulus
            self.register_buffer(f"centred{j}", centred.to(torch.complex64))
            for axis, size in zip("yx", padded, strict=True):
                self.register_buffer(f"phi{j}{axis}", self._averaging(size, 2**j))

    @property
    def paths(self) -> int:
        """P = 1 + J L + L^2 J (J - 1) / 2."""
        big_j, big_l = self.scales, self.angles
        return 1 + big_j * big_l + big_l**2 * big_j * (big_j - 1) // 2

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Maps in the order S_0; S_1 by (j, l); S_2 by (j, l, k, m); channel by channel."""
        n, c = x.shape[:2]
        x = F.pad(x, (self.cell,) * 4, mode="reflect").flatten(0, 1)  # [n c, y, x]
        maps, spectrum = [self._average(x[:, None], 0)], torch.fft.fft2(x)
        second = []
        for j in range(self.scales):
            first = torch.fft.ifft2(
                spectrum[:, None] * getattr(self, f"psi{j}")
            ).abs()  # [n c, L, y, x]
            maps.append(self._average(first, 0))
            if j + 1 < self.scales:
                inner = torch.fft.fft2(first)[:, :, None]  # [n c, L, 1, y, x]
            for k in range(j + 1, self.scales):
                deep = self._coarse_modulus(inner, k)  # [n c, L, L, y / 2^k, x / 2^k]
                second.append(self._average(deep.flatten(1, 2), k))
        return torch.cat(maps + second, dim=1).reshape(n, c * self.paths, *self._cells)

    def _coarse_modulus(self, spectrum: Tensor, k: int) -> Tensor:
        """|u * psi_{k,m}| at centres of blocks of s = 2^k: [..., 1, y, x] -> [..., L, y/s, x/s].

        Taking every s-th place folds the spectrum onto itself.
        """
        stride, psi = 2**k, getattr(self, f"centred{k}")
        y, x = (size // stride for size in psi.shape[-2:])
        corners = [(..., slice(a, a + y), slice(b, b + x))
                   for a in range(0, stride * y, y) for b in range(0, stride * x, x)]  # fmt: skip
        folded = spectrum[corners[0]] * psi[corners[0]]
        for corner in corners[1:]:
            folded.addcmul_(spectrum[corner], psi[corner])
        modulus: Tensor = torch.fft.ifft2(folded).abs()
        return modulus

    def _average(self, u: Tensor, k: int) -> Tensor:
        """u * phi at the centres of the cells: [n, p, y / 2^k, x / 2^k] -> [n, p, cells, cells]."""
        along_y, along_x = getattr(self, f"phi{k}y"), getattr(self, f"phi{k}x")
        averaged: Tensor = along_y @ u @ along_x.T
        return averaged

    def _averaging(self, size: int, stride: int) -> Tensor:
        """One axis of phi as a matrix [cells, size / stride] from places to centres of cells."""
        places = torch.arange(0, size, stride, dtype=torch.float64) + (stride - 1) / 2
        cells = torch.arange(self.cell, size - self.cell, self.cell, dtype=torch.float64)
        distance = cells[:, None] + (self.cell - 1) / 2 - places
        sigma = _SIGMA * 2 ** (self.scales - 1)
        weights = sum(
            torch.exp(-((distance + turn * size) ** 2) / (2 * sigma**2)) for turn in (-1, 0, 1)
        )
        assert isinstance(weights, Tensor)
        return (weights / weights.sum(1, keepdim=True)).float()


def morlet(size: tuple[int, ...], j: int, theta: float) -> Tensor:
    """psi_{j,theta} in space, around place (0, 0) of a torus: complex128 [y, x].

        psi(u) = g(u) (e^{i xi u.e} - b),  e = (cos theta, sin theta),  with b such that sum psi = 0

    g is a Gaussian of mass 1, of width 0.8 2^j along e and twice that across; xi = 3 pi / 4 / 2^j.

    Example:
        >>> abs(morlet((16, 16), 0, 0.3).sum()) < 1e-12
        tensor(True)
    """
    sigma, xi, slant = _SIGMA * 2**j, _XI / 2**j, 0.5
    total: list[Tensor] = [torch.zeros(size, dtype=torch.complex128) for _ in range(2)]
    for turn_y in range(-2, 3):
        for turn_x in range(-2, 3):
            y = torch.arange(size[0], dtype=torch.float64)[:, None] + turn_y * size[0]
            x = torch.arange(size[1], dtype=torch.float64) + turn_x * size[1]
            along, across = (
                x * math.cos(theta) + y * math.sin(theta),
                y * math.cos(theta) - x * math.sin(theta),
            )
            g = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
            g = g * slant / (2 * math.pi * sigma**2)
            total[0] += g * torch.exp(1j * xi * along)
            total[1] += g
    wave, envelope = total
    return wave - wave.sum() / envelope.sum() * envelope


def mirrored_paths(scales: int, angles: int) -> Tensor:
    """Return the position of each path's map when the image is mirrored: angle l goes to -l.

    Example:
        >>> mirrored_paths(1, 4)
        tensor([0, 1, 4, 3, 2])
    """
    back = -torch.arange(angles) % angles
    order = [torch.zeros(1, dtype=torch.int64)]
    for _ in range(scales):
        order.append(back + sum(map(len, order)))
    for _ in range(scales * (scales - 1) // 2):
        order.append((back[:, None] * angles + back).flatten() + sum(map(len, order)))
    return torch.cat(order)


def _half_shift(size: tuple[int, ...], stride: int) -> Tensor:
    """The spectrum of a shift by (s - 1) / 2, which takes places 0, s, 2 s to centres of blocks."""
    y, x = (torch.fft.fftfreq(side, dtype=torch.float64) for side in size)
    return torch.exp(1j * math.pi * (stride - 1) * (y[:, None] + x))
