"""Several ranks: the mechanism of one. Noise once in total, a unit on one rank, all step alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_noise_claims import SIGMA, C, L, silent_oracle
from torch import nn

from checks import LEVEL, RARE, check_gaussian
from dpbam.distributed import Ranks, process
from dpbam.distributed.process import ProcessRanks
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.sampling import UnitShare
from dpbam.privacy.secure_noise import make_noise
from planting import Mistake, catches
from support import cross_entropy, poisson_batches, quiet_plan, sized_oracle
from together import together


def noise_on(ranks: Ranks, kind: str = "standard") -> tuple[np.ndarray, int]:
    """What two steps without gradients release, times l, and the ledger's length."""
    oracle = silent_oracle(seed=7 if kind == "standard" else None)
    oracle.ranks, oracle.noise = ranks, make_noise(kind, oracle.randomness.seed)
    own = torch.arange(ranks.rank, 5, ranks.world)
    found = []
    for _ in range(2):
        oracle.backward(torch.zeros(len(own), 60), torch.zeros(len(own), dtype=torch.long), own)
        found += [p.grad.flatten().numpy() * L for p in oracle.model.parameters()]
    return np.concatenate(found), len(oracle.ledger)


def check_noise_over_ranks(world: int = 2, kind: str = "standard") -> None:
    """N(0, (sigma C)^2) in total, whatever the number of ranks, and charged once."""
    found = together(world, lambda ranks: noise_on(ranks, kind))
    check_gaussian(found[0][0], SIGMA * C, LEVEL if kind == "standard" else RARE)
    assert [entries for _, entries in found] == [2] + [0] * (world - 1)


def check_ranks_step_alike() -> None:
    """The released gradient is the same on every rank, bit for bit."""
    one, two = (noise for noise, _ in together(2, noise_on))
    assert np.array_equal(one, two)


def check_a_unit_is_on_one_rank() -> None:
    """At q = 1, six units beyond the clip give a sum of 6 C: none is missing, none twice."""
    data = (torch.full((6, 4), 50.0).double(), torch.zeros(6, dtype=torch.long))

    def length(ranks: Ranks) -> float:
        torch.manual_seed(0)
        model, plan = nn.Linear(4, 3).double(), quiet_plan(C, n=6, batch_size=6, steps=1)
        oracle = sized_oracle(model, cross_entropy, plan, ranks=ranks)
        for batch in poisson_batches(plan, data, share=ranks.share):
            oracle.backward(*batch)
        return 6 * math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))

    for found in together(2, length):
        assert found == pytest.approx(6 * C)


@pytest.mark.parametrize(("world", "kind"), [(1, "standard"), (4, "standard"), (2, "secure")])
def test_the_noise_is_that_of_one_process(world: int, kind: str) -> None:
    check_noise_over_ranks(world, kind)


# --- the mistakes


def full_noise_on_every_rank(original):
    return lambda self, own, privatise: self.total(privatise(own))


def no_noise_on_any_rank(original):
    def release(self, own, privatise):
        privatise({n: torch.zeros_like(s) for n, s in own.items()})  # charged, and thrown away
        return {n: s / L for n, s in self.total(own).items()}

    return release


def shares_of_noise_from_one_seed(original):
    """Each rank adds its share of the variance, but all draw alike."""

    def release(self, own, privatise):
        noise = GaussianNoise(Randomness(7))
        noised = noise.add(own, SIGMA * C / math.sqrt(self.world), step=0)
        return {n: s / L for n, s in self.total(noised).items()}

    return release


def each_keeps_its_own(original):
    """No broadcast: the followers step along what they had."""
    return lambda message, src: None


def every_rank_has_every_unit(original):
    return lambda self, units: np.ones(len(units), dtype=bool)


MISTAKES = {
    "full noise on every rank": Mistake(
        check_noise_over_ranks, ProcessRanks, "release", full_noise_on_every_rank
    ),
    "no noise on any rank": Mistake(
        check_noise_over_ranks, ProcessRanks, "release", no_noise_on_any_rank
    ),
    "the same noise on every rank": Mistake(
        check_noise_over_ranks, ProcessRanks, "release", shares_of_noise_from_one_seed
    ),
    "ranks that step apart": Mistake(
        check_ranks_step_alike, process.dist, "broadcast", each_keeps_its_own
    ),
    "a unit on two ranks": Mistake(
        check_a_unit_is_on_one_rank, UnitShare, "owns", every_rank_has_every_unit
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
