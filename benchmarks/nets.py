"""The nets of the benchmarks, with data: ten kinds of net, small enough for one processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam.nn.models import ResNet9, WideResNet


class Residual(nn.Module):
    """ResNet's basic block with group norm."""

    def __init__(self, fan: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, out), nn.GroupNorm(8, out)
        self.short = nn.Conv2d(fan, out, 1, stride, bias=False) if fan != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


def resnet18(width: int = 32) -> nn.Module:
    """ResNet-18 for small images: two blocks each of 1, 2, 4 and 8 times ``width`` channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width)]
    fan = width
    for k in range(4):
        out = width * 2**k
        layers += [Residual(fan, out, 1 if k == 0 else 2), Residual(out, out, 1)]
        fan = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan, 10))


class LastAxis(nn.Module):
    """Apply a module with the channels as the last axis."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.pointwise = LastAxis(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pointwise(self.depthwise(x))


def convnext() -> nn.Module:
    """Patches of 2x2, two blocks of 48 channels, two of 96."""
    return nn.Sequential(
        nn.Conv2d(3, 48, 2, 2), LastAxis(nn.LayerNorm(48)), ConvNeXtBlock(48), ConvNeXtBlock(48),
        LastAxis(nn.LayerNorm(48)), nn.Conv2d(48, 96, 2, 2), ConvNeXtBlock(96), ConvNeXtBlock(96),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(96), nn.Linear(96, 10),
    )  # fmt: skip


class ViT(nn.Module):
    """Patches of 4x4 of a 32x32 image, torch's own encoder layers, mean over the patches."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Embedding(64, width)
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
        x = x + self.position(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class GPTBlock(nn.Module):
    """GPT-2's block: packed projection, causal attention, GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, width: int = 128, depth: int = 2, positions: int = 512) -> None:
        super().__init__()
        vocabulary = 256
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(GPTBlock(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.token(ids) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def _double(fan: int, out: int) -> nn.Module:
    parts: list[nn.Module] = []
    for i in (fan, out):
        parts += [nn.Conv2d(i, out, 3, padding=1), nn.GroupNorm(8, out), nn.ReLU()]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """Three levels, transposed convolutions up, two classes per pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        a, b, c = width, 2 * width, 4 * width
        self.down1, self.down2, self.bottom = _double(3, a), _double(a, b), _double(b, c)
        self.up2, self.up1 = nn.ConvTranspose2d(c, b, 2, 2), nn.ConvTranspose2d(b, a, 2, 2)
        self.join2, self.join1, self.head = _double(c, b), _double(b, a), nn.Conv2d(a, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(x)
        low = self.down2(F.max_pool2d(high, 2))
        y = self.up2(self.bottom(F.max_pool2d(low, 2)))
        y = self.up1(self.join2(torch.cat([y, low], 1)))
        return self.head(self.join1(torch.cat([y, high], 1)))


class LSTM(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.token, self.lstm = nn.Embedding(256, width), nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(ids))[0][:, -1])


class MBConv(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze-and-excite, project."""

    def __init__(self, fan: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide, few = 4 * fan, max(4, fan // 4)
        self.expand = nn.Sequential(
            nn.Conv2d(fan, wide, 1, bias=False), nn.GroupNorm(8, wide), nn.SiLU()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            nn.GroupNorm(8, wide),
            nn.SiLU(),
        )
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, few, 1), nn.SiLU(), nn.Conv2d(few, wide, 1),
            nn.Sigmoid(),
        )  # fmt: skip
        self.project = nn.Sequential(nn.Conv2d(wide, out, 1, bias=False), nn.GroupNorm(8, out))
        self.skips = fan == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.excite(y))
        return x + y if self.skips else y


def efficientnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.GroupNorm(8, 16), nn.SiLU(),
        MBConv(16, 16, 3, 1), MBConv(16, 24, 3, 2), MBConv(24, 24, 5, 1), MBConv(24, 40, 5, 2),
        MBConv(40, 40, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10),
    )  # fmt: skip


class InvertedResidual(nn.Module):
    """MobileNetV2's block with group norm: expand, depthwise, project."""

    def __init__(self, fan: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 6 * fan
        self.layers = nn.Sequential(
            nn.Conv2d(fan, wide, 1, bias=False), nn.GroupNorm(8, wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.GroupNorm(8, wide),
            nn.ReLU6(), nn.Conv2d(wide, out, 1, bias=False), nn.GroupNorm(8, out),
        )  # fmt: skip
        self.skips = fan == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.skips else y


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU6(),
        InvertedResidual(16, 24, 2), InvertedResidual(24, 24, 1), InvertedResidual(24, 32, 2),
        InvertedResidual(32, 32, 1), InvertedResidual(32, 64, 2), InvertedResidual(64, 64, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class BERT(nn.Module):
    """Token and position embeddings, torch's encoder layers, a class from the first token."""

    def __init__(self, vocabulary: int = 8192, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(depth)
        )
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.token(ids) + self.position(places)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pool(x[:, 0]).tanh())


class PointNet(nn.Module):
    """The same layers for each of 256 points, the largest value over the points, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.GroupNorm(8, 64), nn.ReLU(), nn.Conv1d(64, 128, 1),
            nn.GroupNorm(8, 128), nn.ReLU(), nn.Conv1d(128, 512, 1),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(-1))


class LoRA(nn.Module):
    """A frozen linear layer plus a trained update of low rank."""

    def __init__(self, fan: int, out: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(fan, out).requires_grad_(False)
        self.down, self.up = nn.Linear(fan, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2 * self.up(self.down(x))


class LoRABlock(nn.Module):
    """A frozen transformer block with an update of each of its linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        self.q, self.k, self.v, self.out = (LoRA(width, width) for _ in range(4))
        self.up, self.down = LoRA(width, 4 * width), LoRA(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm1(x)
        q, k, v = (
            layer(z).unflatten(-1, (-1, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LoRAEncoder(nn.Module):
    """A frozen encoder of 64 patches with updates of rank 8, and a trained head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4).requires_grad_(False)
        self.blocks = nn.Sequential(*(LoRABlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


def convolutions() -> nn.Module:
    """Ten convolutions 16 to 16 with group norm and ReLU, one linear layer: 42 parameters."""
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def _layers(*sizes: int) -> nn.Module:
    """Linear layers of these sizes with ReLU between."""
    layers: list[nn.Module] = []
    for fan, out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _vectors(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, size), torch.arange(n) % 10)


def _images(n: int, side: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, side, side), torch.arange(n) % 10


def _pixels(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, 32, 32)
    return x, (x[:, 0] > 0).long()


def _text(n: int, length: int) -> Tensor:
    return torch.randint(256, (n, length))


def _next_tokens(n: int) -> tuple[Tensor, Tensor]:
    ids = _text(n, 129)
    return ids[:, :-1], ids[:, 1:]


@dataclass(frozen=True)
class Net:
    model: Callable[[], nn.Module]
    batch: int
    data: Callable[[int], tuple[Tensor, Tensor]] = _images


NETS = {
    "resnet9": Net(lambda: ResNet9(3, 10, width=0.5), 16),
    "wrn-16-4": Net(
        lambda: WideResNet(3, 10, weight_standardisation="centre", activation="mish"), 8,
        lambda n: _images(n, 16),
    ),
    "resnet18": Net(resnet18, 8),
    "convnext": Net(convnext, 16),
    "vit": Net(ViT, 16),
    "gpt2": Net(GPT2, 8, _next_tokens),
    "unet": Net(UNet, 16, _pixels),
    "lstm": Net(LSTM, 32, lambda n: (_text(n, 32), torch.arange(n) % 10)),
    "mlp": Net(lambda: _layers(784, 256, 256, 10), 4096, _vectors(784)),
    "efficientnet": Net(efficientnet, 32),
}  # fmt: skip
TEN = tuple(NETS)
NETS["resnet9-64"] = Net(lambda: ResNet9(3, 10), 32)
NETS["resnet9-16"] = Net(lambda: ResNet9(3, 10, width=0.25), 64)
NETS["mlp-tiny"] = Net(lambda: _layers(32, 64, 10), 64, _vectors(32))
NETS["mlp-large"] = Net(lambda: _layers(784, 2048, 2048, 1792, 10), 32, _vectors(784))  # 9.5 M
NETS["mobilenet"] = Net(mobilenet, 16)
NETS["bert"] = Net(BERT, 32, lambda n: (torch.randint(8192, (n, 64)), torch.arange(n) % 10))
NETS["pointnet"] = Net(PointNet, 16, lambda n: (torch.randn(n, 3, 256), torch.arange(n) % 10))
NETS["lora-small"] = Net(lambda: LoRAEncoder(64, 2), 8)
NETS["lora-large"] = Net(lambda: LoRAEncoder(256, 4), 8)
NETS["convolutions"] = Net(
    convolutions, 64, lambda n: (torch.randn(n, 16, 8, 8), torch.arange(n) % 10)
)


def loss(output: Any, targets: Tensor) -> Tensor:
    """Cross entropy of each sample: the mean over its pixels or tokens."""
    each = F.cross_entropy(output, targets, reduction="none")
    return each if each.ndim == 1 else each.flatten(1).mean(1)


def make(net: str, rows: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return NETS[net].model(), *NETS[net].data(rows)
