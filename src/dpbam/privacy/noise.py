"""The noise of the Gaussian mechanism: once per logical batch, on the sum.

Guarantee: ``GaussianNoise.add(sums, std, step)`` returns sums + N(0, std^2 I), independent for each
coordinate, across steps, and (unseeded) across processes. It has generators of its own, so nothing
that the model draws can reproduce it.

The sums are one vector. Each block of it has a generator, which is keyed by the block's number:
blocks are drawn in parallel, and a process that has a part of the vector draws the noise of that
part. Seeded, a coordinate's noise depends on (seed, stream, step, coordinate) and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.params import Params, accumulation_dtype, elementwise, joined, separated
from dpbam.privacy.randomness import Randomness

BLOCK = 2**16  # coordinates of one generator


@dataclass(frozen=True)
class Query:
    """A sum over the units of a logical batch, and the noise that it is released with.

    The gradient, the extra coordinates of an adaptive clipping and the statistics of a joint
    release are queries, and are released alike.

    Attributes:
        sums: by name, over the units of this rank. Without noise: not to be shared.
        std: sigma_k times the sensitivity of the sums.
        stream: names the noise; seeded, two queries of one step must not have the same coordinates
            of one stream.
        start: the number of the first coordinate in the stream.
        divisor: what the noised sums are divided by: l, the expected batch size, or 1.
    """

    sums: Params
    std: float
    stream: str
    start: int = 0
    divisor: float = 1


class NoiseMechanism(Protocol):
    """Adds noise to a sum, and states the accounting event that it stands for.

    Guarantee: asked of an implementation. Releasing ``add(sums, sigma s, step)``, where one unit
    moves the sums by at most s in Euclidean norm, is at most as informative as the Gaussian
    mechanism with noise multiplier ``charged(sigma)``; draws of different steps, streams and
    coordinates are independent. The ledger is charged at ``charged(sigma)``, so its epsilon holds;
    the plan's assumes ``charged(sigma) = sigma``.

    Assumptions: for one's own mechanism nothing is checked: its author vouches.

    Proof: docs/privacy.md, step 3, with the stated event in place of the Gaussian.
    """

    randomness: Randomness

    def add(
        self,
        sums: Mapping[str, Tensor],
        std: float,
        step: int,
        *,
        stream: str = "noise",
        start: int = 0,
    ) -> Params:
        """Return the sums with noise of standard deviation ``std``.

        ``start`` is the number of the first coordinate in the stream: of several ranks each calls
        it for a slice of the vector, and extra coordinates of a clipping follow the gradient's.
        """

    def charged(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of the Gaussian event that a release is charged as."""


class GaussianNoise:
    """Adds N(0, std^2) to a sum of clipped directions.

    Guarantee: sums + N(0, std^2 I), independent for each coordinate, step and stream; unseeded,
    across processes too.

    Assumptions: SFC64's numbers pass for independent uniform ones; the key is unknown; attacks on
    the last bits of floats are out of scope (secure noise is for them).

    Proof: numpy's ziggurat of SFC64 (Doty-Humphrey, PractRand), a new key of 192 bits of system
    entropy per step and block; distribution and independence are tested,
    tests/claims/test_noise_claims.py, and the bits of the key, tests/claims/test_bits_claims.py.

    Args:
        randomness: the source of the draws; unseeded, the operating system's entropy.
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness

    def add(
        self,
        sums: Mapping[str, Tensor],
        std: float,
        step: int,
        *,
        stream: str = "noise",
        start: int = 0,
    ) -> Params:
        """Return sums + N(0, std^2 I); std = 0, of a non-private plan, adds nothing.

        Args:
            sums: real tensors; their entries, one after another, are coordinates of the vector.
            std: the standard deviation, for each coordinate.
            step: the step's number.
            stream: of sums that are released next to the gradient, a name of their own: seeded, the
                same stream and step draw the same noise.
            start: the number of the first coordinate, where ``sums`` is a part of the vector.
        """
        _validate.non_negative("std", std)
        if std == 0 or not sums:
            return dict(sums)
        if any(s.is_complex() for s in sums.values()):
            raise ArgumentError("complex parameters cannot be trained privately: use real ones")
        count = sum(s.numel() for s in sums.values())
        draw = partial(_normal, self.randomness, std, stream, step, start, count)
        if all(s.dtype == torch.float64 and s.device.type == "cpu" for s in sums.values()):
            return separated(torch.from_numpy(draw(joined(sums).detach())), sums)
        noise = torch.from_numpy(draw())
        return elementwise(lambda s, z: s + _place_draws(z, s), sums, separated(noise, sums))

    def charged(self, noise_multiplier: float) -> float:
        return noise_multiplier


def _normal(
    randomness: Randomness,
    std: float,
    stream: str,
    step: int,
    start: int,
    count: int,
    sums: Tensor | None = None,
) -> NDArray[np.float64]:
    """Draw N(0, std^2) for the coordinates from ``start`` on: [count], in double precision.

    ``sums`` [count] are added block by block, while a block is in the processor's cache.
    """
    noise = np.empty(count)
    edges = [0, *range(BLOCK - start % BLOCK, count, BLOCK), count]  # of blocks, in this part
    generators = [
        randomness.noise_generator(stream, step, (start + e) // BLOCK) for e in edges[:-1]
    ]
    skipped = [start % BLOCK, *[0] * len(generators)]  # a block is drawn from its beginning

    def fill(k: int) -> None:
        block = noise[edges[k] : edges[k + 1]]
        generators[k].standard_normal(skipped[k])
        generators[k].standard_normal(out=block)
        block *= std
        if sums is not None:
            torch.from_numpy(block).add_(sums[edges[k] : edges[k + 1]])

    if len(generators) == 1 or torch.get_num_threads() == 1:
        for k in range(len(generators)):
            fill(k)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy fills without the lock
            list(pool.map(fill, range(len(generators))))
    return noise


def _place_draws(draws: Tensor, sums: Tensor) -> Tensor:
    """Give draws the device of ``sums``, and its dtype or float32 if that is wider."""
    return draws.to(accumulation_dtype(sums.dtype)).to(sums.device)
