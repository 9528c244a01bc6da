"""What a fixed feature extractor is, and the scale that every one of them ends in.

A feature extractor maps one image to D numbers. It is fixed before any private record is read: its
constants come from synthetic images or from a public encoder's files. A linear head on its features
is then private training on the records, with no assumption beyond those of the head.

The last step is the same for all extractors (:func:`standardise_rows`): the D numbers of a record
are centred and scaled to Euclidean norm 1, by that record alone. So gradients of a linear head have
a norm of at most sqrt(2), whatever the extractor, and one learning rate and one clipping norm serve
all of them. Raw features of public encoders differ in scale by a factor of a hundred.

A head by gradient descent sees them times :data:`HEAD_SCALE`. Its bias has the constant input 1:
next to features of norm 1, half of every clipped gradient's square would belong to the bias, which
has little to learn, and the noise would be that of the whole. At norm 10 it is a hundredth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

HEAD_SCALE = 10.0  # the norm of the features that a head by descent sees
_LEAST = 1e-12  # below this a centred record is constant, and has no direction


class Features(Protocol):
    """A fixed map from one image to ``width`` numbers.

    Guarantee: asked of an implementation. Row i of ``extract(images)`` depends on image i and on
    public constants, and on nothing else: not on other rows, nor on their number, nor on what was
    extracted before.

    Assumptions: the constants are public (a named encoder is declared public by who names it).

    Proof: each implementation states its own, and tests/features compares rows alone with rows
    among others.
    """

    width: int
    image_shape: tuple[int, int, int]

    def extract(self, images: Tensor) -> Tensor:
        """Return float32 [N, width] from images [N, C, H, W] in [-1, 1], not yet standardised."""

    def description(self) -> Mapping[str, Any]:
        """Return all public facts that the values depend on, as plain values for JSON."""


def standardise_rows(features: Tensor) -> Tensor:
    """Centre each row, and scale it to norm 1: (x - mean(x)) / |x - mean(x)|.

    Each row is a function of that row alone. A row that is constant or not finite becomes zero: it
    then contributes nothing but its label.

    Example:
        >>> standardise_rows(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
        tensor([[-0.7071,  0.7071],
                [ 0.0000,  0.0000]])
    """
    rows = features.double()
    finite = rows.isfinite().all(dim=1, keepdim=True)
    rows = torch.where(finite, rows, 0.0)
    centred = rows - rows.mean(dim=1, keepdim=True)
    norms = centred.norm(dim=1, keepdim=True)
    scale = 1 / rows.abs().amax(dim=1, keepdim=True).clamp(min=1.0)  # a constant row's rounding
    constant = norms * scale < _LEAST * rows.shape[1] ** 0.5
    return torch.where(constant, 0.0, centred / norms.clamp(min=_LEAST)).float()


def recentre_rows(rows: Tensor, centre: Tensor) -> Tensor:
    """Subtract a public centre [D] from rows [N, D], and scale each to norm 1 again.

    Each row is a function of that row and the centre alone; one that is zero stays zero.

    Example:
        >>> recentre_rows(torch.tensor([[0.6, 0.8], [0.0, 0.0]]), torch.tensor([0.6, 0.0]))
        tensor([[0., 1.],
                [0., 0.]])
    """
    moved = torch.where(rows.any(dim=1, keepdim=True), rows - centre, 0.0)
    norms: Tensor = moved.norm(dim=1, keepdim=True)
    return moved / norms.clamp(min=_LEAST)


def digest_of(features: Features) -> str:
    """Return SHA-256 of a feature extractor's description: equal digests, equal features."""
    text = json.dumps(features.description(), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()
