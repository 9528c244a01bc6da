"""Worlds to attack: records, some of them canaries, and what an attacker reads after each step.

Gradient canaries
: the strongest attacker of a step: it chooses the gradients themselves and sees every release. The
  probe is a linear model with a linear loss, L_i(theta) = <theta, x_i>, so a record's gradient is
  the record. A canary is a Dirac (one coordinate) or a random direction, ten times as long as C.
  All canaries are orthogonal, and the score of one is the inner product of its direction with the
  released gradients: with Gaussian noise, scores are independent. Diracs are looked up and take no
  memory, so that one step has hundreds of thousands of them.

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
_OTHER = 24  # coordinates of a Dirac world that no canary has
_MOST_RANDOM = 4000  # dense vectors of twice as many coordinates each


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
    """<theta, x> with theta in three parameters. Records are vectors x [N, d]."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        third = dimension // 3
        self.sizes = [third, third, dimension - 2 * third]
        self.parts = nn.ModuleList(self.part(size) for size in self.sizes)

    def part(self, size: int) -> nn.Module:
        return nn.Linear(size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the three parts' inner products: [N]."""
        pieces: tuple[Tensor, ...] = x.split_with_sizes(self.sizes, dim=1)
        values = [part(piece) for part, piece in zip(self.parts, pieces, strict=True)]
        return torch.cat(values, dim=1).sum(1)

    def gradient(self) -> Tensor:
        """.grad of all three as one vector [d]."""
        return torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])


class DiracProbe(Probe):
    """The same where x is one coordinate, given by its number: ids [N, 1]."""

    def part(self, size: int) -> nn.Module:
        return nn.Embedding(size, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """theta[id]: in one of the parts, and times zero in the others: [N]."""
        values, start = [], 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            inside = (ids >= start) & (ids < start + size)
            values.append(part((ids - start).clamp(0, size - 1))[..., 0] * inside)
            start += size
        return torch.cat(values, dim=1).sum(1)


class DiracWorld(World):
    """n records, each the gradient of one coordinate; the last m are canaries 0 .. m - 1.

    Args:
        n: records in all.
        canaries: m.
        clip_norm: C.
    """

    def __init__(self, n: int, canaries: int, clip_norm: float) -> None:
        others = canaries + torch.arange(n - canaries) % _OTHER
        self.inputs = torch.cat([others, torch.arange(canaries)])[:, None]
        self.targets = torch.full((n,), clip_norm)  # the gradient's length
        self.targets[n - canaries :] *= _LENGTH
        self.model = self.probe = DiracProbe(canaries + _OTHER)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """length theta[id]."""
        return output * targets

    def read(self, scores: Tensor) -> Tensor:
        """Add the canaries' coordinates of the released gradient."""
        return scores + self.probe.gradient()[: len(scores)]


class RandomWorld(World):
    """n records with gradients of length C, the last m of them canaries in random directions.

    Args:
        n: records in all.
        canaries: m.
        clip_norm: C.
    """

    def __init__(self, n: int, canaries: int, clip_norm: float) -> None:
        if canaries > _MOST_RANDOM:
            raise ArgumentError(
                f"random canaries are dense vectors: at most {_MOST_RANDOM}, got {canaries}; "
                "choose canary dirac"
            )
        dimension = max(24, 2 * canaries)
        generator = torch.Generator().manual_seed(0)  # public: the attacker knows all records
        drawn = torch.randn(dimension, canaries, generator=generator)
        self.directions: Tensor = torch.linalg.qr(drawn)[0].T.contiguous()  # orthonormal rows
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


def make_world(kind: str, n: int, canaries: int, clip_norm: float) -> World:
    """The world for this kind of canary."""
    if kind in GRADIENT_CANARIES:
        world = DiracWorld if kind == "dirac" else RandomWorld
        return world(n, canaries, clip_norm)
    return InputWorld(kind, n, canaries)
