"""The Gaussian mechanism's noise: once per logical batch, on the sum, from a generator of its own.

Guarantee: ``GaussianNoise.add(sums, std, step)`` returns sums + N(0, std^2 I), every coordinate of
every parameter independent, independent across steps, and (unseeded) across processes. It touches
no other generator, so nothing that the model draws can reproduce it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dpbam import _validate
from dpbam.params import Params, accumulation_dtype
from dpbam.privacy.randomness import Randomness


class GaussianNoise:
    """Adds N(0, std^2) to a sum of clipped directions.

    Args:
        randomness: where the draws come from; unseeded means the operating system's entropy.

    Example:
        >>> noise = GaussianNoise(Randomness(seed=1))
        >>> one, two = (noise.add({"w": torch.zeros(3)}, 2.0, step=0)["w"] for _ in range(2))
        >>> torch.equal(one, two)  # seeded: the same step draws the same noise
        True
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness

    def add(
        self, sums: Mapping[str, Tensor], std: float, step: int, *, stream: str = "noise"
    ) -> Params:
        """Sums + N(0, std^2 I); std = 0 adds nothing, and only a non-private plan asks for it.

        Sums that are released beside the gradient take a stream of their own: seeded, the same
        stream and step draw the same noise.
        """
        _validate.non_negative("std", std)
        if std == 0:
            return dict(sums)
        generator = self.randomness.generator(stream, step)
        return {name: s + std * _standard_normal(generator, s) for name, s in sums.items()}


def _standard_normal(generator: np.random.Generator, like: Tensor) -> Tensor:
    """A standard normal of the shape, device and (float32 or better) dtype of ``like``."""
    wide = accumulation_dtype(like.dtype)
    kind = np.float64 if wide == torch.float64 else np.float32
    draws = generator.standard_normal(tuple(like.shape), dtype=kind)
    return torch.as_tensor(draws).to(like.device)
