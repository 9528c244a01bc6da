"""Settings that every test shares: the same draws in every run, in whatever order."""

from __future__ import annotations

import gc
import os
import random
import secrets
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("steady")


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it in every test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the tests themselves, and import no helper that no test imports."""
    found = yield
    return [each for each in found if type(each).__name__ != "DoctestModule"]


class Entropy:
    """In place of the operating system's: repeats from run to run, and never within one.

    Noise without a seed would fail a statistical check now and then. Processes that a test forks
    have the real one, or they would all draw the same.
    """

    def __init__(self) -> None:
        self._stream, self._owner, self._real = random.Random(), os.getpid(), secrets.randbits

    def restart(self, name: str) -> None:
        """Begin the draws of a test, or of a module's shared fixtures."""
        self._stream.seed(name)  # by SHA-512 of the name, whatever PYTHONHASHSEED is
        torch.manual_seed(0)

    def randbits(self, k: int) -> int:
        """``secrets.randbits``."""
        return self._stream.getrandbits(k) if os.getpid() == self._owner else self._real(k)

    def token_bytes(self, nbytes: int = 32) -> bytes:
        """``secrets.token_bytes``."""
        return self.randbits(8 * nbytes).to_bytes(nbytes, "little")

    def token_hex(self, nbytes: int = 32) -> str:
        """``secrets.token_hex``."""
        return self.token_bytes(nbytes).hex()


@pytest.fixture(scope="session", autouse=True)
def entropy() -> Iterator[Entropy]:
    """What stands in for the system's entropy."""
    found = Entropy()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("randbits", "token_bytes", "token_hex"):
            patch.setattr(secrets, name, getattr(found, name))
        yield found


@pytest.fixture(scope="module", autouse=True)
def _same_start_of_a_module(request: pytest.FixtureRequest, entropy: Entropy) -> None:
    entropy.restart(request.node.nodeid)


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest, entropy: Entropy) -> None:
    entropy.restart(request.node.nodeid)
