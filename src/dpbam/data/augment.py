"""Augmentation on the device: shifts and flips, drawn for each row from its key.

One view of a sample is one row. Its draws depend only on its key (``Randomness.keys`` and
``derive``), not on the batch: the views do not depend on the micro-batch or the rank, and samples
do not mix, so the sensitivity stays that of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.privacy.randomness import keyed_uniform

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShiftFlip:
    """Shift by up to ``shift`` pixels and flip, each with probability ``probability``.

    With probability p a row is flipped; independently, with probability p, the result is shifted
    by (dy, dx), uniform over the (2 shift + 1)^2 pairs, (0, 0) included.

    Args:
        shift: the largest shift in pixels, 0 for none.
        flip: "horizontal" (left and right are swapped), "vertical" or None.
        probability: p, for each of the two.
        padding: the values beyond the edge. "reflect" mirrors the image without repeating its
            edge, as De et al. (2022) do, and needs images larger than ``shift``; "zero" pads with
            0, which is black in uint8 and mid-grey after :func:`~dpbam.data.to_float`.

    Example:
        >>> import torch
        >>> images = torch.arange(2 * 64).reshape(2, 1, 8, 8)
        >>> keys = torch.tensor([11, 12])
        >>> views = ShiftFlip(shift=2)(images, keys)
        >>> views.shape
        torch.Size([2, 1, 8, 8])
        >>> torch.equal(views[1:], ShiftFlip(shift=2)(images[1:], keys[1:]))
        True
    """

    shift: int = 4
    flip: Literal["horizontal", "vertical"] | None = "horizontal"
    probability: float = 0.5
    padding: Literal["reflect", "zero"] = "reflect"

    def __post_init__(self) -> None:
        _validate.count("shift", self.shift, least=0)
        if self.flip is not None:
            _validate.one_of("flip", self.flip, ("horizontal", "vertical"))
        _validate.one_of("padding", self.padding, ("reflect", "zero"))
        if not 0 <= _validate.number("probability", self.probability) <= 1:
            raise ArgumentError(f"probability must lie between 0 and 1, got {self.probability!r}")

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Return one view per row: [N, C, H, W], keys [N] int64 -> [N, C, H, W], same dtype."""
        import torch

        n, c, h, w = images.shape
        if keys.shape != (n,):
            raise ArgumentError(
                f"there must be one key per row: {n} rows, keys {tuple(keys.shape)}"
            )
        if self.padding == "reflect" and self.shift >= min(h, w):
            raise ArgumentError(
                f"images of {h}x{w} are too small to reflect {self.shift} pixels: "
                "use a smaller shift, or padding='zero'"
            )
        dy, dx, flipped = self._draw(keys)
        rows = torch.arange(h, device=keys.device) + dy[:, None]  # [N, H]: the source of row i
        cols = torch.arange(w, device=keys.device) + dx[:, None]  # [N, W]
        if self.flip == "horizontal":
            cols = torch.where(flipped[:, None], w - 1 - cols, cols)
        elif self.flip == "vertical":
            rows = torch.where(flipped[:, None], h - 1 - rows, rows)
        flat = _inside(rows, h)[:, :, None] * w + _inside(cols, w)[:, None, :]  # [N, H, W]
        index = flat.reshape(n, 1, h * w).expand(n, c, h * w)
        views = images.reshape(n, c, h * w).gather(2, index).reshape(n, c, h, w)
        if self.padding == "zero":
            out = ((rows < 0) | (rows >= h))[:, :, None] | ((cols < 0) | (cols >= w))[:, None, :]
            views = views.masked_fill_(out[:, None], 0)
        return views

    def _draw(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dy, dx) int64 [N] each and whether to flip, bool [N]."""
        u = keyed_uniform(keys, (4,))
        shifted = u[:, 0] < self.probability
        steps = 2 * self.shift + 1
        # u < 1, but u * steps may round up to steps in float32: hence the clamp
        offset = (u[:, 1:3] * steps).long().clamp(max=steps - 1) - self.shift
        offset = offset * shifted[:, None]
        return offset[:, 0], offset[:, 1], u[:, 3] < self.probability


def _inside(position: Tensor, size: int) -> Tensor:
    """Reflect positions in -(size - 1) .. 2 (size - 1) into 0 .. size - 1; clamp those beyond."""
    last = size - 1
    return (last - (last - position.abs()).abs()).clamp(min=0)
