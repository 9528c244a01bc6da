"""Worlds to attack: records, some of them canaries, and what an attacker reads after each step.

Gradient canaries
: the strongest attacker of a step: it chooses the gradients themselves and sees every release. The
  probe is a linear model with a linear loss, L_i(theta) = <theta, x_i>, so a record's gradient is
  the record. A canary is a Dirac (one coordinate) or a random direction, ten times as long as C.

Input canaries
: an attacker who only places images: mislabelled, or blank with some label. It reads the loss of
  the final model on its canary (black box).

Absence is real: the sampler draws over all n units, and rows of absent canaries never reach the
oracle. Poisson sampling includes units independently, so that is the data set without them, at the
same q: neighbours by adding or removing one unit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbam.errors import ArgumentError
from dpbam.nn import build_model

GRADIENT_CANARIES = ("dirac", "random")
INPUT_CANARIES = ("mislabelled", "blank")
_LENGTH = 10.0  # of a gradient canary, in units of C: clipping has to bring it down


class World:
    """What is attacked. ``inputs`` and ``targets`` have n rows, the last m of them canaries."""

    inputs: Tensor
    targets: Tensor
    model: nn.Module  # with the initial weights

    def loss(self, output: Any, targets: Any) -> Tensor:
        """One value per row."""
        raise NotImplementedError

    def read(self, scores: Tensor) -> Tensor:
        """The m scores after one more step; ``.grad`` holds its release."""
        return scores

    def end(self, scores: Tensor) -> Tensor:
        """The m scores after the last step."""
        return scores


class Probe(nn.Module):
    """<theta, x> with theta in three parameters: [N, d] -> [N]."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        third = dimension // 3
        self.sizes = [third, third, dimension - 2 * third]
        self.parts = nn.ModuleList(nn.Linear(k, 1, bias=False) for k in self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the three parts' inner products."""
        pieces: tuple[Tensor, ...] = x.split_with_sizes(self.sizes, dim=1)
        values = [part(piece) for part, piece in zip(self.parts, pieces, strict=True)]
        return torch.cat(values, dim=1).sum(1)

    def gradient(self) -> Tensor:
        """.grad of all three as one vector [d]."""
        return torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])


class GradientWorld(World):
    """n records with gradients of length C, the last m of them canaries.

    Args:
        kind: "dirac" or "random".
        n: records in all.
        canaries: m.
        clip_norm: C.
        coordinate: the first canary's, if it is a Dirac.
    """

    def __init__(
        self, kind: str, n: int, canaries: int, clip_norm: float, *, coordinate: int = 0
    ) -> None:
        dimension = max(24, 2 * canaries)
        generator = torch.Generator().manual_seed(0)  # public: the attacker knows all records
        self.directions = _directions(kind, canaries, dimension, coordinate, generator)
        others = torch.randn(n - canaries, dimension, generator=generator)
        others -= (others @ self.directions.T) @ self.directions  # what the attacker subtracts
        others *= clip_norm / others.norm(dim=1, keepdim=True)
        self.inputs = torch.cat([others, _LENGTH * clip_norm * self.directions])
        self.targets = torch.ones(n)
        self.model = self.probe = Probe(dimension)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """<theta, x_i>."""
        return output * targets

    def read(self, scores: Tensor) -> Tensor:
        """Add <released gradient, v_j>."""
        return scores + self.directions @ self.probe.gradient()


def _directions(
    kind: str, count: int, dimension: int, coordinate: int, generator: torch.Generator
) -> Tensor:
    """Orthonormal rows [m, d]."""
    if kind == "dirac":
        return torch.eye(dimension).roll(-coordinate, 0)[:count]
    drawn = torch.randn(dimension, count, generator=generator)
    basis: Tensor = torch.linalg.qr(drawn)[0]
    return basis.T.contiguous()


class InputWorld(World):
    """Handwritten digits, the last m of them canaries; a small network.

    Args:
        kind: "mislabelled" or "blank".
        n: records in all.
        canaries: m.
    """

    def __init__(self, kind: str, n: int, canaries: int) -> None:
        from dpbam.data import load_pair, to_float

        train, test = load_pair("digits")
        if not canaries <= n <= len(train):
            raise ArgumentError(f"n must lie between the canaries and {len(train)}, got {n}")
        images, labels = train.batch(torch.arange(n))
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(test), (canaries,), generator=generator)
        false_images, true_labels = test.batch(drawn)
        if kind == "blank":
            grey = torch.randint(256, (canaries, 1, 1, 1), generator=generator, dtype=torch.uint8)
            false_images = grey.expand_as(false_images)
        wrong = torch.randint(1, 10, (canaries,), generator=generator)
        images[n - canaries :], labels[n - canaries :] = false_images, (true_labels + wrong) % 10
        self.inputs, self.targets = to_float(images), labels
        self.model = build_model("mlp", in_channels=1, image_size=8, num_classes=10, seed=0)
        self._own = slice(n - canaries, n)
        self._before = self._losses()

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(output, targets, reduction="none")

    def end(self, scores: Tensor) -> Tensor:
        """How far the canary's loss has fallen."""
        return self._before - self._losses()

    @torch.no_grad()
    def _losses(self) -> Tensor:
        return self.loss(self.model(self.inputs[self._own]), self.targets[self._own])


def make_world(kind: str, n: int, canaries: int, clip_norm: float, coordinate: int = 0) -> World:
    """The world for this kind of canary."""
    if kind in GRADIENT_CANARIES:
        return GradientWorld(kind, n, canaries, clip_norm, coordinate=coordinate)
    return InputWorld(kind, n, canaries)
