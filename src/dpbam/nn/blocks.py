"""What the models are made of: the group rule, activations, pooling that knows when to stop.

Nothing here looks at more than one sample: group norm takes its mean and variance over a group of
channels of one image, and keeps none of it.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.nn.standardise import WeightStandardisation, convolution

Activation = Literal["mish", "relu", "tanh"]
MOST_LAYERS = 1000  # of a model by name: a file's "wrn-999999994-1" would take all memory
_STANDARDISATIONS = ("none", "centre", "scale")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"mish": nn.Mish, "relu": nn.ReLU, "tanh": nn.Tanh}


def group_count(channels: int, *, most: int = 32, least_size: int = 2) -> int:
    """How many groups a group norm gets: as many as divide, at most ``most``, none too small.

    The largest divisor g of ``channels`` with g <= ``most`` and channels / g >= ``least_size``;
    1 if there is none.

    Why a least size: a group of one channel on a 1x1 map has one value, which normalises to zero,
    and one of two has two, which normalise to -1 and 1. Consequences: a narrow net has fewer
    groups (16 channels: 8), and a prime number of channels has one.

    Example:
        >>> [group_count(c) for c in (64, 128, 256, 16, 48, 7, 1)]
        [32, 32, 32, 8, 24, 1, 1]
        >>> group_count(64, most=16), group_count(64, least_size=16)
        (16, 4)
    """
    largest = min(most, channels // least_size)
    return next((g for g in range(largest, 1, -1) if channels % g == 0), 1)


def group_norm(channels: int, *, most: int = 32) -> nn.GroupNorm:
    """Group norm with scale and shift, by the rule of :func:`group_count`.

    Example:
        >>> group_norm(48).num_groups
        24
    """
    return nn.GroupNorm(group_count(channels, most=most), channels)


def activation_module(name: str) -> nn.Module:
    """The activation called ``name``: mish, relu or tanh.

    Example:
        >>> activation_module("mish")
        Mish()
    """
    return _ACTIVATIONS[_validate.one_of("activation", name, tuple(_ACTIVATIONS))]()


def conv_norm_act(
    in_channels: int,
    out_channels: int,
    *,
    weight_standardisation: WeightStandardisation = "none",
    activation: Activation = "mish",
) -> nn.Sequential:
    """3x3 convolution without bias, group norm, activation: [n, in, y, x] -> [n, out, y, x].

    Example:
        >>> [type(layer).__name__ for layer in conv_norm_act(3, 8)]
        ['Conv2d', 'GroupNorm', 'Mish']
    """
    conv = convolution(in_channels, out_channels, weight_standardisation=weight_standardisation)
    return nn.Sequential(conv, group_norm(out_channels), activation_module(activation))


class HalvingPool(nn.Module):
    """2x2 average pooling, left out where a side would fall below 2: [n, c, y, x] -> about half.

    So that one net serves small images and large ones: a 32x32 image goes 16, 8, 4, an 8x8 image
    goes 4, 2, 2.

    Example:
        >>> import torch
        >>> pool = HalvingPool()
        >>> pool(torch.zeros(1, 3, 7, 9)).shape, pool(torch.zeros(1, 3, 3, 9)).shape
        (torch.Size([1, 3, 3, 4]), torch.Size([1, 3, 3, 9]))
    """

    def forward(self, x: Tensor) -> Tensor:
        """The halved map, or the map."""
        return F.avg_pool2d(x, 2) if min(x.shape[-2:]) >= 4 else x


def check_arguments(in_channels: int, num_classes: int, weight_standardisation: str) -> None:
    """Refuse wrong arguments that all image models share.

    Example:
        >>> check_arguments(3, 10, "center")
        Traceback (most recent call last):
        dpbam.errors.ArgumentError: weight_standardisation 'center' is unknown: did you mean ...
    """
    _validate.count("in_channels", in_channels)
    _validate.count("num_classes", num_classes)
    _validate.one_of("weight_standardisation", weight_standardisation, _STANDARDISATIONS)


def check_image(x: Tensor, model: str, least_side: int) -> None:
    """Refuse what is no batch of images [n, c, y, x] with sides of at least ``least_side``.

    Example:
        >>> import torch
        >>> check_image(torch.zeros(2, 3, 4, 32), "resnet9", 8)
        Traceback (most recent call last):
        dpbam.errors.ArgumentError: resnet9 needs images of at least 8x8, got 4x32: enlarge ...
    """
    if x.ndim != 4:
        raise ArgumentError(
            f"{model} takes a batch of images, shape [n, channels, height, width], got "
            f"{tuple(x.shape)}: add the missing axes, for example with .unsqueeze(1)"
        )
    check_sides(x.shape[-2], x.shape[-1], model, least_side)


def check_sides(height: int, width: int, model: str, least_side: int) -> None:
    """Refuse an image size below ``least_side``.

    Example:
        >>> check_sides(8, 8, "resnet9", 8)
    """
    if min(height, width) < least_side:
        raise ArgumentError(
            f"{model} needs images of at least {least_side}x{least_side}, got {height}x{width}: "
            "enlarge them, or use 'small-cnn' (from 4x4) or 'mlp' (any size)"
        )
