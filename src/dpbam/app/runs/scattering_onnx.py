"""Scattering features and their head in real arithmetic, for formats without complex numbers.

ONNX has no complex products. A discrete Fourier transform is a product with two real matrices,
cosines and sines; resizing and reflecting at the borders are products as well. Everything is in
double precision, so that it is at least as exact as the transform in single precision that it
stands for.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam.features import ScatteringFeatures, recentre_rows
from dpbam.heads import LinearHead

_Pair = tuple[Tensor, Tensor]  # real and imaginary part
_LEAST = 1e-12


class RealScattering(nn.Module):
    """What a head on scattering features predicts, from images [N, C, H, W] in [-1, 1].

    Args:
        features: of the model.
        head: its linear scores of features of norm 1.
        centre: what the model subtracts from features before its head, [D]; None: nothing.
    """

    rows: Tensor
    columns: Tensor
    mean: Tensor
    project: Tensor
    sign: Tensor
    weight: Tensor
    bias: Tensor

    centre: Tensor | None

    def __init__(
        self, features: ScatteringFeatures, head: LinearHead, centre: Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("centre", None if centre is None else centre.double())
        scattering = features._scattering
        self.scales, self.paths, self.mirror = features.scales, scattering.paths, features.mirror
        cell = scattering.cell
        constants = {
            "rows": _reflected(features._rows, cell),
            "columns": _reflected(features._columns, cell),
            "mean": features.axes.mean, "project": features.axes.project,
            "sign": features.axes.sign, "weight": head.weight,
            "bias": head.bias,
        }  # fmt: skip
        sizes = constants["rows"].shape[0], constants["columns"].shape[0]
        for k in range(self.scales):
            for name in ("psi", "centred"):
                spectrum = getattr(scattering, f"{name}{k}")
                constants |= {f"{name}{k}_re": spectrum.real, f"{name}{k}_im": spectrum.imag}
            for axis, size in zip("yx", sizes, strict=True):
                constants[f"phi{k}{axis}"] = getattr(scattering, f"phi{k}{axis}")
                cosine, sine = _fourier(size // 2**k)
                constants |= {f"cos{k}{axis}": cosine, f"sin{k}{axis}": sine}
        for name, value in constants.items():
            self.register_buffer(name, value.double())

    def forward(self, images: Tensor) -> Tensor:
        rows = images.shape[0]
        pixels = (self.rows @ images.double() @ self.columns.T).flatten(0, 1)
        maps, deeper = [self._average(pixels[:, None], 0)], []
        re, im = self._transform((pixels, torch.zeros_like(pixels)), 0, inverse=False)
        for j in range(self.scales):
            first = self._modulus((re[:, None], im[:, None]), f"psi{j}", 0)
            maps.append(self._average(first, 0))
            if j + 1 < self.scales:
                of_first = self._transform((first, torch.zeros_like(first)), 0, inverse=False)
            for k in range(j + 1, self.scales):
                inner = self._modulus((of_first[0][:, :, None], of_first[1][:, :, None]),
                                      f"centred{k}", k)  # fmt: skip
                deeper.append(self._average(inner.flatten(1, 2), k))
        stacked = torch.cat(maps + deeper, dim=1)  # [N C, P, y, x]
        # all but the smoothed image, which has a sign
        companded = torch.cat([stacked[:, :1], stacked[:, 1:].clamp(min=0).sqrt()], dim=1)
        return self._scores(companded.reshape(rows, -1, *companded.shape[2:]))

    def _scores(self, maps: Tensor) -> Tensor:
        centred = (maps - self.mean[:, None, None]).permute(0, 2, 3, 1)
        projected = (centred @ self.project).permute(0, 3, 1, 2)
        if self.mirror:
            mirrored = self.sign[:, None, None] * projected.flip(-1)
            projected = (projected + mirrored)[..., : (projected.shape[-1] + 1) // 2]
        values = projected.flatten(1)
        values = values - values.mean(dim=1, keepdim=True)
        unit = values / values.square().sum(dim=1, keepdim=True).sqrt().clamp(min=_LEAST)
        if self.centre is not None:
            unit = recentre_rows(unit, self.centre)
        return (unit @ self.weight.T + self.bias).float()

    def _transform(self, pair: _Pair, k: int, *, inverse: bool) -> _Pair:
        """Return the Fourier transform along the last two axes, of the size at scale 2^k."""
        (cos_y, sin_y), (cos_x, sin_x) = (
            (self._buffer(f"cos{k}{axis}"), self._buffer(f"sin{k}{axis}")) for axis in "yx"
        )
        if not inverse:
            sin_y, sin_x = -sin_y, -sin_x
        re, im = pair
        along_re, along_im = cos_y @ re - sin_y @ im, cos_y @ im + sin_y @ re
        re, im = along_re @ cos_x.T - along_im @ sin_x.T, along_re @ sin_x.T + along_im @ cos_x.T
        scale = 1 / (len(cos_y) * len(cos_x)) if inverse else 1.0
        return re * scale, im * scale

    def _modulus(self, spectrum: _Pair, name: str, k: int) -> Tensor:
        """Return |u * psi|, at the centres of blocks of 2^k: the spectrum is folded onto itself."""
        psi_re, psi_im = self._buffer(f"{name}_re"), self._buffer(f"{name}_im")
        re = spectrum[0] * psi_re - spectrum[1] * psi_im
        im = spectrum[0] * psi_im + spectrum[1] * psi_re
        re, im = self._transform((_folded(re, 2**k), _folded(im, 2**k)), k, inverse=True)
        return (re.square() + im.square()).sqrt()

    def _average(self, u: Tensor, k: int) -> Tensor:
        return self._buffer(f"phi{k}y") @ u @ self._buffer(f"phi{k}x").T

    def _buffer(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name)
        return value


def _folded(spectrum: Tensor, stride: int) -> Tensor:
    """Sum the stride^2 blocks of a spectrum: what taking every stride-th place does to it."""
    return _fold_axis(_fold_axis(spectrum, stride, -2), stride, -1)


def _fold_axis(spectrum: Tensor, stride: int, axis: int) -> Tensor:
    """Sum the ``stride`` equal pieces of an axis."""
    first, *others = spectrum.chunk(stride, axis)
    for piece in others:
        first = first + piece
    return first


def _reflected(resizing: Tensor, margin: int) -> Tensor:
    """Return a resizing matrix [H', H] with rows reflected at both ends: [H' + 2 margin, H]."""
    eye = torch.eye(len(resizing), dtype=resizing.dtype)
    reflect = F.pad(eye[None], (margin, margin), mode="reflect")[0].T
    return reflect @ resizing


def _fourier(size: int) -> _Pair:
    places = torch.arange(size, dtype=torch.float64)
    angles = torch.outer(places, places).remainder(size) * (2 * math.pi / size)
    return angles.cos(), angles.sin()
