"""Synthetic images with the statistics of photographs: public, and nothing is downloaded."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def dead_leaves(
    count: int, seed: int = 0, image_shape: tuple[int, int, int] = (3, 32, 32)
) -> Tensor:
    """Draw synthetic images [count, C, H, W] in [-1, 1]: overlapping opaque shapes.

    Ellipses and boxes of all sizes, small ones more often (radius r with density r^-3), each of one
    colour with a slight slope, over one another, with some grain: edges, colours and scales occur
    about as they do in photographs (Lee, Mumford and Huang 2001).

    Example:
        >>> dead_leaves(2).shape
        torch.Size([2, 3, 32, 32])
    """
    generator = np.random.default_rng(seed)
    return torch.stack([torch.from_numpy(_leaves(generator, image_shape)) for _ in range(count)])


def _leaves(g: np.random.Generator, image_shape: tuple[int, int, int]) -> NDArray[np.float32]:
    channels, height, width = image_shape
    y, x = np.mgrid[0:height, 0:width]
    margin = 8  # shapes whose centre is outside the image by up to this many pixels
    image = np.zeros(image_shape)
    level = g.uniform(-0.6, 0.6)
    for _ in range(40):
        radius = min(40.0, 2.0 / np.sqrt(g.uniform(1 / 400, 1)))
        cx, cy = (g.uniform(-margin, side + margin) for side in (width, height))
        colour = np.clip(level + g.normal(0, 0.35) + g.normal(0, 0.12, channels), -1, 1)
        angle, narrow, is_round = g.uniform(0, np.pi), g.uniform(0.4, 1), g.random() < 0.5
        u = (x - cx) * np.cos(angle) + (y - cy) * np.sin(angle)
        v = (y - cy) * np.cos(angle) - (x - cx) * np.sin(angle)
        w = v / narrow
        distance = np.sqrt(u**2 + w**2) if is_round else np.maximum(abs(u), abs(w))
        cover = np.clip(radius - distance + 0.5, 0, 1)  # a soft edge of one pixel
        slope = g.normal(0, 0.01) * u + g.normal(0, 0.01) * v
        image = image * (1 - cover) + (colour[:, None, None] + slope) * cover
    _, grain = abs(g.normal(0, 0.04, 2))
    return np.clip(image + g.normal(0, grain, image.shape), -1, 1).astype(np.float32)
