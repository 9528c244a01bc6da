"""Scattering features: fixed, for any image size and number of channels; nothing is downloaded.

DP-SGD's noise grows with the number of weights, so it helps to learn fewer of them (Tramèr and
Boneh 2021). From confidential records one linear layer is learnt, and nothing else:

1. Images are resized, if need be, to sides that are multiples of the cell (:func:`working_size`).
2. Scattering maps of each image (:mod:`dpbam.features.wavelets`), by channel and cell.
3. The square root of all but the smoothed image, which reduces strong contrasts relative to weak
   ones.
4. Principal axes of the channels, whitened. Mean and covariance are those of *synthetic* images,
   dead leaves (:mod:`dpbam.features.leaves`), so they cost no privacy.
5. With ``mirror``, the mean over an image and its mirror image: half the numbers, and half the
   weights to noise, for images whose left and right mean the same. So it is for photographs, and
   not for characters and scans. Whether images have colour is public, and separates them well
   enough (``reproduce/defaults_mirror.py`` compares both on validation records).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.features.leaves import dead_leaves
from dpbam.features.wavelets import ANGLES, Scattering2d, mirrored_paths
from dpbam.nn.encoders import resizing

CHANNELS = 48  # principal axes
SYNTHETIC = 500  # images to measure the axes on: some 25,000 places
LARGEST = 64  # pixels of a side: larger images are resized to it
SMALLEST = 16  # likewise: two scales need four cells along a side
_ROWS = 8  # images computed at once, to fit a core's cache
_FORMAT = 1  # raise it when the features change


@dataclass(frozen=True)
class Axes:
    """What turns scattering maps into features; measured on synthetic images alone.

    Attributes:
        mean: [P] of the companded maps.
        project: [P, k] axes, divided by their whitened deviations.
        sign: [k] +1 where an axis is unchanged by mirroring, -1 where it changes its sign.
    """

    mean: Tensor
    project: Tensor
    sign: Tensor

    @classmethod
    def measured(
        cls, maps: Tensor, channels: int = CHANNELS, whitening: float = 1.0, scales: int = 2
    ) -> Axes:
        """Find the ``channels`` strongest axes of maps [n, P, y, x], each with mirror symmetry.

        The covariance is made symmetric under mirroring. Then it does not mix the maps that
        mirroring keeps with those whose sign it changes, and the axes of each are found separately.
        ``whitening`` is 1 for axes of equal variance, 0 to leave their variances as they are.
        """
        swap = mirror_matrix(maps.shape[1], scales)
        rows = maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1]).double()
        mean = (rows.mean(0) + swap @ rows.mean(0)) / 2
        covariance = (rows - mean).T @ (rows - mean) / len(rows)
        covariance = (covariance + swap @ covariance @ swap.T) / 2
        variances, axes, signs = [], [], []
        for sign in (1, -1):
            onto = (torch.eye(len(swap)) + sign * swap) / 2  # the maps of this symmetry
            values, vectors = torch.linalg.eigh(onto @ covariance @ onto)
            of_it = (vectors * (onto @ vectors)).sum(0) > 0.5
            variances.append(values[of_it])
            axes.append(vectors[:, of_it])
            signs.append(torch.full((int(of_it.sum()),), float(sign)))
        variance = torch.cat(variances)
        order = variance.argsort(descending=True)[:channels]
        scale = variance[order] ** (-whitening / 2)
        return cls(
            mean.float(), (torch.cat(axes, 1)[:, order] * scale).float(), torch.cat(signs)[order]
        )

    def projected(self, maps: Tensor) -> Tensor:
        """Map [n, P, y, x] to [n, k, y, x]."""
        return torch.einsum("ncyx,ck->nkyx", maps - self.mean[:, None, None], self.project)

    def folded(self, maps: Tensor) -> Tensor:
        """Map [n, P, y, x] to [n, k, y, ceil(x / 2)], the same for an image and its mirror image.

        The sum of the projected maps and of their mirror images; the other half has the same values
        but for signs. Of an odd number of columns the middle one is in the first half.
        """
        projected = self.projected(maps)
        half = (projected.shape[-1] + 1) // 2
        mirrored = self.sign[:, None, None] * projected.flip(-1)
        return (projected + mirrored)[..., :half]


def maps_of(images: Tensor, scales: int = 2) -> Tensor:
    """Compute the scattering maps of images in [-1, 1]: S_0, and the root of S_1 and S_2."""
    scattering = Scattering2d((images.shape[-2], images.shape[-1]), scales=scales)
    return torch.cat([_companded(scattering, rows) for rows in torch.split(images, _ROWS)])


def _companded(scattering: Scattering2d, images: Tensor) -> Tensor:
    maps: Tensor = scattering(images)
    smooth = maps[:, :: scattering.paths].clone()  # S_0 has a sign
    maps = maps.clamp(min=0).sqrt()
    maps[:, :: scattering.paths] = smooth
    return maps


def mirror_matrix(channels: int, scales: int = 2) -> Tensor:
    """The permutation of channels by mirroring: float64 [P, P]."""
    paths = mirrored_paths(scales, ANGLES)
    order = torch.cat([paths + len(paths) * k for k in range(channels // len(paths))])
    return torch.eye(len(order), dtype=torch.float64)[order]


def working_size(height: int, width: int) -> tuple[int, int, int]:
    """Return the height and width that images are resized to, and the number of scales J.

    J = 2 for images below 48 pixels, 3 from there on, by the longer side: four to a dozen cells of
    2^J pixels along it. Sides grow to the next multiple of 2^J, at least two cells. Images are
    brought to a longer side between :data:`SMALLEST` and :data:`LARGEST`, both sides by the same
    factor.

    Example:
        >>> working_size(28, 28), working_size(8, 8), working_size(480, 640)
        ((28, 28, 2), (16, 16, 2), (48, 64, 3))
    """
    longer = max(_validate.count("height", height), _validate.count("width", width))
    factor = max(SMALLEST, min(LARGEST, longer)) / longer
    scales = 2 if longer < 48 else 3
    cell = 2**scales
    rows, columns = (max(2, -(-round(side * factor) // cell)) * cell for side in (height, width))
    return rows, columns, scales


class ScatteringFeatures:
    """Scattering features of images, whitened by constants from synthetic images.

    Args:
        image_shape: (C, H, W); any size, and any number of channels.
        mirror: average over the image and its mirror image; None: if it has several channels.
        channels: the number of principal axes, at most the number of paths.

    Guarantee: row i of ``extract`` depends on image i and on constants that no private record
    reaches.

    Assumptions: none about the images; values outside [-1, 1] are used as they are.

    Proof: resizing, Fourier transform, modulus, root and projection act on one image each; rows are
    computed in blocks of a fixed size, the last one filled with zeros, so that not even rounding
    depends on the number of rows. The axes are functions of seeded synthetic images.

    Example:
        >>> features = ScatteringFeatures((1, 8, 8), channels=5)
        >>> features.extract(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 80])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        mirror: bool | None = None,
        channels: int = CHANNELS,
    ) -> None:
        _validate.count("channels", image_shape[0])
        self.image_shape = image_shape
        self.mirror = image_shape[0] > 1 if mirror is None else mirror
        height, width, self.scales = working_size(*image_shape[1:])
        self._rows = resizing(image_shape[1], height, "bilinear")
        self._columns = resizing(image_shape[2], width, "bilinear")
        self._scattering = Scattering2d((height, width), scales=self.scales)
        self.channels = min(
            _validate.count("channels", channels), image_shape[0] * self._scattering.paths
        )
        synthetic = dead_leaves(SYNTHETIC, image_shape=(image_shape[0], height, width))
        self.axes = Axes.measured(
            maps_of(synthetic, self.scales), self.channels, scales=self.scales
        )
        columns = width // 2**self.scales
        cells = (height // 2**self.scales) * (-(-columns // 2) if self.mirror else columns)
        self.width = self.channels * cells

    def extract(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.image_shape:
            raise ArgumentError(
                f"these features are of images {list(self.image_shape)}, and got "
                f"{list(images.shape[1:])}"
            )
        blocks = [self._block(rows) for rows in torch.split(images.float().cpu(), _ROWS)]
        return torch.cat(blocks) if blocks else torch.empty(0, self.width)

    @torch.no_grad()
    def _block(self, images: Tensor) -> Tensor:
        filled = torch.zeros(_ROWS, *self.image_shape)
        filled[: len(images)] = images
        maps = _companded(self._scattering, self._rows @ filled @ self._columns.T)
        values = self.axes.folded(maps) if self.mirror else self.axes.projected(maps)
        return values.flatten(1)[: len(images)]

    def description(self) -> Mapping[str, Any]:
        constants = (self.axes.mean, self.axes.project, self.axes.sign)
        digest = hashlib.sha256(b"".join(c.numpy().tobytes() for c in constants))
        return {
            "features": "scattering", "format": _FORMAT, "image_shape": list(self.image_shape),
            "mirror": self.mirror, "channels": self.channels, "scales": self.scales,
            "axes": digest.hexdigest(), "torch": torch.__version__,
        }  # fmt: skip
