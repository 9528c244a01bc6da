"""What training adds: parametrised weights, random draws, mixed precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from catalogue import ROWS, Example, Net, example, images, register
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from dpbam.nn.standardise import StandardisedConv2d

WIDTH = 5
BFLOAT16, FLOAT16 = 0.1, 0.02  # relative, on the worst parameter; eps is 8e-3 and 1e-3


def vectors() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 6), *between, nn.Tanh(), nn.Linear(6, 3))


# --- parametrised


@example
def weight_norm() -> Example:
    net = mlp()
    parametrizations.weight_norm(net[0])
    return Example(net, vectors())


@example
def weight_norm_of_a_convolution() -> Example:
    conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3), dim=1)
    return Example(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)), images())


@example
def orthogonal_weights() -> Example:
    net = mlp()
    parametrizations.orthogonal(net[0], orthogonal_map="cayley")
    return Example(net, vectors())


@example
def orthogonal_weights__matrix_exponential() -> Example:
    net = mlp()
    parametrizations.orthogonal(net[0], orthogonal_map="matrix_exp")
    return Example(net, vectors())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.softplus(weight)


@example
def own_parametrization() -> Example:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    parametrize.register_parametrization(net[2], "weight", Positive())
    return Example(net, vectors())


@example
def own_parametrization__twice() -> Example:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    parametrize.register_parametrization(net[0], "weight", Symmetric())
    parametrize.register_parametrization(net[0], "weight", Positive())
    return Example(net, vectors())


def _standardised(name: str, **options: Any) -> None:
    def made() -> Example:
        conv = StandardisedConv2d(3, 4, 3, **options)
        return Example(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)), images())

    made.__module__ = __name__
    register(name, made)


_standardised("weight standardisation, centred", scale=False)
_standardised("weight standardisation, scaled", scale=True)


@example
def weight_standardisation_by_hand() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        w = m.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return m.head(F.conv2d(x, w, m.conv.bias).tanh().flatten(1))

    return Example(Net(call, conv=nn.Conv2d(3, 4, 3), head=nn.Linear(64, 3)), images())


# --- draws


@example
def dropout_of_channels() -> Example:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(64, 3))
    return Example(net, images())


@example
def dropout_twice() -> Example:
    return Example(mlp(nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2)), vectors())


@example
def dropout_in_eval() -> Example:
    return Example(mlp(nn.Dropout(0.3)).eval(), vectors())


@example
def dropout_and_units_of_several_rows() -> Example:
    return Example(mlp(nn.Dropout(0.3)), vectors(), per_unit=2)


def timm_drop_path(x: Tensor, drop: float = 0.3) -> Tensor:
    """As timm writes it."""
    keep = 1 - drop
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


def torchvision_stochastic_depth(x: Tensor, p: float = 0.3) -> Tensor:
    """As torchvision writes it, mode "row"."""
    size = [x.shape[0]] + [1] * (x.ndim - 1)
    noise = torch.empty(size, dtype=x.dtype, device=x.device)
    noise = noise.bernoulli_(1 - p)
    noise.div_(1 - p)
    return x * noise


def _stochastic_depth(name: str, drop: Any) -> None:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        for layer in m.layers:
            h = h + drop(layer(h).tanh())
        return m.head(h)

    def made() -> Example:
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        net = Net(call, first=nn.Linear(WIDTH, 6), layers=layers, head=nn.Linear(6, 3))
        return Example(net, vectors())

    made.__module__ = __name__
    register(name, made)


_stochastic_depth("stochastic depth, as in timm", timm_drop_path)
_stochastic_depth("stochastic depth, as in torchvision", torchvision_stochastic_depth)


# --- mixed precision: the reference is the loop engine on the same model


def half(net: nn.Module, inputs: Tensor, dtype: torch.dtype) -> Example:
    tolerance = BFLOAT16 if dtype == torch.bfloat16 else FLOAT16
    return Example(net, inputs, dtype=dtype, tolerance=tolerance)


@example
def bfloat16() -> Example:
    return half(mlp(), vectors(), torch.bfloat16)


@example
def float16() -> Example:
    return half(mlp(), vectors(), torch.float16)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    )


@example
def bfloat16_group_norm() -> Example:
    return half(normed(), images(), torch.bfloat16)


@example
def float16_group_norm() -> Example:
    return half(normed(), images(), torch.float16)


@example
def float32() -> Example:
    return Example(mlp(), vectors(), dtype=torch.float32, tolerance=1e-4)


@example
def float32_convolutions() -> Example:
    return Example(normed(), images(), dtype=torch.float32, tolerance=1e-4)


@example
def autocast() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.body(x).float()

    return Example(Net(call, body=mlp()), vectors(), dtype=torch.float32, tolerance=BFLOAT16)


@example
def bfloat16_body_and_float32_head() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.body(x.bfloat16()).tanh().float())

    net = Net(call, body=nn.Linear(WIDTH, 6).bfloat16(), head=nn.Linear(6, 3))
    return Example(net, vectors(), dtype=None, tolerance=BFLOAT16)
