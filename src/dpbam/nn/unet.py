"""A U-Net with group norm, for segmentation (Ronneberger et al. 2015)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.nn.blocks import Activation, check_arguments, check_image, conv_norm_act
from dpbam.nn.standardise import WeightStandardisation


class UNet(nn.Module):
    """Scores every pixel: halves the image ``depth`` times, then enlarges it by as much.

    Each level is two 3x3 convolutions, each followed by group norm and activation; channels double
    with each halving (2x2 average). On the way up the nearest pixels are repeated, joined with the
    level's features from the way down. The head is a 1x1 convolution. No layer mixes samples.

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
