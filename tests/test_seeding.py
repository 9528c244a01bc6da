"""What a test draws is a function of its name, or of its fixture's: not of the run or the order."""

from __future__ import annotations

import random
import secrets
import zlib

import numpy as np
import pytest
import torch

Drawn = tuple[int, float, float, float]


def draw() -> Drawn:
    """One number of each generator."""
    legacy = float(np.random.rand())  # noqa: NPY002
    return secrets.randbits(64), random.random(), legacy, float(torch.rand(()))


def expected(name: str) -> Drawn:
    legacy = np.random.RandomState(zlib.crc32(name.encode()))
    entropy, own = random.Random(name), random.Random(name)
    torchs = torch.rand((), generator=torch.Generator().manual_seed(0))
    return entropy.getrandbits(64), own.random(), float(legacy.rand()), float(torchs)


@pytest.fixture(scope="module")
def shared() -> Drawn:
    return draw()


@pytest.mark.parametrize("turn", [1, 2])
def test_draws_are_a_function_of_the_name(turn: int, request: pytest.FixtureRequest) -> None:
    assert draw() == expected(request.node.nodeid)
    assert draw() != expected(request.node.nodeid)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_shared_fixture_draws_the_same_whoever_asks_first(
    turn: int, shared: Drawn, request: pytest.FixtureRequest
) -> None:
    module = request.node.nodeid.partition("::")[0]
    assert shared == expected(f"{module} shared")
    assert draw() == expected(request.node.nodeid)
