"""Named streams and keyed draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from checks import check_uncorrelated
from dpbam.privacy.randomness import Randomness, derive, keyed_uniform

IDS = torch.arange(1000)


def test_streams_differ_by_seed_name_and_step() -> None:
    draws = [
        Randomness(seed).generator(name, step).random(1000)
        for seed in (0, 1)
        for name in ("noise", "sampling")
        for step in (0, 1)
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            check_uncorrelated(a, b)
    assert np.array_equal(draws[0], Randomness(0).generator("noise", 0).random(1000))


def test_unseeded_generators_never_repeat() -> None:
    randomness = Randomness()
    assert not randomness.seeded
    first, second = (randomness.generator("noise", 0).random(100) for _ in range(2))
    assert not np.isin(first, second).any()


def test_unseeded_keys_hold_within_a_process_and_not_beyond() -> None:
    """Both of BAM's gradients need the same mask, so keys stay the same within one object."""
    randomness = Randomness()
    keys = randomness.keys("rows", 3, IDS)
    assert torch.equal(keys, randomness.keys("rows", 3, IDS))
    assert not torch.isin(keys, Randomness().keys("rows", 3, IDS)).any()


def test_a_key_depends_on_its_own_id_alone() -> None:
    keys = Randomness(5).keys("rows", 2, IDS)
    some = torch.tensor([7, 3, 999])
    assert torch.equal(Randomness(5).keys("rows", 2, some), keys[some])
    assert len(keys.unique()) == len(IDS)


@pytest.mark.parametrize("other", [("rows", 4), ("views", 3)])
def test_keys_differ_by_name_and_step(other: tuple[str, int]) -> None:
    randomness = Randomness(5)
    assert not torch.isin(randomness.keys("rows", 3, IDS), randomness.keys(*other, IDS)).any()


def test_derived_keys_differ_by_counter() -> None:
    several = torch.stack([derive(IDS, k) for k in range(20)])
    assert len(several.unique()) == several.numel()
    assert torch.equal(derive(IDS, torch.full_like(IDS, 4)), derive(IDS, 4))


def test_keyed_uniform_is_uniform_and_row_by_row() -> None:
    draws = keyed_uniform(derive(IDS, 0), (20,))
    assert draws.dtype == torch.float32
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert kstest(draws.flatten().numpy(), "uniform").pvalue > 1e-3
    check_uncorrelated(draws[:-1].flatten(), draws[1:].flatten())
    check_uncorrelated(draws[:, :-1].flatten(), draws[:, 1:].flatten())
    assert torch.equal(draws[[5, 2]], keyed_uniform(derive(IDS, 0)[[5, 2]], (20,)))


def test_keyed_uniform_runs_under_vmap() -> None:
    keys = derive(IDS[:4], 0)
    mapped = torch.func.vmap(lambda k: keyed_uniform(k[None], (3, 2))[0])(keys)
    assert torch.equal(mapped, keyed_uniform(keys, (3, 2)))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be a whole number >= 0 or None"):
        Randomness(seed)
