"""Gaussian noise without floating-point leaks: exactly rounded to a grid.

Which floats s + noise can take depends on s, and that distinguishes data sets at any noise level
(Mironov 2012; Jin, McMurtry, Rubinstein, Ohrimenko 2022). Here the release is

    g round((s + N(0, std'^2)) / g),    g a power of two,    std' = std (1 + 2^-10)

exactly: s is split into a whole number of cells g and a remainder f of at most half a cell, and the
integer round(f + N(0, std'^2) / g) is drawn by *interval refining* (Haney, Desfontaines, Hartman,
Shrestha, Hay 2022): the inverse distribution function of a 64-bit uniform number, in double
precision with an error bound; where the bound does not decide which integer is nearest, more random
bits and 60 digits do. Whole cells are added as integers.

So the release is a function of the ideal Gaussian mechanism's release on s. It has that mechanism's
(epsilon, delta), by every accountant, for every sigma = std / C and every dimension: the sum is not
rounded before the noise is added, so the grid does not change its sensitivity. Approximations that
are left:

========================  =======================================================================
approximation             how it is covered
========================  =======================================================================
float32 sums and clips    std is raised by a relative 2^-10, twice what they may add to the
                          sensitivity (:data:`dpbam.privacy.clipping.ROUNDING`)
Z beyond 192 bits         total variation below 2^-120 per coordinate: delta grows by less than
                          2^-120 (1 + e^epsilon) d T, some 1e-26 for 10^10 coordinates and steps
the generator             AES-256 in counter mode, a new key of the system's entropy per call: the
                          guarantee is against adversaries who cannot break AES
========================  =======================================================================

Assumption: scipy's ndtri is exact to a relative 2^-47 (Cephes states 2^-50; tested with 60 digits).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.params import Params
from dpbam.privacy.clipping import ROUNDING
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness, SecureRandomness

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Reals = NDArray[np.float64]

_CELLS = 2.0**20  # of the grid in a standard deviation, at least; rounding adds 1e-13 to its square
_ERROR = 2.0**-47  # of x = ndtri(u) in units of |x| + 1, for |x| <= _TAIL
_TAIL = 4.0  # beyond it every draw is refined
_FAR = 6.0  # beyond it the first 64 bits of U give no good guess
_EXTRA = 128  # further random bits of a refined draw
_MOST_CELLS = 2.0**62


class SecureGaussianNoise(GaussianNoise):
    """Adds N(0, std^2), rounded to a grid, from a cryptographic generator.

    Guarantee: the release is a function of the ideal Gaussian mechanism's, so it has that one's
    (epsilon, delta), to a delta of 1e-25.

    Assumptions: AES-256 is not broken, the system's entropy is good, and scipy's ndtri is exact to
    2^-47.

    Proof: the module's first paragraphs, and post-processing.

    Args:
        randomness: the cryptographic bits.

    Example:
        >>> noise = SecureGaussianNoise(SecureRandomness())
        >>> out = noise.add({"w": torch.full((4,), 1 / 3)}, 2.0, step=0)["w"].double()
        >>> bool((out / grid(2.0) % 1 == 0).all())  # nothing of 1/3's last bits is left
        True
    """

    def __init__(self, randomness: SecureRandomness) -> None:
        super().__init__(randomness)
        self._bits = randomness

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
        """Round sums + N(0, std^2 I) to one grid, exactly; std = 0 adds nothing.

        The grid depends on ``std`` alone, so parts of a vector are on the grid of the whole. The
        result is in new memory, whatever ``reuse`` is.
        """
        _validate.non_negative("std", std)
        if std == 0:
            return dict(sums)
        spacing = grid(std)
        deviation = raised(std) / spacing  # in cells; dividing by a power of 2 is exact
        return {name: self._one(s, spacing, deviation) for name, s in sums.items()}

    def _one(self, s: Tensor, spacing: float, deviation: float) -> Tensor:
        cells = s.detach().cpu().double() / spacing
        if not bool((cells.abs() < _MOST_CELLS).all()):
            raise ArgumentError(
                "a clipped sum is not finite, or too large next to its noise: raise the noise "
                "multiplier, or lower the batch size"
            )
        nearest_cells = cells.round()
        rest = (cells - nearest_cells).flatten().numpy()  # exact, at most 1/2 in size
        draws = rounded_gaussian(deviation, self._bits.words(s.numel()), self._bits, rest)
        total = nearest_cells.long() + torch.from_numpy(draws).reshape(s.shape)
        return (total.double() * spacing).to(s)


def grid(std: float) -> float:
    """Return the spacing g: the largest power of two with 2^20 cells per standard deviation.

    Guarantee: at least 2^20 cells per standard deviation, whatever the data.

    Assumptions: std depends on public values alone.

    Proof: 2^floor(log2(std / 2^20)) <= std / 2^20.
    """
    return float(2.0 ** np.floor(np.log2(std / _CELLS)))


def raised(std: float) -> float:
    """Return the deviation that covers what float32 arithmetic adds to the sensitivity.

    Guarantee: the noise covers a sensitivity of C (1 + 2^-10).

    Assumptions: float32 arithmetic adds at most ROUNDING = 2^-11 to the sensitivity.

    Proof: sigma C (1 + 2 ROUNDING) >= sigma C (1 + ROUNDING); tests/claims/test_rounding_claims.py.
    """
    return std * (1 + 2 * ROUNDING)


def rounded_gaussian(
    deviation: float, words: Words, bits: SecureRandomness, rest: Reals | float = 0.0
) -> Integers:
    """Draw round(rest + N(0, deviation^2)) from 64-bit words: the last bit is the sign, others U.

    U is uniform in (0, 1/2); the result is +- round(+- rest - deviation * Phi^-1(U)).

    Guarantee: the integer that is nearest to rest + N(0, deviation^2), exactly.

    Assumptions: the words are uniform, and ndtri's error is within _ERROR.

    Proof: interval refining (Haney et al. 2022): where the error could decide, 128 more bits and 60
    digits do.

    Shapes: words, rest [d] -> int64 [d]; |rest| is at most 1/2.
    """
    from scipy.special import ndtri

    sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    k = words >> np.uint64(1)  # U lies in [k, k + 1) / 2^64
    x = -ndtri((k.astype(np.float64) + 0.5) * 2.0**-64)
    offset = sign * rest
    size = offset + deviation * x
    nearest = np.floor(size + 0.5)
    unsure = np.abs(size - np.floor(size) - 0.5) <= deviation * (np.abs(x) + 1) * _ERROR
    unsure |= x > _TAIL
    for at in np.flatnonzero(unsure):
        more = int.from_bytes(bits.raw(_EXTRA // 8), "big")
        numerator = (int(k[at]) << _EXTRA) | more
        nearest[at] = exactly_rounded(
            numerator, 64 + _EXTRA, float(x[at]), deviation, float(offset[at])
        )
    signed: Integers = (sign * nearest).astype(np.int64)
    return signed


def exactly_rounded(
    numerator: int, precision: int, x: float, deviation: float, offset: float = 0.0
) -> int:
    """Return round(offset - deviation * Phi^-1(U)), U = (numerator + 1/2) / 2^precision.

    It is the integer j with Q((j + 1/2 - offset) / deviation) <= U < Q((j - 1/2 - offset) /
    deviation), Q = 1 - Phi; U < 1/2 and offset >= -1/2, so j >= 0. ``x`` is a guess for -Phi^-1(U).

    Guarantee: the integer of the defining inequality, for U to ``precision`` bits.

    Assumptions: mpmath's erfc is right to 60 digits.

    Proof: the two loops end where both inequalities hold.
    """
    import mpmath

    with mpmath.workdps(max(60, precision // 3)):
        u = (mpmath.mpf(numerator) + 0.5) / mpmath.mpf(2) ** precision

        def tail(edge: Any) -> Any:
            return mpmath.erfc((edge - offset) / deviation / mpmath.sqrt(2)) / 2

        guess = x if x < _FAR else _inverse(u, x)  # the double's is within one or two cells
        j = max(0, int(mpmath.nint(offset + deviation * guess)))
        while u < tail(mpmath.mpf(j) + 0.5):
            j += 1
        while j > 0 and u >= tail(mpmath.mpf(j) - 0.5):
            j -= 1
        return j


def _inverse(u: Any, x: float) -> Any:
    """Return -Phi^-1(u), by Newton's method from x."""
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
    """Return the noise called ``kind``, "standard" or "secure"; the latter has no seed."""
    if _validate.one_of("noise", kind, ("standard", "secure")) == "standard":
        return GaussianNoise(Randomness(seed))
    if seed is not None:
        raise ArgumentError(
            "secure noise cannot have a seed: leave the seed out, or take standard noise"
        )
    return SecureGaussianNoise(SecureRandomness())
