"""Several ranks: the mechanism of one. Noise once in total, a unit on one rank, all step alike."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from test_noise_claims import SIGMA, C, L, silent_oracle
from torch import nn

from checks import LEVEL, RARE, check_gaussian, check_uncorrelated
from dpbam import guard, mechanism
from dpbam.distributed import Ranks, process
from dpbam.errors import ArgumentError
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.sampling import UnitShare
from dpbam.privacy.secure_noise import make_noise
from planting import Mistake, catches, repeats
from support import cross_entropy, poisson_batches, quiet_plan, sized_oracle
from together import together


def noise_on(ranks: Ranks, kind: str = "standard") -> tuple[np.ndarray, int]:
    """What two steps without gradients release, times l, and the ledger's length."""
    oracle = silent_oracle(seed=7 if kind == "standard" else None)
    oracle.ranks, oracle.noise = ranks, make_noise(kind, oracle.randomness.seed)
    own = torch.arange(ranks.rank, 5, ranks.world)
    found = []
    for _ in range(2):
        x, y = torch.zeros(len(own), 60), torch.zeros(len(own), dtype=torch.long)
        oracle.backward(x, y, own.clone())
        found += [p.grad.flatten().numpy() * L for p in oracle.model.parameters()]
    return np.concatenate(found), len(oracle.ledger)


def check_noise_over_ranks(world: int = 2, kind: str = "standard") -> None:
    """N(0, (sigma C)^2) in total, whatever the number of ranks, and charged once."""
    found = together(world, lambda ranks: noise_on(ranks, kind))
    check_gaussian(found[0][0], SIGMA * C, LEVEL if kind == "standard" else RARE)
    assert [entries for _, entries in found] == [2] + [0] * (world - 1)


def check_noise_is_keyed_by_coordinate() -> None:
    """Seeded, it is that of a single process, and slices of it are independent."""
    alone, _ = noise_on(Ranks())
    for found, _ in together(2, noise_on):
        assert np.array_equal(found, alone)
    step = alone[: len(alone) // 2]
    check_uncorrelated(step[: len(step) // 2], step[len(step) // 2 :])


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


def step_of_rank(ranks: Ranks, change: str) -> tuple[str, int, int]:
    """What becomes of a step where rank 1 has not resumed, or has another clip than at first."""
    plan = quiet_plan(C, n=6, batch_size=6, steps=4, clip_schedule=(1.0, 0.01))
    torch.manual_seed(0)
    oracle = sized_oracle(nn.Linear(4, 3).double(), cross_entropy, plan, ranks=ranks)
    if change == "step":
        if ranks.leads:
            for step in range(2):
                oracle.ledger.charge("s", step, noise_multiplier=1.0, sampling_rate=1.0)
            oracle.load_state_dict({"step": 2})
    elif not ranks.leads:
        object.__setattr__(oracle.clipping, "clip_norm", C / 100)
    own = torch.arange(ranks.rank, 6, ranks.world)
    before = len(oracle.ledger)
    try:
        oracle.backward(torch.ones(len(own), 4).double(), torch.zeros(len(own)).long(), own)
    except ArgumentError as refusal:
        return str(refusal), len(oracle.ledger) - before, oracle.step
    return "released", len(oracle.ledger) - before, oracle.step


def check_ranks_are_at_one_step_with_one_clip() -> None:
    """A rank that did not resume, or clips to another norm, is refused before a charge."""
    for change in ("step", "clip"):
        for refusal, charged, _ in together(2, partial(step_of_rank, change=change)):
            assert "the ranks are not at the same step" in refusal
            assert charged == 0


@pytest.mark.parametrize(("world", "kind"), [(1, "standard"), (4, "standard"), (2, "secure")])
def test_the_noise_is_that_of_one_process(world: int, kind: str) -> None:
    check_noise_over_ranks(world, kind)


# --- the mistakes


def released_by(noised):
    """A mechanism that releases the sum over the ranks of ``noised(step, clipped)``."""

    def mistake(original):
        def add_noise(query, step):
            total = step.ranks.total(noised(step, query.sums))
            mean = {n: s / (L * step.ranks.world) for n, s in total.items()}
            return step.ranks.scatter(mean)[0]  # which adds up the ranks' means

        return add_noise

    return mistake


def full_noise(step, clipped):
    return step.noise.add(clipped, SIGMA * C, step.number, start=step.ranks.rank * 10**6)


def shares_of_noise_from_one_seed(step, clipped):
    """Each rank adds its share of the variance, but all draw alike."""
    return step.noise.add(clipped, SIGMA * C / math.sqrt(step.ranks.world), step.number)


def each_keeps_its_own(original):
    """No message: every rank takes its own slice for those of the others."""
    return lambda parts, own: [part.copy_(own) for part in parts]


def the_same_in_every_slice(original):
    return lambda self, sums, std, step, **more: original(self, sums, std, step)


def on_the_first_slice_only(original):
    def add(self, sums, std, step, *, stream="noise", start=0, **more):
        return dict(sums) if start else original(self, sums, std, step)

    return add


def every_rank_has_every_unit(original):
    return lambda self, units: np.ones(len(units), dtype=bool)


def not_compared(original):
    return lambda *args: None


MISTAKES = {
    "a rank that did not resume": Mistake(
        check_ranks_are_at_one_step_with_one_clip, guard, "check_same_step", not_compared
    ),
    "full noise on every rank": Mistake(
        check_noise_over_ranks, mechanism, "add_noise", released_by(full_noise)
    ),
    "no noise on any rank": Mistake(
        check_noise_over_ranks,
        mechanism,
        "add_noise",
        released_by(lambda step, clipped: clipped),
    ),
    "the same noise on every rank": Mistake(
        check_noise_over_ranks, mechanism, "add_noise", released_by(shares_of_noise_from_one_seed)
    ),
    "noise on one rank's slice only": Mistake(
        check_noise_over_ranks, GaussianNoise, "add", on_the_first_slice_only
    ),
    "the same noise in two slices": Mistake(
        check_noise_is_keyed_by_coordinate, GaussianNoise, "add", the_same_in_every_slice
    ),
    "ranks that step apart": Mistake(
        check_ranks_step_alike, process.dist, "all_gather", each_keeps_its_own
    ),
    "a unit on two ranks": Mistake(
        check_a_unit_is_on_one_rank, UnitShare, "owns", every_rank_has_every_unit
    ),
}


@catches(MISTAKES, slow=repeats(MISTAKES))  # each starts processes
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
