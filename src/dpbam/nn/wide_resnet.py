"""The paper's WideResNet (ImageNet32), after De et al. (2022).

WRN-16-4 has 3 003 736 parameters with 1000 classes, and 2 749 306 with 10.
"""

from __future__ import annotations

from torch import Tensor, nn

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.nn.blocks import (
    MOST_LAYERS,
    Activation,
    activation_module,
    check_arguments,
    check_image,
    group_norm,
)
from dpbam.nn.standardise import WeightStandardisation, convolution


class WideResNet(nn.Module):
    """WideResNet-depth-widen after De et al. (2022): group norm, standardised weights, ReLU.

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
        groups: of every group norm, at most (see :func:`~dpbam.nn.blocks.group_count`).
        weight_standardisation: of every convolution; De et al. used "scale".
        activation: De et al. used "relu"; "mish" is smooth, which suits exact BAM's Hessian.

    Shapes: [n, in_channels, y, x], y and x at least 8 -> [n, num_classes].

    Example:
        >>> import torch
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
