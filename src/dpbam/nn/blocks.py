"""Building blocks of the models: group norm, activations, pooling, checks of arguments.

None of them mixes samples: group norm computes its mean and variance over a group of channels of
one image, and keeps no running statistics.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.nn.standardise import WeightStandardisation, convolution

Activation = Literal["mish", "relu", "tanh"]
MOST_LAYERS = 1000  # a file could name "wrn-999999994-1" and exhaust the memory
_STANDARDISATIONS = ("none", "centre", "scale")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"mish": nn.Mish, "relu": nn.ReLU, "tanh": nn.Tanh}


def group_count(channels: int, *, most: int = 32, least_size: int = 2) -> int:
    """Return the number of groups of a group norm.

    It is the largest divisor g of ``channels`` with g <= ``most`` and channels / g >=
    ``least_size``, and 1 if there is none. A group must not be too small: on a 1x1 map a group of
    one channel has one value, which normalises to zero, and one of two channels normalises to -1
    and 1. So a narrow net has fewer groups (16 channels: 8), and a prime number of channels one.

    Example:
        >>> [group_count(c) for c in (64, 128, 256, 16, 48, 7, 1)]
        [32, 32, 32, 8, 24, 1, 1]
        >>> group_count(64, most=16), group_count(64, least_size=16)
        (16, 4)
    """
    largest = min(most, channels // least_size)
    return next((g for g in range(largest, 1, -1) if channels % g == 0), 1)


def group_norm(channels: int, *, most: int = 32) -> nn.GroupNorm:
    """Return a group norm with scale and shift, and :func:`group_count` groups."""
    return nn.GroupNorm(group_count(channels, most=most), channels)


def activation_module(name: str) -> nn.Module:
    return _ACTIVATIONS[_validate.one_of("activation", name, tuple(_ACTIVATIONS))]()


def conv_norm_act(
    in_channels: int,
    out_channels: int,
    *,
    weight_standardisation: WeightStandardisation = "none",
    activation: Activation = "mish",
) -> nn.Sequential:
    """3x3 convolution without bias, group norm, activation: [n, in, y, x] -> [n, out, y, x]."""
    conv = convolution(in_channels, out_channels, weight_standardisation=weight_standardisation)
    return nn.Sequential(conv, group_norm(out_channels), activation_module(activation))


class HalvingPool(nn.Module):
    """2x2 average pooling, omitted where a side would fall below 2: [n, c, y, x] -> about half.

    So one net serves small and large images: the sides of a 32x32 image become 16, 8, 4, those of
    an 8x8 image 4, 2, 2.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2) if min(x.shape[-2:]) >= 4 else x


def check_arguments(in_channels: int, num_classes: int, weight_standardisation: str) -> None:
    """Refuse wrong values of the arguments that all image models share."""
    _validate.count("in_channels", in_channels)
    _validate.count("num_classes", num_classes)
    _validate.one_of("weight_standardisation", weight_standardisation, _STANDARDISATIONS)


def check_image(x: Tensor, model: str, least_side: int) -> None:
    """Refuse a tensor that is not [n, c, y, x] with sides of at least ``least_side``."""
    if x.ndim != 4:
        raise ArgumentError(
            f"{model} takes a batch of images, shape [n, channels, height, width], got "
            f"{tuple(x.shape)}: add the missing axes, for example with .unsqueeze(1)"
        )
    check_sides(x.shape[-2], x.shape[-1], model, least_side)


def check_sides(height: int, width: int, model: str, least_side: int) -> None:
    """Refuse an image size below ``least_side``."""
    if min(height, width) < least_side:
        raise ArgumentError(
            f"{model} needs images of at least {least_side}x{least_side}, got {height}x{width}: "
            "enlarge them, or use 'small-cnn' (from 4x4) or 'mlp' (any size)"
        )
