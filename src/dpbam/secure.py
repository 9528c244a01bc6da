"""Noise that holds against an adversary who knows the code: exactly rounded Gaussians on a grid.

Floating-point noise leaks. Which floats s + noise can come out depends on s, and that tells data
sets apart whatever the noise (Mironov 2012; Jin, McMurtry, Rubinstein, Ohrimenko 2022). Here:

1. The sum is rounded to a grid of spacing g, a power of two: s -> g round(s / g), exactly.
2. The noise is g Z, where Z = round(N(0, std^2) / g) is a Gaussian rounded to the same grid, drawn
   with *interval refining* (Haney, Desfontaines, Hartman, Shrestha, Hay 2022): the inverse
   distribution function of a 64-bit uniform number, in double precision with an error bound; where
   the bound leaves open which integer is nearest, more random bits and 60 digits decide.
3. Both are added as integers.

Since s is on the grid, g round(s / g) + g Z = g round((s + N(0, std^2)) / g) in distribution: a
function of the ideal Gaussian mechanism's release. So it has that mechanism's (epsilon, delta), by
every accountant, with no approximation but these:

========================  =======================================================================
what                      how it is paid for
========================  =======================================================================
rounding s to the grid    moves the sum's sensitivity by g sqrt(d) at most, g sqrt(d) <= 2^-12 C
                          for sigma up to 256; std is raised by a relative 2^-10
float32 sums and clips    the rest of that 2^-10: the tests of sensitivity allow 1e-5 of it
Z beyond 192 bits         total variation below 2^-120 a coordinate: delta grows by less than
                          2^-120 (1 + e^epsilon) d T, some 1e-26 for 10^10 coordinates and steps
the generator             AES-256 in counter mode, a new key of the system's entropy a call: the
                          guarantee is against adversaries who cannot break AES
========================  =======================================================================

Assumed: scipy's ndtri is right to a relative 2^-47 (Cephes states 2^-50; tested against 60 digits).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam import _validate
from dpbam.noise import GaussianNoise
from dpbam.randomness import Randomness, SecureRandomness
from dpbam.trees import Params

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

_ALLOWANCE = 2.0**-10  # raises std: rounding to the grid, float32 arithmetic
_MOST_SIGMA = 256.0
_ERROR = 2.0**-47  # of x = ndtri(u) in units of |x| + 1, for |x| <= _TAIL
_TAIL = 4.0  # beyond it every draw is refined
_FAR = 6.0  # beyond it U's first 64 bits do not even give a good guess
_EXTRA = 128  # further random bits of a refined draw
_MOST_CELLS = 2.0**62


class SecureGaussianNoise(GaussianNoise):
    """Adds N(0, std^2), rounded to a grid, from a cryptographic generator.

    Args:
        randomness: the cryptographic bits.

    Example:
        >>> noise = SecureGaussianNoise(SecureRandomness())
        >>> out = noise.add({"w": torch.full((4,), 1 / 3)}, 2.0, step=0)["w"].double()
        >>> bool((out / grid(2.0, 4) % 1 == 0).all())  # nothing of 1/3's last bits is left
        True
    """

    def __init__(self, randomness: SecureRandomness) -> None:
        super().__init__(randomness)
        self._bits = randomness

    def add(
        self, sums: Mapping[str, Tensor], std: float, step: int, *, stream: str = "noise"
    ) -> Params:
        """Round(sums) + round(N(0, std^2 I)), both on one grid; std = 0 adds nothing."""
        _validate.non_negative("std", std)
        if std == 0:
            return dict(sums)
        spacing = grid(std, sum(s.numel() for s in sums.values()))
        deviation = std * (1 + _ALLOWANCE) / spacing  # in cells; dividing by a power of 2 is exact
        return {name: self._one(s, spacing, deviation) for name, s in sums.items()}

    def _one(self, s: Tensor, spacing: float, deviation: float) -> Tensor:
        cells = (s.detach().double().cpu() / spacing).round()
        if not bool((cells.abs() < _MOST_CELLS).all()):
            raise ValueError(
                "a clipped sum is not finite, or too large beside its noise: raise the noise "
                "multiplier, or lower the batch size"
            )
        drawn = rounded_gaussian(deviation, self._bits.words(s.numel()), self._bits)
        total = cells.long() + torch.from_numpy(drawn).reshape(s.shape)
        return (total.double() * spacing).to(s)


def grid(std: float, dimension: int) -> float:
    """The spacing g: a power of two, with g sqrt(d) <= 2^-12 C for sigma up to 256.

    C = std / sigma >= std / 256, so g <= 2^-12 std / (256 sqrt(d)) will do.

    Example:
        >>> grid(1.0, 4) == 2.0**-21
        True
    """
    most = 2.0**-12 * std / (_MOST_SIGMA * math.sqrt(max(1, dimension)))
    return float(2.0 ** math.floor(math.log2(most)))


def rounded_gaussian(deviation: float, words: Words, bits: SecureRandomness) -> Integers:
    """round(N(0, deviation^2)) from 64-bit words: the last bit is the sign, the others U.

    U is uniform in (0, 1/2); |Z| = round(-deviation * Phi^-1(U)).

    Shapes: words [d] -> int64 [d].
    """
    from scipy.special import ndtri

    negative = (words & np.uint64(1)).astype(bool)
    k = words >> np.uint64(1)  # U lies in [k, k + 1) / 2^64
    x = -ndtri((k.astype(np.float64) + 0.5) * 2.0**-64)
    size = deviation * x
    nearest = np.floor(size + 0.5)
    unsure = np.abs(size - np.floor(size) - 0.5) <= deviation * (np.abs(x) + 1) * _ERROR
    unsure |= x > _TAIL
    for place in np.flatnonzero(unsure):
        nearest[place] = _refined(int(k[place]), float(x[place]), deviation, bits)
    signed: Integers = np.where(negative, -nearest, nearest).astype(np.int64)
    return signed


def _refined(k: int, x: float, deviation: float, bits: SecureRandomness) -> int:
    """|Z| for U in [k, k + 1) / 2^64, with 128 further bits of U and 60 digits."""
    extra = int.from_bytes(bits.raw(_EXTRA // 8), "big")
    return exactly_rounded((k << _EXTRA) | extra, 64 + _EXTRA, x, deviation)


def exactly_rounded(numerator: int, precision: int, x: float, deviation: float) -> int:
    """round(-deviation * Phi^-1(U)) for U = (numerator + 1/2) / 2^precision; x is a first guess.

    The integer j with Q((j + 1/2) / deviation) <= U < Q((j - 1/2) / deviation), Q = 1 - Phi.
    """
    import mpmath

    with mpmath.workdps(max(60, precision // 3)):
        u = (mpmath.mpf(numerator) + 0.5) / mpmath.mpf(2) ** precision

        def tail(edge: Any) -> Any:
            return mpmath.erfc(edge / deviation / mpmath.sqrt(2)) / 2

        guess = x if x < _FAR else _inverse(u, x)  # the double's is within one or two cells
        j = int(mpmath.nint(deviation * guess))
        while u < tail(mpmath.mpf(j) + 0.5):
            j += 1
        while j > 0 and u >= tail(mpmath.mpf(j) - 0.5):
            j -= 1
        return j


def _inverse(u: Any, x: float) -> Any:
    """-Phi^-1(u) by Newton's method from x: the double's error squared, then squared again."""
    import mpmath

    value = mpmath.mpf(min(x, 40.0))
    for _ in range(8):
        density = mpmath.npdf(value)
        move = (mpmath.erfc(value / mpmath.sqrt(2)) / 2 - u) / density
        value += move
        if abs(move) < mpmath.mpf(2) ** -80:
            break
    return value


def make_noise(kind: str, seed: int | None) -> GaussianNoise:
    """The noise called ``kind``, "fast" or "secure"; a seed would undo what the latter is for.

    Example:
        >>> type(make_noise("fast", seed=1)).__name__
        'GaussianNoise'
    """
    if _validate.one_of("noise", kind, ("fast", "secure")) == "fast":
        return GaussianNoise(Randomness(seed))
    if seed is not None:
        raise ValueError("secure noise cannot have a seed: leave the seed out, or take fast noise")
    return SecureGaussianNoise(SecureRandomness())
