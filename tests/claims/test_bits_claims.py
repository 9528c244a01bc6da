"""Random bits: as many as stated, all of them used, and none twice.

What is secure cannot be seeded; its checks have a false-alarm rate below 1e-9 each, stated where
they are made. What is fast is seeded.
"""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from checks import RARE
from dpbam.privacy import randomness
from dpbam.privacy.noise import BLOCK, GaussianNoise
from dpbam.privacy.randomness import Randomness, SecureRandomness
from planting import Mistake, catches
from support import private_plan

UNITS = 2**21
WORDS = 2**19  # 32 bits would give 32 pairs of equal words; 64 bits: one pair in 10^8 runs
#: AES-256 of a block of zeros under a key of zeros (test case 13 of McGrew and Viega, GCM)
ZEROS = bytes.fromhex("dc95c078a2408989ad48a21492842087")


def check_draws_do_not_repeat(bits: NDArray[np.bool_]) -> None:
    """No stretch of 64 fair bits occurs twice, wherever it begins.

    Two given stretches agree with probability 2^-64, and all 2^41 pairs with 1e-7; a sequence that
    repeats gives a pair at each place, so 64 pairs are asked for: false alarms below 1e-20.
    """
    windows, width = bits.astype(np.uint64), 1
    while width < 64:
        windows = windows[:-width] | (windows[width:] << np.uint64(width))
        width *= 2
    repeats = pairs(windows)
    assert repeats < 64, f"{repeats} stretches of 64 draws come twice"


def check_poisson_draws_do_not_repeat(kind: str = "standard") -> None:
    """Among two million units, at q = 1/2."""
    plan = private_plan(n=UNITS, batch_size=UNITS // 2, delta=1e-8)
    secure = kind == "secure"
    included = plan.sampler(seed=None if secure else 3, secure=secure).indices(0)
    bits = np.zeros(UNITS, dtype=bool)
    bits[included] = True
    check_draws_do_not_repeat(bits)


def check_secure_poisson_draws_do_not_repeat() -> None:
    check_poisson_draws_do_not_repeat("secure")


def check_keys_are_distinct() -> None:
    """Exactly, whatever the ids: the map from ids to keys is one to one."""
    ids = torch.cat([torch.arange(4096) + (1 << k) for k in range(13, 63)] + [torch.arange(2**17)])
    ids = ids.unique()
    keys = Randomness(5).keys("rows", 2, ids)
    assert len(keys.unique()) == len(ids)


def check_keyed_draws_do_not_repeat() -> None:
    """Neither along the draws of one key nor over keys."""
    of_one = randomness.keyed_uniform(torch.tensor([7]), (2**20,))[0]
    of_many = randomness.keyed_uniform(Randomness(5).keys("rows", 2, torch.arange(2**20)), (1,))
    for draws in (of_one, of_many[:, 0]):
        check_draws_do_not_repeat((draws < 0.5).numpy())


def check_bits(words: NDArray[np.uint64], width: int) -> None:
    """``width`` fair, linearly independent bits in each word, and hardly a word twice.

    False alarms: RARE for the shares of ones; 2^-190 for the rank of 256 words; 1e-26 for five
    pairs among 2^19 words of 53 bits, where 2^37 / 2^53 = 1.5e-5 are expected.
    """
    assert int(np.bitwise_or.reduce(words)) < 2**width
    for place in range(width):
        ones = int(((words >> np.uint64(place)) & np.uint64(1)).sum())
        p = 2 * min(binom.cdf(ones, len(words), 0.5), binom.sf(ones - 1, len(words), 0.5))
        assert p > RARE / width, f"bit {place} is 1 in {ones} of {len(words)} words"
    assert rank(words[:256].tolist()) == width, "a bit is a function of others"
    assert pairs(words) < 5, f"{pairs(words)} words come twice"


def pairs(words: NDArray[np.uint64]) -> int:
    """Words that have come before."""
    ordered = np.sort(words)
    return int((ordered[1:] == ordered[:-1]).sum())


def rank(words: list[int]) -> int:
    """Over GF(2)."""
    basis: dict[int, int] = {}
    for word in words:
        while word and word.bit_length() in basis:
            word ^= basis[word.bit_length()]
        if word:
            basis[word.bit_length()] = word
    return len(basis)


def check_words_have_64_bits() -> None:
    check_bits(SecureRandomness().words(WORDS), 64)


def check_secure_uniform_numbers_have_53_bits() -> None:
    check_53_bits(SecureRandomness())


def check_53_bits(source: Randomness) -> None:
    """Multiples of 2^-53 in [0, 1), every bit used."""
    scaled = source.uniform("sampling", 0, WORDS) * 2.0**53
    assert bool((scaled == np.floor(scaled)).all())
    check_bits(scaled.astype(np.uint64), 53)


def check_keys_have_256_bits() -> None:
    """AES-256, and each bit of the system's entropy changes what is drawn."""
    with pytest.MonkeyPatch.context() as patch:

        def drawn(entropy: int) -> bytes:
            whole = entropy.to_bytes(32, "big")
            patch.setattr(secrets, "token_bytes", lambda count: whole[:count])
            return SecureRandomness().raw(16)

        assert drawn(0) == ZEROS
        assert len({drawn(1 << place) for place in range(256)} | {drawn(0)}) == 257


def test_standard_uniform_numbers_have_53_bits() -> None:
    check_53_bits(Randomness(0))


def check_noise_uses_all_bits_of_its_key() -> None:
    """Seeds that agree in 32, 64 or 128 bits, and other steps and blocks, draw other noise."""
    noise, sums = GaussianNoise, {"w": torch.zeros(BLOCK + 4, dtype=torch.float64)}
    drawn = [
        noise(Randomness(1 + offset)).add(sums, 1.0, step)["w"][at : at + 4]
        for offset in (0, 2**32, 2**64, 2**128, 2**200)
        for step in (0, 1)
        for at in (0, BLOCK)
    ]
    assert len(torch.cat(drawn).unique()) == 4 * len(drawn)


def test_noise_uses_all_bits_of_its_key() -> None:
    check_noise_uses_all_bits_of_its_key()


# --- the mistakes


class TorchsGenerator:
    """``manual_seed`` on a processor keeps 32 bits of its seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed % 2**63)

    def random_raw(self, count: int) -> NDArray[np.uint64]:
        halves = torch.randint(2**32, (2 * count,), generator=self._generator).numpy()
        return halves.astype(np.uint32).view(np.uint64)


def seeded_by_torch(original):
    """Different steps and blocks, but for equal seeds modulo 2^32 the same noise."""

    def generator(self, name, step, block):
        return TorchsGenerator(self.seed + 1000 * step + 100 * block)

    return generator


def keyed_by_64_bits(original):
    return lambda self, name, step, block: original(
        Randomness(self.seed % 2**64), name, step, block
    )


def beyond_65536(original):
    """A generator of blocks that starts over."""

    def uniform(self, name, step, count):
        return np.resize(original(self, name, step, min(count, 2**16)), count)

    return uniform


def beyond_a_million(original):
    """A period that is no power of two."""

    def uniform(self, name, step, count):
        return np.resize(original(self, name, step, min(count, 1_000_003)), count)

    return uniform


def ids_of_32_bits(original):
    return lambda self, name, step, ids: original(self, name, step, ids.int())


def ids_modulo_65536(original):
    return lambda self, name, step, ids: original(self, name, step, ids % 2**16)


def positions_of_16_bits(original):
    def keyed_uniform(keys, shape):
        return original(keys, (min(shape[0], 2**16),)).repeat(1, -(-shape[0] // 2**16))

    return keyed_uniform


def words_of_32_bits(original):
    """Twice the same half."""
    return lambda self, count: (original(self, count) >> np.uint64(32)) * np.uint64(2**32 + 1)


def words_of_63_bits(original):
    return lambda self, count: original(self, count) & np.uint64(2**64 - 2)


def mixed_from_32_bits(original):
    """A seed of 32 bits behind a good mixer: every bit is fair."""

    def words(self, count):
        seeds = (original(self, count) >> np.uint64(32)).astype(np.int64)
        return randomness.derive(torch.from_numpy(seeds), 0).numpy().view(np.uint64)

    return words


def single_precision(original):
    def uniform(self, name, step, count):
        return original(self, name, step, count).astype(np.float32).astype(np.float64)

    return uniform


def a_short_key(bits: int):
    def wrong(original):
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        def raw(self, count):
            key = secrets.token_bytes(bits // 8).ljust(max(16, bits // 8), b"\0")
            return (
                Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(count))
            )

        return raw

    return wrong


Secure = SecureRandomness
MISTAKES = {
    "noise by torch's manual_seed, of 32 bits": Mistake(
        check_noise_uses_all_bits_of_its_key, Randomness, "noise_generator", seeded_by_torch
    ),
    "noise with a key of 64 bits": Mistake(
        check_noise_uses_all_bits_of_its_key, Randomness, "noise_generator", keyed_by_64_bits
    ),
    "Poisson draws that repeat beyond 65,536 units": Mistake(
        check_poisson_draws_do_not_repeat, Randomness, "uniform", beyond_65536
    ),
    "Poisson draws that repeat beyond a million units": Mistake(
        check_poisson_draws_do_not_repeat, Randomness, "uniform", beyond_a_million
    ),
    "secure Poisson draws that repeat beyond 65,536 units": Mistake(
        check_secure_poisson_draws_do_not_repeat, Secure, "uniform", beyond_65536
    ),
    "keys that repeat beyond 2^32 units": Mistake(
        check_keys_are_distinct, Randomness, "keys", ids_of_32_bits
    ),
    "keys that repeat beyond 65,536 units": Mistake(
        check_keys_are_distinct, Randomness, "keys", ids_modulo_65536
    ),
    "keyed draws that repeat beyond 65,536": Mistake(
        check_keyed_draws_do_not_repeat, randomness, "keyed_uniform", positions_of_16_bits
    ),
    "secure words of 32 bits": Mistake(check_words_have_64_bits, Secure, "words", words_of_32_bits),
    "secure words of 63 bits": Mistake(check_words_have_64_bits, Secure, "words", words_of_63_bits),
    "secure words mixed from 32 bits": Mistake(
        check_words_have_64_bits, Secure, "words", mixed_from_32_bits
    ),
    "secure uniform numbers of 24 bits": Mistake(
        check_secure_uniform_numbers_have_53_bits, Secure, "uniform", single_precision
    ),
    "a secure key of 32 bits": Mistake(check_keys_have_256_bits, Secure, "raw", a_short_key(32)),
    "a secure key of 128 bits": Mistake(check_keys_have_256_bits, Secure, "raw", a_short_key(128)),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
