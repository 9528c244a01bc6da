"""The models by name, with torch's default initialisation.

====================  =========================================  ===========================
model                 for                                        parameters
====================  =========================================  ===========================
:class:`ResNet9`      CIFAR (the paper), images from 8x8         2 447 946 (3 ch., 10 classes)
:class:`WideResNet`   ImageNet32 (the paper), images from 8x8    3 003 736 (16-4, 1000 classes)
:class:`SmallCNN`     small images from 4x4                      25 978 (1 ch., 10 classes)
:class:`MLP`          vectors, and images of any size            depends on its widths
:class:`UNet`         segmentation of images from 8x8            118 322 (1 ch., 2 classes)
====================  =========================================  ===========================

None mixes samples: group norm computes its mean and variance over a group of channels of one image,
and keeps no running statistics. Every operation has a forward derivative and a double backward, and
works under ``vmap`` with a batch of one, as exact BAM needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.nn.standardise import WeightStandardisation, convolution

Activation = Literal["mish", "relu", "tanh"]
MOST_LAYERS = 1000  # a file could name "wrn-999999994-1" and exhaust the memory
_STANDARDISATIONS = ("none", "centre", "scale")
_ACTIVATIONS: dict[str, type[nn.Module]] = {"mish": nn.Mish, "relu": nn.ReLU, "tanh": nn.Tanh}


class ResNet9(nn.Module):
    """The paper's ResNet-9 (Tab. 2), as its authors built it.

    conv 64 - conv 128, pool - residual(128, 128) - conv 256, pool - conv 256, pool -
    residual(256, 256) - average pool to 2x2 - linear. Each conv is 3x3 without bias, then group
    norm (32 groups), then Mish; a residual is x + conv(conv(x)); pools are averages over 2x2 and
    are omitted where a side would fall below 2 (images under 16x16).

    Args:
        width: multiplies 64, 128 and 256, to the nearest multiple of 4. Narrower nets have fewer
            groups, by the rule of :func:`~dpbam.nn.models.group_count`: 8 for 16 channels.
        weight_standardisation: of every convolution; the paper's authors used "centre".
        scale_norm: a further group norm after each residual sum (Klause et al. 2022).

    Shapes: [n, in_channels, y, x], y and x at least 8 -> [n, num_classes].

    Example:
        >>> net = ResNet9(in_channels=1, num_classes=2, width=0.25)
        >>> net(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 2])
    """

    least_side = 8

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        *,
        width: float = 1.0,
        weight_standardisation: WeightStandardisation = "centre",
        scale_norm: bool = False,
    ) -> None:
        super().__init__()
        check_arguments(in_channels, num_classes, weight_standardisation)
        a, b, c = (_scale_channels(channels, width) for channels in (64, 128, 256))

        def conv(fan: int, out: int) -> nn.Module:
            return conv_norm_act(fan, out, weight_standardisation=weight_standardisation)

        self.conv1, self.conv2 = conv(in_channels, a), conv(a, b)
        self.residual1 = nn.Sequential(conv(b, b), conv(b, b))
        self.norm1 = group_norm(b) if scale_norm else nn.Identity()
        self.conv3, self.conv4 = conv(b, c), conv(c, c)
        self.residual2 = nn.Sequential(conv(c, c), conv(c, c))
        self.norm2 = group_norm(c) if scale_norm else nn.Identity()
        self.pool = HalvingPool()
        self.final_pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(4 * c, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        check_image(x, "resnet9", self.least_side)
        x = self.pool(self.conv2(self.conv1(x)))  # sides 32 -> 16
        x = self.norm1(x + self.residual1(x))
        x = self.pool(self.conv3(x))  # 16 -> 8
        x = self.pool(self.conv4(x))  # 8 -> 4
        x = self.norm2(x + self.residual2(x))
        logits: Tensor = self.head(self.final_pool(x).flatten(1))  # 4 -> 2
        return logits


class WideResNet(nn.Module):
    """The paper's WideResNet-depth-widen (ImageNet32), after De et al. (2022), with ReLU.

    Stem conv 16 - three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times ``widen``
    channels, the second and third at half the size - activation, norm - mean over the map -
    linear. A block is x + conv(norm(act(conv(norm(act(x)))))), activation before norm as in De et
    al.; the first block of a stage has conv1x1(norm(act(x))) in place of x.

    Unlike theirs, the convolutions have neither bias nor gain (the norm before each has scale and
    shift), their fan-in factor is outside the weight and only where no norm cancels it (on the two
    sides of a sum), and the stem's 16 channels have 8 groups instead of 16 of one channel each.

    Args:
        depth: 10, 16, 22, 28, ...: 6 k + 4.
        widen: the widening factor K.
        groups: of every group norm, at most (see :func:`~dpbam.nn.models.group_count`).
        weight_standardisation: of every convolution; De et al. used "scale".
        activation: De et al. used "relu"; "mish" is smooth, which suits exact BAM's Hessian.

    Shapes: [n, in_channels, y, x], y and x at least 8 -> [n, num_classes].

    Example:
        >>> WideResNet(num_classes=5, depth=10, widen=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 5])
    """

    least_side = 8

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 1000,
        *,
        depth: int = 16,
        widen: int = 4,
        groups: int = 16,
        weight_standardisation: WeightStandardisation = "scale",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        check_arguments(in_channels, num_classes, weight_standardisation)
        _validate.count("widen", widen)
        _validate.count("groups", groups)
        if _validate.count("depth", depth, least=10) % 6 != 4 or depth > MOST_LAYERS:
            raise ArgumentError(
                f"depth must be 6 k + 4 (10, 16, 22, 28, 40, ...), at most {MOST_LAYERS}, got "
                f"{depth}"
            )
        self.stem = convolution(in_channels, 16, weight_standardisation=weight_standardisation)
        channels, blocks = 16, []
        for stage in range(3):
            for block in range((depth - 4) // 6):
                out = 16 * 2**stage * widen
                stride = 2 if block == 0 and stage > 0 else 1
                skip = block == 0
                blocks.append(
                    _PreActivationBlock(
                        channels, out, stride, skip, groups, weight_standardisation, activation
                    )
                )
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.activation = activation_module(activation)
        self.norm = group_norm(channels, most=groups)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        check_image(x, "wrn", self.least_side)
        x = self.norm(self.activation(self.blocks(self.stem(x))))
        logits: Tensor = self.head(x.mean((-2, -1)))
        return logits


class _PreActivationBlock(nn.Module):
    """x + f F(x), or e skip(x) + f F(x), with F and skip made of (activation, norm, convolution).

    e and f are 1/sqrt(fan-in) of the convolution before the sum if weights are scaled, else 1, so
    that the two sides of the sum have one scale. De et al. have them inside the standardisation.
    """

    def __init__(
        self,
        channels: int,
        out: int,
        stride: int,
        skip: bool,
        groups: int,
        weight_standardisation: WeightStandardisation,
        activation: Activation,
    ) -> None:
        super().__init__()

        def unit(fan: int, kernel: int, stride: int) -> list[nn.Module]:
            conv = convolution(
                fan, out, kernel, stride=stride, weight_standardisation=weight_standardisation
            )
            return [activation_module(activation), group_norm(fan, most=groups), conv]

        scaled = weight_standardisation == "scale"
        self.body = nn.Sequential(*unit(channels, 3, stride), *unit(out, 3, 1))
        self.body_factor = (9 * out) ** -0.5 if scaled else 1.0
        self.skip = nn.Sequential(*unit(channels, 1, stride)) if skip else nn.Identity()
        self.skip_factor = channels**-0.5 if scaled and skip else 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.skip_factor * self.skip(x) + self.body_factor * self.body(x)
        return y


class SmallCNN(nn.Module):
    """Three convolutions for small images: 8x8 digits, 28x28 MedMNIST, up to some 64x64.

    conv 16, pool - conv 32, pool - conv 64 - average pool to 2x2 - linear, each conv 3x3 without
    bias, then group norm, then the activation.

    Args:
        channels: of the three convolutions.
        weight_standardisation: of every convolution.
        activation: "mish", "tanh" or "relu".

    Shapes: [n, in_channels, y, x], y and x at least 4 -> [n, num_classes].

    Example:
        >>> SmallCNN(in_channels=1)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    least_side = 4

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        *,
        channels: Sequence[int] = (16, 32, 64),
        weight_standardisation: WeightStandardisation = "centre",
        activation: Activation = "mish",
    ) -> None:
        super().__init__()
        check_arguments(in_channels, num_classes, weight_standardisation)
        if len(channels) != 3:
            raise ArgumentError(f"channels must be three numbers, got {tuple(channels)}")
        a, b, c = (_validate.count("channels", k) for k in channels)

        def conv(fan: int, out: int) -> nn.Module:
            return conv_norm_act(
                fan, out, weight_standardisation=weight_standardisation, activation=activation
            )

        self.features = nn.Sequential(
            conv(in_channels, a), HalvingPool(),
            conv(a, b), HalvingPool(),
            conv(b, c), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(4 * c, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        check_image(x, "small-cnn", self.least_side)
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


class MLP(nn.Module):
    """Linear layers with activations between them, for vectors and flattened images.

    Args:
        in_features: numbers per sample: for images channels * height * width.
        hidden: widths of the hidden layers; none is logistic regression, initialised to zero.
        activation: "tanh" (bounded, which keeps per-sample gradients small), "mish" or "relu".

    Shapes: [n, ...] with in_features numbers per sample -> [n, num_classes].

    Example:
        >>> MLP(64, 10, hidden=(32,))(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int = 10,
        *,
        hidden: Sequence[int] = (128,),
        activation: Activation = "tanh",
    ) -> None:
        super().__init__()
        if len(hidden) > MOST_LAYERS:
            raise ArgumentError(f"hidden must be at most {MOST_LAYERS} widths, got {len(hidden)}")
        sizes = [_validate.count("in_features", in_features)]
        sizes += [_validate.count("hidden", width) for width in hidden]
        layers: list[nn.Module] = []
        for fan, width in pairwise(sizes):
            layers += [nn.Linear(fan, width), activation_module(activation)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], _validate.count("num_classes", num_classes))
        if not hidden:  # convex: there is no symmetry to break by random weights
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x.flatten(1)))
        return logits


class UNet(nn.Module):
    """A U-Net with group norm, which scores every pixel (Ronneberger et al. 2015).

    It halves the image ``depth`` times, then enlarges it by as much. Each level is two 3x3
    convolutions, each followed by group norm and activation; channels double with each halving (2x2
    average). On the way up the nearest pixels are repeated, joined with the level's features from
    the way down. The head is a 1x1 convolution. No layer mixes samples.

    Args:
        width: channels of the first level.
        depth: number of halvings.
        weight_standardisation: of every 3x3 convolution.
        activation: "mish", "tanh" or "relu".

    Shapes: [n, in_channels, y, x], y and x at least 8 -> [n, num_classes, y, x].

    Example:
        >>> UNet(in_channels=1, num_classes=3, width=8)(torch.zeros(2, 1, 20, 17)).shape
        torch.Size([2, 3, 20, 17])
    """

    least_side = 8

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 2,
        *,
        width: int = 16,
        depth: int = 2,
        weight_standardisation: WeightStandardisation = "centre",
        activation: Activation = "mish",
    ) -> None:
        super().__init__()
        check_arguments(in_channels, num_classes, weight_standardisation)
        if _validate.count("depth", depth) > 3:
            raise ArgumentError(f"depth must be 1, 2 or 3, got {depth}")
        channels = [_validate.count("width", width) * 2**k for k in range(1 + depth)]

        def level(fan: int, out: int) -> nn.Sequential:
            pair = ((fan, out), (out, out))
            return nn.Sequential(*(
                conv_norm_act(a, b, weight_standardisation=weight_standardisation,
                              activation=activation) for a, b in pair
            ))  # fmt: skip

        self.down = nn.ModuleList(
            level(a, b) for a, b in zip([in_channels, *channels], channels, strict=False)
        )
        self.up = nn.ModuleList(
            level(below + here, here)
            for here, below in zip(channels[-2::-1], channels[:0:-1], strict=True)
        )
        self.head = nn.Conv2d(channels[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        check_image(x, "unet", self.least_side)
        levels = [self.down[0](x)]
        for block in self.down[1:]:
            levels.append(block(F.avg_pool2d(levels[-1], 2)))
        y = levels.pop()
        for block in self.up:
            skip = levels.pop()
            larger = F.interpolate(y, size=skip.shape[-2:], mode="nearest")
            y = block(torch.cat([larger, skip], dim=1))
        scores: Tensor = self.head(y)
        return scores


def _scale_channels(channels: int, width: float) -> int:
    """Round channels * width to a multiple of 4, at least 4, so that groups divide it."""
    return max(4, 4 * round(channels * _validate.positive("width", width) / 4))


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
