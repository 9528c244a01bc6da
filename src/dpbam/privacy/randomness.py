"""Where every random number of a run comes from: named streams, keyed draws.

A run has one :class:`Randomness`. Its streams are keyed by a name and a step, never by how many
numbers were drawn before, so that a run resumed at step t draws what it would have drawn.

====================  ============================================  ==========================
stream                seeded                                        unseeded (the default)
====================  ============================================  ==========================
``generator(name,t)`` a function of (seed, name, t)                 fresh OS entropy each call
``keys(name,t,ids)``  a function of (seed, name, t, id)             of (process entropy, ...)
====================  ============================================  ==========================

Guarantee: unseeded noise never repeats, not after a resume and not in a second process, because
every call asks the operating system for 256 new bits. (torch's own CPU generator keeps 32 bits of
its seed, which an attacker could try one by one; numpy's Philox is keyed with 128.)
"""

from __future__ import annotations

import math
import secrets
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: splitmix64's increment
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Randomness:
    """The named random streams of one run.

    Args:
        seed: makes every stream reproducible. Research only: whoever knows the seed can subtract
            the noise. ``None`` takes the operating system's entropy.

    Example:
        >>> a, b = Randomness(seed=7), Randomness(seed=7)
        >>> bool((a.generator("noise", 3).random(4) == b.generator("noise", 3).random(4)).all())
        True
        >>> bool((a.generator("noise", 3).random(4) == b.generator("noise", 4).random(4)).any())
        False
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ArgumentError(f"seed must be a whole number >= 0 or None, got {seed!r}")
        self.seed = seed
        self._entropy = secrets.randbits(256) if seed is None else seed

    @property
    def seeded(self) -> bool:
        """Whether the draws can be reproduced: then the run is for research only."""
        return self.seed is not None

    def generator(self, name: str, step: int) -> np.random.Generator:
        """The stream ``name`` at ``step``; new entropy at each call if unseeded."""
        entropy = secrets.randbits(256) if self.seed is None else self._entropy
        sequence = np.random.SeedSequence(entropy, spawn_key=(zlib.crc32(name.encode()), step))
        return np.random.Generator(np.random.Philox(sequence))

    def uniform(self, name: str, step: int, count: int) -> NDArray[np.float64]:
        """``count`` numbers of the stream, uniform in [0, 1): multiples of 2^-53."""
        return self.generator(name, step).random(count)

    def keys(self, name: str, step: int, ids: Tensor) -> Tensor:
        """One int64 key an id: what dropout and augmentation of that sample at that step hang on.

        A key depends on (entropy, name, step, id) alone, so the same sample gets the same draws
        whatever the micro-batch or the rank it is in. Shapes: ids [N] -> keys [N].
        """
        sequence = np.random.SeedSequence(
            self._entropy, spawn_key=(zlib.crc32(name.encode()), step)
        )
        base = int(sequence.generate_state(1, np.uint64).view(np.int64)[0])
        return derive(ids.long() + base, 0)


class SecureRandomness(Randomness):
    """Randomness whose noise and Poisson draws an adversary who sees some cannot foretell.

    AES-256 in counter mode, under a new key of the operating system's entropy at each call. Never
    seeded. (Philox, of the other class, is fast and even, but was not made to withstand attacks.)

    Example:
        >>> words = SecureRandomness().words(3)
        >>> words.dtype, words.shape
        (dtype('uint64'), (3,))
    """

    def __init__(self) -> None:
        super().__init__(None)
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher  # noqa: F401
        except ImportError:
            raise ArgumentError(
                "secure noise needs the package cryptography: pip install 'dpbam[secure]'"
            ) from None

    def raw(self, count: int) -> bytes:
        """``count`` bytes of key stream."""
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        stream = Cipher(AES(secrets.token_bytes(32)), CTR(bytes(16))).encryptor()
        return stream.update(bytes(count))

    def words(self, count: int) -> NDArray[np.uint64]:
        """``count`` uniform 64-bit words."""
        return np.frombuffer(self.raw(8 * count), dtype=np.uint64)

    def uniform(self, name: str, step: int, count: int) -> NDArray[np.float64]:
        """``count`` numbers, uniform in [0, 1): multiples of 2^-53."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 (multiplication wraps; shifts are made logical by a mask)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def derive(keys: Tensor, counter: int | Tensor) -> Tensor:
    """New keys from old ones; ``counter`` numbers the uses: view 0, view 1, first dropout, ...

    Example:
        >>> import torch
        >>> k = torch.arange(3)
        >>> bool((derive(k, 0) == derive(k, 1)).any())
        False
    """
    if isinstance(counter, int):
        counter = ((counter + 1) * _GOLDEN + 2**63) % 2**64 - 2**63  # wrap as int64 does
    else:
        counter = (counter + 1) * _GOLDEN
    return _mix(_mix(keys) + counter)


def keyed_bits(keys: Tensor, shape: tuple[int, ...], digits: int) -> Tensor:
    """Uniform integers in [0, 2^digits): keys [*K] -> int64 [*K, *shape], digits at most 62.

    Each key's numbers depend on that key, the position and ``digits`` alone. Integer arithmetic
    only, so every device gives the same numbers, and it runs under vmap.
    """
    import torch

    positions = torch.arange(math.prod(shape), device=keys.device, dtype=torch.int64) * _GOLDEN
    bits = _mix(_mix(keys).unsqueeze(-1) + positions)  # [*K, count]
    return ((bits >> (64 - digits)) & ((1 << digits) - 1)).reshape((*keys.shape, *shape))


def keyed_uniform(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform float32 in [0, 1): [N] keys -> [N, *shape], row n a function of keys[n] alone.

    Multiples of 2^-24, the same on every device; see :func:`keyed_bits`.

    Example:
        >>> import torch
        >>> both = keyed_uniform(torch.tensor([5, 6]), (3,))
        >>> torch.equal(both[1], keyed_uniform(torch.tensor([6]), (3,))[0])
        True
    """
    return keyed_bits(keys, shape, 24).float() / (1 << 24)
