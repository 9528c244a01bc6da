"""The random numbers of a run: named streams, and draws keyed by row.

A run has one :class:`Randomness`. Its streams are keyed by a name and a step, not by how many
numbers were drawn before, so that a run resumed at step t draws what it would have drawn.

====================  ============================================  ==========================
stream                seeded                                        unseeded (the default)
====================  ============================================  ==========================
``generator(name,t)`` a function of (seed, name, t)                 fresh OS entropy each call
``noise_generator``   a function of (seed, name, t, block)          fresh OS entropy each call
``keys(name,t,ids)``  a function of (seed, name, t, id)             of (process entropy, ...)
====================  ============================================  ==========================

Guarantee: unseeded noise never repeats, not after a resume and not in a second process, because
every call takes new bits from the operating system: 192 for each block of noise, 256 for other
streams. (torch's CPU generator keeps 32 bits of its seed, few enough to try them all.)
"""

from __future__ import annotations

import math
import secrets
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

NOISE_KEY_BITS = 192  # of SFC64, which generates the noise
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: splitmix64's increment
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class _SystemEntropy(np.random.bit_generator.ISeedSequence):
    """Keys of the operating system's entropy as it is, in a tenth of the time of a hash of it."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(secrets.token_bytes(n_words * np.dtype(dtype).itemsize), dtype)


class Randomness:
    """The named random streams of one run.

    Guarantee: streams of different names and steps are independent; unseeded, every call draws 192
    new bits of entropy or more.

    Assumptions: Philox, SFC64 and SeedSequence pass for random functions; no cryptographic claim.

    Proof: Salmon et al. 2011; tests/claims/test_bits_claims.py looks for repeats.

    Args:
        seed: makes every stream reproducible, for research only: with the seed the noise can be
            subtracted. None takes the operating system's entropy.

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
        """Whether the draws can be reproduced; such a run is for research only."""
        return self.seed is not None

    def generator(self, name: str, step: int) -> np.random.Generator:
        """Return the stream ``name`` at ``step``; unseeded, with new entropy at each call."""
        return np.random.Generator(np.random.Philox(self._sequence(name, step)))

    def noise_generator(self, name: str, step: int, block: int) -> np.random.SFC64:
        """Return the bits of one block of noise; unseeded, with new entropy at each call.

        SFC64, whose 64 bits take half of the time of Philox's. Each block has a key of 192 bits of
        its own: of the system's entropy, or seeded a hash of seed, name, step and block.
        """
        if self.seed is None:
            return np.random.SFC64(_SystemEntropy())  # type: ignore[arg-type]  # a seed sequence
        sequence = self._sequence(name, step, block, pool_size=8)  # the usual pool is of 128 bits
        return np.random.SFC64(sequence)

    def _sequence(self, name: str, *numbers: int, pool_size: int = 4) -> np.random.SeedSequence:
        entropy = secrets.randbits(256) if self.seed is None else self._entropy
        key = (zlib.crc32(name.encode()), *numbers)
        return np.random.SeedSequence(entropy, spawn_key=key, pool_size=pool_size)

    def uniform(self, name: str, step: int, count: int) -> NDArray[np.float64]:
        """Draw ``count`` numbers uniform in [0, 1): multiples of 2^-53."""
        return self.generator(name, step).random(count)

    def keys(self, name: str, step: int, ids: Tensor) -> Tensor:
        """Return one int64 key per id, for a sample's dropout and augmentation: ids [N] -> [N].

        A key depends on (entropy, name, step, id) alone, so a sample gets the same draws in every
        physical batch and on every rank.
        """
        sequence = np.random.SeedSequence(
            self._entropy, spawn_key=(zlib.crc32(name.encode()), step)
        )
        base = int(sequence.generate_state(1, np.uint64).view(np.int64)[0])
        return derive(ids.long() + base, 0)


class SecureRandomness(Randomness):
    """Cryptographic noise and Poisson draws: from some of them the others cannot be predicted.

    AES-256 in counter mode, under a new key of the operating system's entropy at each call; never
    seeded. (The generators of the other class have good statistics but no cryptographic claim.)

    Guarantee: from any of the bits the others cannot be computed.

    Assumptions: AES-256 is a pseudorandom permutation; the system's entropy is good.

    Proof: counter mode under a key that is used once (NIST SP 800-38A).
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
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        stream = Cipher(AES(secrets.token_bytes(32)), CTR(bytes(16))).encryptor()
        return stream.update(bytes(count))

    def words(self, count: int) -> NDArray[np.uint64]:
        return np.frombuffer(self.raw(8 * count), dtype=np.uint64)

    def uniform(self, name: str, step: int, count: int) -> NDArray[np.float64]:
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64; multiplication wraps, masks make shifts logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def derive(keys: Tensor, counter: int | Tensor) -> Tensor:
    """Derive new keys; ``counter`` numbers the uses: view 0, view 1, first dropout, ...

    Guarantee: different keys and counters give independent keys; the map is one to one in the key.

    Assumptions: splitmix64's finaliser passes for a random function.

    Proof: Steele, Lea, Flood 2014; draws of augmentation need no secrecy, since only the unit's own
    direction depends on them.
    """
    if isinstance(counter, int):
        counter = ((counter + 1) * _GOLDEN + 2**63) % 2**64 - 2**63  # wrap as int64 does
    else:
        counter = (counter + 1) * _GOLDEN
    return _mix(_mix(keys) + counter)


def keyed_bits(keys: Tensor, shape: tuple[int, ...], digits: int) -> Tensor:
    """Draw uniform integers in [0, 2^digits): keys [*K] -> int64 [*K, *shape], digits <= 62.

    A key's numbers depend on that key, the position and ``digits`` alone. Integer arithmetic gives
    the same numbers on every device, and runs under vmap.

    Guarantee: a key's numbers depend on that key alone: no unit's draws depend on another unit.

    Assumptions: as for ``derive``.

    Proof: integer arithmetic on each key by itself.
    """
    import torch

    positions = torch.arange(math.prod(shape), device=keys.device, dtype=torch.int64) * _GOLDEN
    bits = _mix(_mix(keys).unsqueeze(-1) + positions)  # [*K, count]
    return ((bits >> (64 - digits)) & ((1 << digits) - 1)).reshape((*keys.shape, *shape))


def keyed_uniform(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw uniform float32 in [0, 1), multiples of 2^-24: keys [N] -> [N, *shape].

    Row n is a function of keys[n] alone, the same on every device; see :func:`keyed_bits`.

    Guarantee: as ``keyed_bits``.

    Assumptions: as ``keyed_bits``.

    Proof: multiples of 2^-24 are exact in float32.
    """
    return keyed_bits(keys, shape, 24).float() / (1 << 24)
