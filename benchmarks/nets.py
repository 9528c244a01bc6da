"""The nets of the benchmarks: name -> (model, images, labels, loss)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpbam.nn.models import ResNet9
from dpbam.nn.wide_resnet import WideResNet


class SmallViT(nn.Module):
    """Patches of 4x4 of a 32x32 image, width 128, 4 layers of 4 heads."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


NETS = {
    "resnet9-16": lambda: ResNet9(3, 10, width=0.25, weight_standardisation="centre"),
    "resnet9-64": lambda: ResNet9(3, 10, width=1.0, weight_standardisation="centre"),
    "resnet9-64-plain": lambda: ResNet9(3, 10, width=1.0, weight_standardisation="none"),
    "wrn-16-4": lambda: WideResNet(
        3, 10, depth=16, widen=4, weight_standardisation="centre", activation="mish"
    ),
    "vit": SmallViT,
}
LOSS = nn.CrossEntropyLoss(reduction="none")


def make(net: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return NETS[net](), torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
