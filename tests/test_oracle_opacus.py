"""Agreement with a peer: Opacus's per-sample gradients, clipped and summed by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn

from support import ENGINES, flat, one_step, quiet_plan

N, CLIP_NORM, L = 6, 0.7, 10
# before 1.6 Opacus allocates an embedding's grad_sample in float32, whatever the model's precision
DOUBLE_EMBEDDING = tuple(map(int, version("opacus").split(".")[:2])) >= (1, 6)


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return net, torch.randn(N, 3, 8, 8), torch.randint(0, 5, (N,))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 5))
    return net, torch.randn(N, 6), torch.randint(0, 5, (N,))


class Block(nn.Module):
    """Layer-normed self-attention and feed-forward, one head, in plain layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.wide, self.narrow = nn.Linear(width, 16), nn.Linear(16, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        scores = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        x = x + scores.softmax(-1) @ self.v(h)
        x = x + self.narrow(nn.functional.gelu(self.wide(self.after(x))))
        return self.head(x.mean(1))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    return Block(), torch.randn(N, 5, 8), torch.randint(0, 5, (N,))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


def embedding() -> tuple[nn.Module, Tensor, Tensor]:
    return Words(), torch.randint(0, 20, (N, 7)), torch.randint(0, 5, (N,))


def opacus_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """sum_i g_i / max(1, |g_i| / C) from Opacus's grad_sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's own deprecations
        from opacus import GradSampleModule

        wrapped = GradSampleModule(model, loss_reduction="sum")
        # Opacus sets a cudnn flag in the backward pass; torch's operator database, which other
        # tests import, forbids that to the whole process
        with torch.backends.__allow_nonbracketed_mutation():
            nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
    each = torch.cat([p.grad_sample.flatten(1) for p in wrapped.parameters()], dim=1).double()
    wrapped.to_standard_module()
    return (each / (each.norm(dim=1, keepdim=True) / CLIP_NORM).clamp(min=1)).sum(0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "make",
    [
        cnn,
        mlp,
        transformer,
        pytest.param(
            embedding,
            marks=pytest.mark.skipif(
                not DOUBLE_EMBEDDING, reason="Opacus below 1.6 has no embedding in float64"
            ),
        ),
    ],
)
def test_clipped_sums_agree_with_opacus(
    engine: str, make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
) -> None:
    model, x, y = make()
    model = model.double()
    x = x.double() if x.is_floating_point() else x
    expected = opacus_sum(model, x, y)
    found = flat(one_step(model, quiet_plan(CLIP_NORM), x, y, engine=engine)) * L
    assert float((found - expected).norm()) < 1e-10 * float(expected.norm())
