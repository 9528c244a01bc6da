"""Slices of the sum: each coordinate on one rank, gathered when the step is on the ledger."""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpbam import mechanism
from dpbam.bias import BiasLens, PrivateStatistics
from dpbam.distributed import Ranks, process
from dpbam.distributed.process import ProcessRanks
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import BLOCK
from support import METHODS, cross_entropy, private_plan, samples, sized_oracle
from together import LIMIT, together

SHAPES = {"a": (2, 3), "none": (0,), "one": (), "flat": (7, 0), "b": (5,)}


def entries(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def round_trip(ranks: Ranks, names: tuple[str, ...]) -> tuple[list[int], dict[str, np.ndarray]]:
    """The coordinates that a rank has, and the total put together again."""
    own = {name: entries(ranks.rank)[name] for name in names}
    part, start = ranks.scatter(own)
    count = sum(p.numel() for p in part.values())
    whole = ranks.gather(part, own)
    return list(range(start, start + count)), {n: t.numpy() for n, t in whole.items()}


def check_round_trip(world: int, names: tuple[str, ...] = tuple(SHAPES)) -> None:
    expected = {name: sum(entries(r)[name] for r in range(world)).numpy() for name in names}
    found = together(world, lambda ranks: round_trip(ranks, names))
    coordinates = sorted(c for part, _ in found for c in part)
    assert coordinates == list(range(sum(e.size for e in expected.values())))  # each once
    for _, whole in found:
        for name, value in expected.items():
            assert whole[name].shape == value.shape
            assert np.abs(whole[name] - value).max(initial=0.0) < 1e-12


@pytest.mark.parametrize(
    ("world", "names"), [(2, tuple(SHAPES)), (3, tuple(SHAPES)), (3, ("none", "one"))]
)
def test_every_coordinate_is_on_one_rank_and_comes_back(world, names):
    check_round_trip(world, names)


def unsupported(*_: object) -> None:
    raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")


def test_without_reduce_scatter_the_result_is_the_same(monkeypatch):
    monkeypatch.setattr(process.dist, "reduce_scatter", unsupported)
    check_round_trip(2)


def test_coordinates_that_overlap_are_noticed(monkeypatch):
    real = ProcessRanks.scatter
    monkeypatch.setattr(ProcessRanks, "scatter", lambda self, own: (real(self, own)[0], 0))
    with pytest.raises(AssertionError):
        check_round_trip(2)


# --- noise


def noise_of(ranks: Ranks, kind: str = "standard", seed: int | None = 5) -> np.ndarray:
    """Two steps of noise on more coordinates than one generator draws, some of them frozen."""
    model = nn.Sequential(nn.Linear(520, 260), nn.Linear(260, 3), nn.Linear(3, 3)).double()
    model[1].weight.requires_grad_(False)
    oracle = sized_oracle(
        model, cross_entropy, private_plan(clip_norm=0.5), ranks=ranks, seed=seed, noise=kind
    )
    found = []
    for _ in range(2):
        oracle.backward(torch.zeros(0, 520).double(), torch.zeros(0).long(), torch.zeros(0).long())
        found += [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    noise = torch.cat(found).numpy()
    assert len(noise) > 2 * BLOCK
    return noise


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_seeded_noise_does_not_depend_on_the_number_of_ranks(world):
    alone = noise_of(Ranks())
    assert all(np.array_equal(found, alone) for found in together(world, noise_of))


@pytest.mark.parametrize("kind", ["standard", "secure"])
def test_unseeded_ranks_share_no_noise(kind):
    """On the secure grid two of 2^21 cells per deviation are equal by chance, rarely neighbours.

    The slices, and the two steps, of which each rank drew half: no run of three equal draws.
    """
    found, other = together(2, lambda ranks: noise_of(ranks, kind, None))
    assert np.array_equal(found, other)
    half = len(found) // 2
    slices = [found[:half], found[half:]]
    slices = [s for step in slices for s in (step[: -(-half // 2)], step[-(-half // 2) :])]
    for i, a in enumerate(slices):
        for b in slices[:i]:
            same = a[: len(b)] == b[: len(a)]
            assert not (same[2:] & same[1:-1] & same[:-2]).any()


# --- the ledger comes first


def charged_at_each_gather(ranks: Ranks, path: Any) -> list[int]:
    """The lines of the ledger's file, whenever this rank is about to gather slices."""
    seen, real = [], process.dist.all_gather

    def spied(*args: object) -> object:
        seen.append(len(path.read_text().splitlines()) if path.exists() else 0)
        gathering.set()
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.dist, "all_gather", spied)
        ledger = Ledger(1e-3, path=path) if ranks.leads else None
        plan, units = private_plan(), torch.arange(ranks.rank, 10, ranks.world)
        oracle = sized_oracle(nn.Linear(4, 3).double(), cross_entropy, plan, ranks=ranks,
                              ledger=ledger)  # fmt: skip
        for _ in range(2):
            oracle.backward(*samples(len(units)), units.clone())
    return seen


gathering = multiprocessing.get_context("fork").Event()


def test_no_rank_gathers_before_the_step_is_on_disk(tmp_path):
    found = together(2, lambda ranks: charged_at_each_gather(ranks, tmp_path / "ledger.jsonl"))
    assert found == [[1, 2], [1, 2]]


def test_ranks_that_do_not_wait_for_the_ledger_are_noticed(tmp_path, monkeypatch):
    """The negative control: the leader is slow to charge, and the other rank goes ahead."""
    real = mechanism.charge

    def late(terms: mechanism.Terms, replay: str | None) -> None:
        gathering.wait(LIMIT)  # until the other rank is about to gather
        real(terms, replay)

    gathering.clear()
    monkeypatch.setattr(mechanism, "charge", late)
    monkeypatch.setattr(
        ProcessRanks, "from_leader", lambda self, make: make() if self.leads else None
    )
    found = together(2, lambda ranks: charged_at_each_gather(ranks, tmp_path / "ledger.jsonl"))
    assert found[1][0] == 0


# --- what watches a step


def watched(ranks: Ranks, method: str, batch_size: int) -> tuple[list[Any], list[Any]]:
    """What the lens measures, and what is released with noise, in four steps of float64."""
    seen = PrivateStatistics([0.5, 2.0], noise_multiplier=5.0, bias_bound=0.2)
    lens = BiasLens(plain=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    plan = private_plan(n=80, batch_size=batch_size, steps=4, clip_norm=0.3,
                        joint_noise_multipliers=seen.noise_multipliers)  # fmt: skip
    oracle = sized_oracle(
        model, cross_entropy, plan, METHODS[method](0.3), seed=3, ranks=ranks, observers=lens,
        statistics=seen, physical_batch_size=4,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in oracle.batches(samples(80)):
        oracle.backward(*batch)
        optimizer.step()
    return [asdict(r) for r in lens.records], [asdict(r) for r in seen.released]


def numbers(value: Any) -> list[float]:
    """All numbers in a record."""
    if isinstance(value, dict):
        return [x for v in value.values() for x in numbers(v)]
    if isinstance(value, list | tuple):
        return [x for v in value for x in numbers(v)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.parametrize(
    ("method", "batch_size", "world"),
    [
        ("bam", 9, 2),
        pytest.param("bam", 1, 2, id="mostly empty shares"),
        ("dp-sat", 9, 3),
        pytest.param("dp-sgd", 9, 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_measurements_and_releases_are_those_of_one_process(method, batch_size, world):
    alone = watched(Ranks(), method, batch_size)
    assert all(len(part) == 4 for part in alone)
    for found in together(world, lambda ranks: watched(ranks, method, batch_size)):
        for one, other in zip(alone, found, strict=True):
            assert numbers(one) == pytest.approx(numbers(other), rel=1e-9, abs=1e-9, nan_ok=True)


def test_measurements_of_one_rank_alone_are_noticed(monkeypatch):
    """The negative control: norms that are not collected."""
    monkeypatch.setattr(ProcessRanks, "collect", lambda self, own: [own] * self.world)
    alone = watched(Ranks(), "bam", 9)
    for found in together(2, lambda ranks: watched(ranks, "bam", 9)):
        assert numbers(found[0]) != pytest.approx(
            numbers(alone[0]), rel=1e-9, abs=1e-9, nan_ok=True
        )
