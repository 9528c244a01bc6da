"""Small models of every kind, each with a batch for it: (model, inputs, targets)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam.nn.models import MLP, ResNet9, WideResNet

Made = tuple[nn.Module, Any, Tensor]
ROWS = 8
ZOO: dict[str, Callable[[], Made]] = {}


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    ZOO[make.__name__] = make
    return make


def labels(classes: int = 3) -> Tensor:
    return torch.arange(ROWS) % classes


def images(channels: int = 3, side: int = 8) -> Tensor:
    return torch.randn(ROWS, channels, side, side)


@model
def mlp() -> Made:
    return MLP(6, 3, hidden=(8, 8)), torch.randn(ROWS, 6), labels()


@model
def resnet9() -> Made:
    net = ResNet9(3, 3, width=0.125, weight_standardisation="centre", scale_norm=True)
    return net, images(), labels()


@model
def resnet9_scaled() -> Made:
    return ResNet9(3, 3, width=0.125, weight_standardisation="scale"), images(), labels()


@model
def wide_resnet() -> Made:
    net = WideResNet(3, 3, depth=10, widen=1, groups=4, activation="mish")
    return net, images(), labels()


@model
def wide_resnet_16_4() -> Made:
    net = WideResNet(3, 3, depth=16, widen=4, groups=4, activation="mish")
    return net, images(), labels()


@model
def vgg() -> Made:
    layers: list[nn.Module] = []
    for fan, out in ((3, 6), (6, 8), (8, 8)):
        layers += [nn.Conv2d(fan, out, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return net, images(), labels()


class InvertedResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 1, bias=False),
            nn.GroupNorm(2, 2 * channels),
            nn.ReLU6(),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels),
            nn.InstanceNorm2d(2 * channels, affine=True),
            nn.Hardswish(),
            nn.Conv2d(2 * channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@model
def mobilenet() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        InvertedResidual(4),
        InvertedResidual(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return net, images(), labels()


class ViT(nn.Module):
    """Class token, position embedding, layer scale, torch's own encoder layers."""

    def __init__(self, width: int = 8, patch: int = 4, side: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.rand(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = x + self.scale * layer(x)
        return self.head(self.norm(x)[:, 0])


@model
def vit() -> Made:
    return ViT(), images(), labels()


class TextTransformer(nn.Module):
    """Tied input and output embeddings, learnt positions, causal attention, batch second."""

    def __init__(self, words: int = 11, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.places = nn.Embedding(length + 3, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        x = self.layer(x.transpose(0, 1), src_mask=mask).transpose(0, 1)
        return self.out(x)


@model
def text_transformer() -> Made:
    ids = torch.randint(0, 11, (ROWS, 5))
    return TextTransformer(), ids, torch.randint(0, 11, (ROWS, 5))


@model
def conv1d() -> Made:
    net = nn.Sequential(
        nn.Conv1d(2, 6, 5, padding="same", padding_mode="circular"),
        nn.GELU(),
        nn.AvgPool1d(2),
        nn.Conv1d(6, 6, 3, padding="same", dilation=2),
        nn.RMSNorm(8),
        nn.Flatten(),
        nn.Linear(48, 3),
    )
    return net, torch.randn(ROWS, 2, 16), labels()


class Reused(nn.Module):
    """A block called three times, and a weight used bare and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.block = nn.Linear(5, 6), nn.Linear(6, 6)
        self.free = nn.Parameter(torch.randn(6, 6) / 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for _ in range(3):
            x = x + torch.tanh(self.block(x))
        return self.head(torch.tanh(x @ self.free) @ self.free.t())


@model
def reused_block() -> Made:
    return Reused(), torch.randn(ROWS, 5), labels()


class TwoInputs(nn.Module):
    """Keyword inputs, a bilinear layer, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Conv1d(2, 5, 3)
        self.both, self.side = nn.Bilinear(5, 5, 3), nn.Linear(5, 3)

    def forward(self, vector: Tensor, series: Tensor) -> Tensor:
        a, b = self.left(vector).tanh(), self.right(series).mean(2)
        first, second = self.both(a, b), self.side(a)
        return first + second.tanh()


@model
def multi_input() -> Made:
    inputs = {"vector": torch.randn(ROWS, 4), "series": torch.randn(ROWS, 2, 7)}
    return TwoInputs(), inputs, labels()


@model
def dropout() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.Dropout2d(0.3), nn.SiLU(), nn.Flatten(), nn.Dropout(0.4),
        nn.Linear(216, 3),
    )  # fmt: skip
    return net, images(), labels()


class UNet(nn.Module):
    """Down and up with a transposed convolution, 3-d in the middle, one output a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect")
        self.middle = nn.Conv3d(1, 1, 3, padding=1, bias=False)
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Conv2d(7, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        deep = F.softplus(self.middle(self.down(x)[:, None]))[:, 0]
        return self.head(torch.cat([x, self.up(deep)], 1))


@model
def unet() -> Made:
    return UNet(), images(), torch.randint(0, 3, (ROWS, 8, 8))


class GatedMixture(nn.Module):
    """Parameters inside ordinary code: a temperature, PReLU, einsum; frozen and unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(3, 5, 4) / 2)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.act = nn.PReLU(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.only_bias = nn.Linear(4, 3)
        self.only_bias.weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("nd,hde->nhe", x, self.heads).softmax(1).sum(2)
        x = self.frozen(self.act(x[:, :4] * self.temperature.exp()))
        return mixed + self.only_bias(x)


@model
def ordinary_code() -> Made:
    return GatedMixture(), torch.randn(ROWS, 5), labels()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy a row, the mean over a row's positions."""
    if output.ndim == 3:  # [n, positions, classes]
        output = output.transpose(1, 2)
    value = F.cross_entropy(output, target, reduction="none")
    return value if value.ndim == 1 else value.flatten(1).mean(1)
