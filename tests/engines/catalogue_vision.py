"""Convolutional models and others for images."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import zoo
from catalogue import ROWS, Example, Net, example, images, parameter, register
from torch import Tensor, nn

from dpbam.nn.models import WideResNet


def _from_zoo(name: str) -> Callable[[], Example]:
    def made() -> Example:
        model, inputs, targets = zoo.ZOO[name]()
        rows = torch.utils._pytree.tree_map(lambda t: t[:ROWS], (inputs, targets))
        return Example(model, *rows)

    made.__module__ = __name__
    return made


for _name in zoo.ZOO:
    if not _name.startswith("wide_resnet"):  # a narrow one follows
        register(_name, _from_zoo(_name))


def classifier(*layers: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


@example
def wide_resnet_10_1() -> Example:
    return Example(WideResNet(3, 3, depth=10, widen=1, groups=4), images(side=8))


def _convolution(name: str, shape: tuple[int, ...], *layers: Callable[[], nn.Module]) -> None:
    def made() -> Example:
        x = torch.randn(ROWS, *shape)
        body = nn.Sequential(*(layer() for layer in layers))
        features = body(x).flatten(1).shape[1]
        return Example(classifier(body, features=features), x)

    made.__module__ = __name__
    register(name, made)


_convolution("conv2d stride", (3, 7, 7), lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Tanh)
_convolution("conv3d", (2, 4, 4, 4), lambda: nn.Conv3d(2, 3, 3, padding=1), nn.GELU)
_convolution("conv1d grouped", (4, 9), lambda: nn.Conv1d(4, 6, 3, groups=2), nn.Tanh)
_convolution("conv2d grouped", (4, 5, 5), lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.SiLU)
_convolution("conv2d depthwise", (4, 5, 5), lambda: nn.Conv2d(4, 8, 3, groups=4), nn.SiLU)
_convolution("conv3d depthwise", (2, 4, 4, 4), lambda: nn.Conv3d(2, 2, 2, groups=2), nn.Tanh)
_convolution("conv2d dilated", (2, 8, 8), lambda: nn.Conv2d(2, 3, 3, dilation=(2, 3)), nn.Tanh)
_convolution("conv2d same", (2, 5, 6), lambda: nn.Conv2d(2, 3, (2, 3), padding="same"), nn.Tanh)
_convolution("conv2d replicate", (2, 5, 5),
             lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), nn.Tanh)  # fmt: skip
_convolution("transposed 1d", (3, 5), lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), nn.Tanh)
_convolution("transposed 2d grouped", (4, 4, 4),
             lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
             nn.Tanh)  # fmt: skip
_convolution(
    "transposed 3d", (2, 3, 3, 3), lambda: nn.ConvTranspose3d(2, 2, 2, dilation=2), nn.Tanh
)
_convolution("pooling", (3, 8, 8), lambda: nn.Conv2d(3, 4, 3), lambda: nn.MaxPool2d(2),
             lambda: nn.LPPool2d(2, 2), lambda: nn.AdaptiveAvgPool2d(1))  # fmt: skip
_convolution("local response norm", (4, 5, 5), lambda: nn.Conv2d(4, 4, 3),
             lambda: nn.LocalResponseNorm(2))  # fmt: skip
_convolution("unfold", (2, 5, 5), lambda: nn.Unfold(3), lambda: nn.Linear(9, 4), nn.Tanh)
_convolution("pixel shuffle", (2, 4, 4), lambda: nn.Conv2d(2, 8, 3, padding=1),
             lambda: nn.PixelShuffle(2), lambda: nn.Conv2d(2, 2, 3), nn.Tanh)  # fmt: skip
_convolution("group norm first", (4, 5, 5), lambda: nn.GroupNorm(2, 4),
             lambda: nn.Conv2d(4, 3, 3), nn.Tanh)  # fmt: skip
_convolution("instance norm first", (3, 5, 5), lambda: nn.InstanceNorm2d(3, affine=True),
             lambda: nn.Conv2d(3, 3, 3), nn.Tanh)  # fmt: skip
_convolution("layer norm first", (3, 5), lambda: nn.LayerNorm([3, 5]), lambda: nn.Linear(5, 4),
             nn.Tanh)  # fmt: skip
_convolution("RMS norm first", (3, 5), lambda: nn.RMSNorm(5), lambda: nn.Linear(5, 4), nn.Tanh)
_convolution("PReLU", (3, 5, 5), lambda: nn.Conv2d(3, 4, 3), lambda: nn.PReLU(4),
             lambda: nn.Conv2d(4, 4, 2), nn.PReLU)  # fmt: skip
_convolution("GLU", (4, 5, 5), lambda: nn.Conv2d(4, 6, 3), lambda: nn.GLU(1))


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@example
def group_norm_after_a_frozen_layer() -> Example:
    net = classifier(
        _frozen(nn.Conv2d(3, 4, 3)), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3),
        features=16,
    )  # fmt: skip
    return Example(net, images())


@example
def instance_norm_after_a_frozen_layer() -> Example:
    norm = nn.InstanceNorm2d(4, affine=True)
    net = classifier(_frozen(nn.Conv2d(3, 4, 3)), norm, nn.Tanh(), features=64)
    return Example(net, images())


@example
def frozen_half() -> Example:
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())
    return Example(classifier(_frozen(first), nn.Conv2d(4, 4, 3), nn.Tanh(), features=16), images())


@example
def frozen_head() -> Example:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), _frozen(nn.Linear(64, 3)))
    return Example(net, images())


@example
def biases_only() -> Example:
    net = classifier(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), features=64)
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return Example(net, images())


@example
def norms_only() -> Example:
    net = classifier(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), features=64)
    for p in net.parameters():
        p.requires_grad_(False)
    net[1].requires_grad_(True)
    return Example(net, images())


@example
def batch_norm_in_eval() -> Example:
    net = classifier(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), features=64)
    net[1].eval()
    return Example(net, images())


@example
def squeeze_excite() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.conv(x)
        weight = m.excite(m.squeeze(h.mean((2, 3))).relu()).sigmoid()
        return m.head((h * weight[:, :, None, None]).flatten(1))

    parts = {"conv": nn.Conv2d(3, 4, 3), "squeeze": nn.Linear(4, 2), "excite": nn.Linear(2, 4)}
    return Example(Net(call, **parts, head=nn.Linear(64, 3)), images())


@example
def convnext_block() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
        h = m.scale * m.narrow(F.gelu(m.widen(h)))
        return m.head((x + h.permute(0, 3, 1, 2)).mean((2, 3)))

    return Example(
        Net(call, depthwise=nn.Conv2d(3, 3, 5, padding=2, groups=3), norm=nn.LayerNorm(3),
            widen=nn.Linear(3, 8), narrow=nn.Linear(8, 3), scale=nn.Parameter(torch.zeros(3)),
            head=nn.Linear(3, 3)), images(),
    )  # fmt: skip


@example
def dense_blocks() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return m.head(x.mean((2, 3)))

    layers = nn.ModuleList(nn.Conv2d(3 + 2 * k, 2, 3, padding=1) for k in range(3))
    return Example(Net(call, layers=layers, head=nn.Linear(9, 3)), images())


@example
def inception() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        branches = [m.one(x), m.three(x), m.pooled(F.max_pool2d(x, 3, 1, 1))]
        return m.head(F.relu(torch.cat(branches, 1)).flatten(1))

    return Example(
        Net(call, one=nn.Conv2d(3, 2, 1), three=nn.Conv2d(3, 2, 3, padding=1),
            pooled=nn.Conv2d(3, 2, 1), head=nn.Linear(6 * 36, 3)), images(),
    )  # fmt: skip


@example
def mlp_mixer() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        x = m.patch(x).flatten(2).transpose(1, 2)
        x = x + m.tokens(m.norm(x).transpose(1, 2)).transpose(1, 2)
        return m.head((x + m.channels(m.norm(x)).tanh()).mean(1))

    return Example(
        Net(call, patch=nn.Conv2d(3, 4, 3, stride=3), tokens=nn.Linear(4, 4),
            channels=nn.Linear(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 3)), images(),
    )  # fmt: skip


@example
def shifted_windows() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = m.embed(torch.roll(x, (1, 1), (2, 3)).permute(0, 2, 3, 1))
        windows = x.reshape(n, 2, 3, 2, 3, 4).transpose(2, 3).reshape(n * 4, 9, 4)
        mixed, _ = m.attention(windows, windows, windows, need_weights=False)
        return m.head(mixed.reshape(n, 36, 4).mean(1))

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return Example(
        Net(call, embed=nn.Linear(3, 4), attention=attention, head=nn.Linear(4, 3)), images()
    )


@example
def upsampling_segmentation() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        deep = F.interpolate(m.down(x).relu(), size=x.shape[2:], mode="bilinear")
        return m.head(torch.cat([x, deep], 1))

    parts = {"down": nn.Conv2d(3, 4, 3, stride=2), "head": nn.Conv2d(7, 3, 1)}
    return Example(Net(call, **parts), images(), torch.randint(0, 3, (ROWS, 6, 6)))


@example
def feature_pyramid() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        fine = m.first(x).relu()
        coarse = m.second(F.avg_pool2d(fine, 2)).relu()
        merged = m.lateral(fine) + F.interpolate(m.top(coarse), scale_factor=2)
        return m.head(merged).mean((2, 3))

    return Example(
        Net(call, first=nn.Conv2d(3, 4, 3, padding=1), second=nn.Conv2d(4, 5, 3, padding=1),
            lateral=nn.Conv2d(4, 4, 1), top=nn.Conv2d(5, 4, 1), head=nn.Conv2d(4, 3, 3)),
        images(),
    )  # fmt: skip


@example
def autoencoder() -> Example:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=3), nn.Tanh(), nn.ConvTranspose2d(4, 3, 3, stride=3)
    )
    x = images()
    return Example(net, x, x.double(), lambda out, y: (out - y).square().flatten(1).mean(1))


@example
def siamese_pairs() -> Example:
    def call(m: Net, a: Tensor, b: Tensor) -> Tensor:
        return m.head((m.encoder(a) - m.encoder(b)).abs())

    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5))
    return Example(Net(call, encoder=encoder, head=nn.Linear(5, 3)), (images(), images()))


@example
def conditioned_by_FiLM() -> Example:
    def call(m: Net, image: Tensor, context: Tensor) -> Tensor:
        scale, shift = m.film(context).chunk(2, 1)
        h = m.conv(image) * scale[..., None, None] + shift[..., None, None]
        return m.head(h.relu().mean((2, 3)))

    parts = {"conv": nn.Conv2d(3, 4, 3), "film": nn.Linear(5, 8), "head": nn.Linear(4, 3)}
    return Example(Net(call, **parts), {"image": images(), "context": torch.randn(ROWS, 5)})


@example
def fourier_layer() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        modes = torch.fft.rfft2(m.lift(x))
        weight = torch.view_as_complex(m.weight)
        x = torch.fft.irfft2(torch.einsum("nchw,cd->ndhw", modes, weight), s=x.shape[2:])
        return m.head(F.gelu(x).mean((2, 3)))

    return Example(
        Net(call, lift=nn.Conv2d(3, 4, 1), weight=parameter(4, 4, 2), head=nn.Linear(4, 3)),
        images(),
    )


@example
def spatial_transformer() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        theta = m.locate(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return m.head(m.conv(F.grid_sample(x, grid, align_corners=False)).flatten(1))

    parts = {"locate": nn.Linear(108, 6), "conv": nn.Conv2d(3, 2, 3), "head": nn.Linear(32, 3)}
    return Example(Net(call, **parts), images())
