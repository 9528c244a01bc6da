"""The noise of the Gaussian mechanism: once per logical batch, on the sum.

Guarantee: ``GaussianNoise.add(sums, std, step)`` returns sums + N(0, std^2 I), independent for each
coordinate, across steps, and (unseeded) across processes. It has generators of its own, so nothing
that the model draws can reproduce it.

The sums are one vector. Each block of it has a generator, which is keyed by the block's number:
blocks are drawn in parallel, and a process that has a part of the vector draws the noise of that
part. A block is always drawn from its beginning, in chunks of given sizes. Seeded, a coordinate's
noise depends on (seed, stream, step, coordinate) and on nothing else, but for the last bits of
logarithm, sine and cosine, which may differ between kinds of processors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam import _validate, params
from dpbam.errors import ArgumentError
from dpbam.params import Params, accumulation_dtype, elementwise, joined, separated
from dpbam.privacy.randomness import Randomness

BLOCK = 2**17  # coordinates of one generator
#: What a block is drawn in: small ones first, so that a small model does not draw a block, then
#: larger ones, for fewer calls; all of them stay in the processor's cache.
CHUNKS = (2**12, 2**12, 2**13, 2**14, *3 * (2**15,))
_FINE = 2.0**-8  # b, the share of the uniform term in a draw


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

    Assumptions: nothing is checked of a user's own mechanism: its author vouches.

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
    the last bits of floats are out of scope (secure noise is for them), and with them the precision
    of :func:`standard_normals`.

    Proof: :func:`standard_normals` of the bits of SFC64 (Doty-Humphrey, PractRand), a new key of
    192 bits of system entropy per step and block; distribution and independence are tested,
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
        reuse: bool = False,
    ) -> Params:
        """Return sums + N(0, std^2 I); std = 0, of a non-private plan, adds nothing.

        Args:
            sums: real tensors; their entries, one after another, are coordinates of the vector.
            std: the standard deviation, for each coordinate.
            step: the step's number.
            stream: of sums that are released next to the gradient, a name of their own: seeded, the
                same stream and step draw the same noise.
            start: the number of the first coordinate, where ``sums`` is a part of the vector.
            reuse: whether the result may be in the memory of ``sums``, which it then overwrites.
        """
        _validate.non_negative("std", std)
        if std == 0 or not sums:
            return dict(sums)
        if any(s.is_complex() for s in sums.values()):
            raise ArgumentError("complex parameters cannot be trained privately: use real ones")
        draw = partial(_normal, self.randomness, std, stream, step, start)
        in_double = all(s.dtype == torch.float64 for s in sums.values())
        if in_double and params.on_processor(sums.values()):
            vector = joined(sums).detach()
            noised = draw(vector.numpy(), vector.numpy() if reuse else np.empty(len(vector)))
            # joined made no copy: the noise is in the memory of ``sums`` already
            if reuse and vector.data_ptr() == next(iter(sums.values())).data_ptr():
                return dict(sums)
            return separated(torch.from_numpy(noised), sums)
        noise = torch.from_numpy(draw(None, np.empty(sum(s.numel() for s in sums.values()))))
        return elementwise(lambda s, z: s + _place_draws(z, s), sums, separated(noise, sums))

    def charged(self, noise_multiplier: float) -> float:
        return noise_multiplier


def _normal(
    randomness: Randomness,
    std: float,
    stream: str,
    step: int,
    start: int,
    sums: NDArray[np.float64] | None,
    noised: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Write sums + N(0, std^2), for the coordinates from ``start`` on, into ``noised``: [count].

    ``sums`` [count], which may be ``noised``, are added while a chunk is in the processor's cache.
    """
    count = len(noised)
    blocks = range(start // BLOCK, -(-(start + count) // BLOCK))
    generators = [randomness.noise_generator(stream, step, block) for block in blocks]

    def fill(k: int) -> None:
        begin = blocks[k] * BLOCK - start  # of the block, and then of a chunk, in this part
        for size in CHUNKS:
            if begin >= count:
                return
            normals = standard_normals(generators[k], size)
            span = slice(max(begin, 0), min(begin + size, count))
            if span.start < span.stop:
                noise = normals[span.start - begin : span.stop - begin]
                noise *= std
                np.add(noise, 0.0 if sums is None else sums[span], out=noised[span])
            begin += size

    if len(generators) == 1 or torch.get_num_threads() == 1:
        for k in range(len(generators)):
            fill(k)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy fills without the lock
            list(pool.map(fill, range(len(generators))))
    return noised


def standard_normals(bits: np.random.SFC64, count: int) -> NDArray[np.float64]:
    """Draw N(0, 1) from 64 bits for each number: [count], an even number of them.

    Two at a time (Box and Muller 1958), and a fine uniform term:

        z = a (r cos t, r sin t) + b w,    b = 2^-8, a^2 + b^2 = 1

        r = sqrt(2 ln(1/u))    u uniform in (0, 1): 32 bits, and 80 where the first 16 are 0
        t                      uniform in (-pi, pi): 32 bits
        w                      uniform in (-sqrt 3, sqrt 3), of variance 1: 32 bits for each z

    r, t, sine and cosine are float32, whose vectorised functions take a fraction of the time of
    float64's. On their own they would give some 2^24 different z: w, in float64, fills what is
    between them, so that a gradient rounded to float32 does not show from which sum it comes by the
    numbers that it cannot be.

    Guarantee: within 2^-19 (1 + |z| + 1/r) of z in exact arithmetic, whose density, to 10 standard
    deviations, is the normal one times 1 +- 2^-22; it has no edge below them.

    Assumptions: the bits are uniform and independent; NumPy's float32 functions are right to four
    units in the last place.

    Proof: the first term is N(0, a^2) exactly. The fourth cumulant of w is -6/5, so the density is
    that of N(0, 1) times about 1 - b^4 He4(z) / 20. Largest r: sqrt(2 ln 2^81) = 10.6.
    """
    half = count // 2
    words = bits.random_raw(count).view(np.uint32)  # [2 count]: of u, t, w
    k, angles, fine = words[:half], words[half:count].view(np.int32), words[count:].view(np.int32)
    u = k.astype(np.float32)  # times 2^32
    if np.minimum.reduce(k) < 2**16:
        # the tail: 32 bits would end it at 6.7, in steps; 64 bits in place of the last 16
        rare = np.flatnonzero(k < 2**16)
        u[rare] = (bits.random_raw(len(rare)) + 0.5) * 2.0**-48
    r = np.divide(np.float32(2**32), u, out=u)
    np.log(r, out=r)
    r *= np.float32(2 / (1 + _FINE**2))  # 2 a^2 ln(1/u)
    np.sqrt(r, out=r)
    t = angles.astype(np.float32)
    t *= np.float32(math.pi / 2**31)
    pairs = np.empty((2, half), np.float32)
    np.multiply(r, np.cos(t, out=pairs[0]), out=pairs[0])
    np.multiply(r, np.sin(t, out=t), out=pairs[1])
    z = np.multiply(fine, _FINE / math.sqrt(1 + _FINE**2) * math.sqrt(12) / 2**32, dtype=np.float64)
    z += pairs.reshape(-1)
    return z


def _place_draws(draws: Tensor, sums: Tensor) -> Tensor:
    """Give draws the device of ``sums``, and its dtype or float32 if that is wider."""
    return draws.to(accumulation_dtype(sums.dtype)).to(sums.device)
