"""The same training on 1, 2 and 4 processes: parameters, samples, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checks import LEVEL, RARE, check_poisson
from dpbam import (
    BAM,
    Compute,
    FlatClipping,
    Method,
    PrivacyPlan,
    PrivateGradientOracle,
    assembly,
    guard,
)
from dpbam.bias import BiasLens, PrivateStatistics
from dpbam.contenders.clippings import QuantileClipping
from dpbam.contenders.disk import DiSK
from dpbam.distributed import EndedElsewhereError, RankLostError, Ranks, watch
from dpbam.distributed.process import ProcessRanks
from dpbam.errors import PlanViolationError
from dpbam.filters import Exponential, Filter, LowPass
from dpbam.methods import SAM, SGD
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from dpbam.privacy.sampling import UnitShare
from support import (
    CLIPPINGS,
    METHODS,
    cross_entropy,
    poisson_batches,
    private_plan,
    quiet_plan,
    samples,
)
from together import together

STEPS, RECORDS = 6, 80
OWNERS = np.arange(RECORDS) * 7 % 30  # 30 patients with two or three records each


def jitter(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """An augmentation: a shift that depends on the row's key."""
    return x + 0.1 * (keys % 7).double().unsqueeze(1)


def case_plan(clipping: str, group: bool, batch_size: int = 9) -> PrivacyPlan:
    unit = {"unit": "patient", "max_records": 2, "n": 30} if group else {"n": RECORDS}
    return quiet_plan(0.5, clipping=clipping, batch_size=batch_size, steps=STEPS, **unit)


def case(method: str, clipping: str, group: bool, views: int) -> tuple[Method, PrivacyPlan, int]:
    return METHODS[method](0.3), case_plan(clipping, group), views


def cases() -> dict[str, tuple[Method, PrivacyPlan, int]]:
    """Every method with every clipping; by turns of records, and of patients with two views."""
    found = {}
    for m, method in enumerate(METHODS):
        for c, clipping in enumerate(CLIPPINGS):
            group = (m + c) % 2 == 1
            name = f"{method}, {clipping}, {'patients, K = 2' if group else 'records'}"
            found[name] = case(method, clipping, group, 2 if group else 1)
    found["mostly empty shares"] = (METHODS["bam"](0.3), case_plan("flat", False, 1), 1)
    plain = quiet_plan(batch_size=9, steps=STEPS, n=RECORDS)
    return found | {"sgd": (SGD(), plain, 1), "sam": (SAM(0.1), plain, 1)}


def few_cases() -> dict[str, tuple[Method, PrivacyPlan, int]]:
    """Every method and every clipping once, and a rank without a unit in most steps."""
    found, every = {}, cases()
    for k, method in enumerate(METHODS):
        clipping = CLIPPINGS[(k + 1) % len(CLIPPINGS)]
        name = next(n for n in every if n.startswith(f"{method}, {clipping}, "))
        found[name] = every[name]
    return found | {name: every[name] for name in ("mostly empty shares", "sam")}


def part_cases() -> dict[str, tuple[Any, ...]]:
    """Clippings with extra coordinates, filters, and a method with a history."""
    sgd, flat = METHODS["dp-sgd"](0.0), case_plan("flat", False)
    return {
        "quantile": case("bam", "quantile", False, 1),
        "slaclip, patients": case("dp-sat", "slaclip", True, 2),
        "doppler": (sgd, flat, 1, LowPass),
        "exponential, slaclip": (sgd, case_plan("slaclip", False), 1, Exponential),
        "disk": (DiSK(inner=METHODS["bam"](0.3)), flat, 1),
    }


def every_case() -> dict[str, tuple[Method, PrivacyPlan, int]]:
    """Those above, and every method with every clipping, unit and K = 1, 2."""
    every = product(METHODS, CLIPPINGS, (False, True), (1, 2))
    return cases() | {str(choice): case(*choice) for choice in every}


def trained(
    ranks: Ranks, method: Method, plan: PrivacyPlan, views: int,
    make_filter: Callable[[], Filter] | None = None,
) -> np.ndarray:  # fmt: skip
    """The parameters after the plan's steps of SGD, float64, sigma = 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)).double()
    oracle = PrivateGradientOracle(
        model, cross_entropy, plan, method, compute=Compute(physical_batch_size=24), augment=jitter,
        multiplicity=views, seed=3, ranks=ranks, filter=make_filter and make_filter(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    units = None if plan.unit == "record" else OWNERS
    for batch in oracle.batches(samples(RECORDS), units=units):
        oracle.backward(*batch)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


@cache
def on_processes(world: int, of: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters of each case on each rank."""
    return together(world, lambda ranks: {n: trained(ranks, *c) for n, c in of().items()})


@pytest.mark.parametrize(
    ("world", "of"),
    [
        (2, few_cases),
        (2, part_cases),
        pytest.param(4, part_cases, marks=pytest.mark.slow),
        pytest.param(4, few_cases, marks=pytest.mark.slow),
        pytest.param(2, cases, marks=pytest.mark.slow),
        pytest.param(4, cases, marks=pytest.mark.slow),
        pytest.param(2, every_case, marks=pytest.mark.slow),
        pytest.param(4, every_case, marks=pytest.mark.slow),
    ],
)
def test_without_noise_the_number_of_processes_does_not_change_the_result(world, of):
    (alone,) = on_processes(1, of)
    assert len(alone) == len(of())
    for found in on_processes(world, of):
        for name, expected in alone.items():
            assert np.abs(found[name] - expected).max() < 1e-9, name


@pytest.mark.parametrize(
    "name", ["bam, flat, records", "dp-sat, per-layer, patients, K = 2", "sam"]
)
def test_a_group_of_one_is_a_process_alone(name):
    assert np.array_equal(trained(Ranks(), *few_cases()[name]), on_processes(1, few_cases)[0][name])


@pytest.mark.parametrize("of", [few_cases, part_cases, pytest.param(cases, marks=pytest.mark.slow)])
def test_the_trainings_go_somewhere(of):
    """What the tests above compare: every case its own, and none where it began."""
    found = list(on_processes(1, of)[0].values())
    start = trained(Ranks(), SGD(), quiet_plan(batch_size=9, steps=1, n=RECORDS), 1)
    assert all(np.abs(a - b).max() > 1e-4 for i, a in enumerate(found) for b in found[:i])
    assert all(np.abs(a - start).max() > 1e-2 for a in found)


# --- sampling


def drawn(ranks: Ranks, *, seed: int | None, secure: bool = False) -> list[list[int]]:
    plan = private_plan(n=100, batch_size=20, steps=200)
    batches = poisson_batches(plan, samples(100), seed=seed, secure=secure, share=ranks.share)
    return [units.tolist() for _, _, units in batches]


def joined_steps(parts: list[list[list[int]]]) -> list[list[int]]:
    """The ranks' shares of each step, one after another."""
    return [[unit for share in step for unit in share] for step in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("seed", "secure"),
    [(3, False), (None, False), pytest.param(None, True, marks=pytest.mark.slow)],
)
def test_the_union_of_the_shares_is_one_poisson_sample(seed, secure):
    """Unseeded, rank 1 draws from the system's entropy: false alarms 5e-10."""
    parts = together(2, lambda ranks: drawn(ranks, seed=seed, secure=secure))
    union = [sorted(step) for step in joined_steps(parts)]
    check_poisson(union, 100, 0.2, RARE if seed is None else LEVEL)
    if seed is not None:
        assert union == drawn(Ranks(), seed=seed)


def every_unit(self: UnitShare, units: np.ndarray) -> np.ndarray:
    """Each rank a sample of its own, of all units."""
    return np.ones(len(units), dtype=bool)


def the_same_half(self: UnitShare, units: np.ndarray) -> np.ndarray:
    """No rank has the other units."""
    return units % self.of == 0


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("wrong", [every_unit, the_same_half])
def test_shares_that_overlap_are_found_out(monkeypatch, wrong, seed):
    monkeypatch.setattr(UnitShare, "owns", wrong)
    parts = together(2, lambda ranks: drawn(ranks, seed=seed))
    with pytest.raises(AssertionError):
        check_poisson(joined_steps(parts), 100, 0.2)


def test_one_draw_for_two_shares_is_found_out():
    """The mistake of seeding every rank's sampler alike, each over indices of its own."""
    parts = [drawn(Ranks(), seed=3)] * 2
    union = [[2 * i + r for r, part in enumerate(step) for i in part] for step in
             zip(*parts, strict=True)]  # fmt: skip
    with pytest.raises(AssertionError, match="batch sizes"):
        check_poisson(union, 200, 0.2)


# --- what is refused


def handed(ranks: Ranks, sizes: list[int]) -> tuple[str, int]:
    """The refusal, and the leader's charges, of batches of ``sizes`` units over all ranks."""
    plan = private_plan(n=400, batch_size=40, steps=15)
    oracle = PrivateGradientOracle(
        nn.Linear(4, 3).double(), cross_entropy, plan, ranks=ranks, sampling="poisson-elsewhere"
    )
    said = ""
    for size in sizes:
        units = torch.arange(ranks.rank, size, ranks.world)
        try:
            oracle.backward(*samples(len(units)), units)
        except PlanViolationError as error:
            said = str(error)
            break
    return said, len(oracle.ledger)


@pytest.mark.parametrize(
    ("sizes", "words", "charged"),
    [
        ([40] * 15, "12 batches in a row have 40 units", 11),
        ([38, 400], "the batch has 400 units", 1),
        ([40, 41] * 7 + [44, 45], "all 15 steps of the plan are taken", 15),
    ],
)
def test_every_rank_refuses_what_the_plan_does_not_account_for(sizes, words, charged):
    (first, entries), (second, others) = together(2, lambda ranks: handed(ranks, sizes))
    assert words in first
    assert second == first
    assert (entries, others) == (charged, 0)


def halves(ranks: Ranks) -> int:
    """Steps of Poisson batches of which each rank's share alone would be impossible."""
    plan = private_plan(n=8000, batch_size=4000, steps=3, delta=1e-5)
    oracle = PrivateGradientOracle(
        nn.Linear(4, 3).double(),
        cross_entropy,
        plan,
        compute=Compute(physical_batch_size=4096),
        ranks=ranks,
        seed=1,
    )
    try:
        for batch in oracle.batches(samples(8000)):
            oracle.backward(*batch)
    except PlanViolationError:
        return -1
    return oracle.step


def test_the_size_is_that_of_all_ranks_together(monkeypatch):
    assert together(2, halves) == [3, 3]
    monkeypatch.setattr(ProcessRanks, "sums", Ranks.sums)  # each rank looks at its own share
    monkeypatch.setattr(guard, "check_same_step", lambda *args: None)  # which needs the sums
    assert together(2, halves) == [-1, -1]


class Lenient(FlatClipping):
    def scales(self, norms: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(norms)


def test_a_clipping_that_fails_on_one_rank_is_charged_on_none(monkeypatch):
    """Rank 0 has units without a gradient only; the leader waits for a sum that never comes."""
    monkeypatch.setattr(watch, "BEAT", 0.2)
    charged = []

    def lenient(ranks: Ranks) -> None:
        oracle = oracle_of(ranks, clipping=Lenient(1.0))
        charged.append(oracle.ledger)
        units = torch.arange(ranks.rank, 10, ranks.world)
        x = torch.full((len(units), 4), 100.0 * ranks.rank, dtype=torch.float64)
        with torch.no_grad():
            oracle.model.bias.copy_(torch.tensor([1e3, 0.0, 0.0]))  # sure of class 0
        oracle.backward(x, ranks.rank * torch.ones(len(units), dtype=torch.long), units)

    with pytest.raises((EndedElsewhereError, RankLostError)):
        together(2, lenient)
    assert [len(ledger) for ledger in charged] == [0]


class Second(Ranks):
    """Rank 1 of 2, on paper."""

    rank, world = 1, 2


def oracle_of(ranks: Ranks, **options: object) -> PrivateGradientOracle:
    return PrivateGradientOracle(
        nn.Linear(4, 3).double(),
        cross_entropy,
        private_plan(),
        ranks=ranks,
        sampling="poisson-elsewhere",
        **options,
    )


@pytest.mark.parametrize("units", [None, torch.tensor([1, 2, 3])])
def test_units_of_another_rank_are_refused(units):
    x, y = samples(3)
    with pytest.raises(ValueError, match=r"rank 1 of 2 takes its own units only.*oracle\.batches"):
        oracle_of(Second()).backward(x, y, units)


def test_an_observer_on_one_rank_alone_is_refused_on_all():
    def watched(ranks: Ranks) -> str:
        oracle = oracle_of(ranks, observers=BiasLens() if ranks.leads else ())
        units = torch.arange(ranks.rank, 10, ranks.world)
        with pytest.raises(ValueError, match="2 ranks have 1 observers and 0") as refused:
            oracle.backward(*samples(len(units)), units)
        return str(refused.value)

    first, second = together(2, watched)
    assert first == second


class Louder(GaussianNoise):
    """Noise of the user's own, with an option."""

    def __init__(self, factor: float) -> None:
        super().__init__(Randomness(3))
        self.factor = factor


@dataclass(frozen=True)
class Soft(FlatClipping):
    """A clipping of the user's own, with an option."""

    power: float

    def scales(self, norms: torch.Tensor) -> torch.Tensor:
        return (1 + (norms / self.clip_norm) ** self.power) ** (-1 / self.power)


def refused_kinds(differing: list[tuple[PrivacyPlan, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """On two ranks: what is refused of a plan with other options on rank 1 than on rank 0."""

    def made(ranks: Ranks) -> list[str]:
        said = []
        for plan, leaders, others in differing:
            options = {"plan": plan, **(leaders if ranks.leads else others)}
            try:
                PrivateGradientOracle(nn.Linear(4, 3), cross_entropy, ranks=ranks, **options)
                said.append("")
            except ValueError as error:
                said.append(str(error).partition(" than rank 0")[0])
        return said

    return together(2, made)


def test_another_plan_noise_or_clipping_on_one_rank_is_refused_on_all():
    """A smaller sigma there would noise a part of the gradient less than the leader charges."""
    weak, same = private_plan(noise_multiplier=0.1), private_plan()
    found = refused_kinds([
        (same, {}, {"plan": weak}),
        (same, {}, {"noise": "secure"}),
        (same, {}, {"clipping": Lenient(1.0)}),
        (same, {}, {}),
    ])  # fmt: skip
    refused = [f"rank 1 has another {kind}" for kind in ("plan", "noise", "clipping")]
    assert found == [[*refused, ""]] * 2


def other_options() -> list[tuple[PrivacyPlan, dict[str, Any], dict[str, Any]]]:
    """Parts of one class with other options on rank 1; last, with the same ones."""
    same, tracked = private_plan(), private_plan(clipping="quantile")
    return [
        (same, {"noise": Louder(2.0)}, {"noise": Louder(1.0)}),
        (same, {"clipping": Soft(1.0, 2.0)}, {"clipping": Soft(1.0, 4.0)}),
        (tracked, {"clipping": QuantileClipping(1.0, share=0.1)},
         {"clipping": QuantileClipping(1.0, share=0.2)}),
        (same, {"method": DiSK(inner=BAM(0.1))}, {"method": DiSK(inner=BAM(0.2))}),
        (same, {"filter": LowPass()}, {"filter": LowPass(b=(0.5, 0.5), a=())}),
        (same, {"noise": Louder(2.0), "filter": LowPass()},
         {"noise": Louder(2.0), "filter": LowPass()}),
    ]  # fmt: skip


def test_other_options_of_the_same_part_on_one_rank_are_refused_on_all():
    kinds = ("noise", "clipping", "clipping", "method", "filter")
    assert refused_kinds(other_options()) == [[*(f"rank 1 has another {k}" for k in kinds), ""]] * 2


def test_options_that_are_not_compared_would_pass(monkeypatch):
    """Negative control: parts compared by the names of their classes alone."""
    monkeypatch.setattr(assembly, "describe", lambda part: type(part).__qualname__)
    assert refused_kinds(other_options()) == [[""] * 6] * 2


class Remembering(GaussianNoise):
    """Keeps the deviation of each stream."""

    deviations: dict[str, float] = {}  # noqa: RUF012

    def add(self, sums: Any, std: float, step: int, *, stream: str, **more: Any) -> Any:
        self.deviations[stream] = std
        return super().add(sums, std, step, stream=stream, **more)


def deviations_of_noise() -> list[Any]:
    """On two ranks, with a smaller bound on rank 1: of the bias's noise; or what is refused."""

    def step(ranks: Ranks) -> float | str:
        bound = 10.0 if ranks.leads else 0.1
        statistics = PrivateStatistics([1.0], noise_multiplier=5.0, bias_bound=bound)
        plan = private_plan(joint_noise_multipliers=statistics.noise_multipliers)
        noise = Remembering(Randomness(3))
        oracle = PrivateGradientOracle(
            nn.Linear(4, 3).double(), cross_entropy, plan, ranks=ranks, statistics=statistics,
            noise=noise, sampling="poisson-elsewhere",
        )  # fmt: skip
        units = torch.arange(ranks.rank, 10, ranks.world)
        try:
            oracle.backward(*samples(len(units)), units)
        except ValueError as error:
            assert not len(oracle.ledger)
            return str(error)
        return noise.deviations["statistics-bias"]

    return together(2, step)


def test_statistics_with_a_smaller_bound_on_one_rank_are_refused_on_all():
    first, second = deviations_of_noise()
    assert first == second
    assert "rank 1 adds noise of deviations" in first


def test_statistics_that_are_not_compared_would_have_less_noise_on_one_rank(monkeypatch):
    """Negative control: the slice of rank 1 has a hundredth of what its sum needs."""
    monkeypatch.setattr("dpbam.mechanism.check_same_noise", lambda ranks, deviations: None)
    first, second = deviations_of_noise()
    assert first == pytest.approx(100 * second)
