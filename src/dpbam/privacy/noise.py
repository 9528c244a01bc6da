"""The noise of the Gaussian mechanism: once per logical batch, on the sum.

Guarantee: ``GaussianNoise.add(sums, std, step)`` returns sums + N(0, std^2 I), independent for each
coordinate, across steps, and (unseeded) across processes. It has generators of its own, so nothing
that the model draws can reproduce it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpbam import _validate
from dpbam.params import Params, accumulation_dtype
from dpbam.privacy.randomness import Randomness


class NoiseMechanism(Protocol):
    """Adds noise to a sum, and states the accounting event that it stands for.

    Guarantee asked of an implementation: releasing ``add(sums, sigma s, step)``, where one unit
    moves the sums by at most s in Euclidean norm, is at most as informative as the Gaussian
    mechanism with noise multiplier ``charged(sigma)``; draws of different steps and streams are
    independent. The ledger is charged at ``charged(sigma)``, so its epsilon holds; the plan's
    assumes ``charged(sigma) = sigma``.
    """

    randomness: Randomness

    def add(
        self, sums: Mapping[str, Tensor], std: float, step: int, *, stream: str = "noise"
    ) -> Params:
        """Return the sums with noise of standard deviation ``std``."""

    def charged(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of the Gaussian event that a release is charged as."""


class GaussianNoise:
    """Adds N(0, std^2) to a sum of clipped directions.

    Args:
        randomness: the source of the draws; unseeded, the operating system's entropy.
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness

    def add(
        self, sums: Mapping[str, Tensor], std: float, step: int, *, stream: str = "noise"
    ) -> Params:
        """Return sums + N(0, std^2 I); std = 0, of a non-private plan, adds nothing.

        Sums that are released next to the gradient need a stream of their own: seeded, the same
        stream and step draw the same noise.
        """
        _validate.non_negative("std", std)
        if std == 0:
            return dict(sums)
        generator = self.randomness.generator(stream, step)
        return {name: s + std * _standard_normal(generator, s) for name, s in sums.items()}

    def charged(self, noise_multiplier: float) -> float:
        return noise_multiplier


def _standard_normal(generator: np.random.Generator, like: Tensor) -> Tensor:
    """Draw a standard normal of the shape and device of ``like``, in float32 or better."""
    wide = accumulation_dtype(like.dtype)
    kind = np.float64 if wide == torch.float64 else np.float32
    draws = generator.standard_normal(tuple(like.shape), dtype=kind)
    return torch.as_tensor(draws).to(like.device)
