"""Sampler, accountant and ledger: they agree, nothing is skipped, nothing is under-counted."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checks import check_poisson
from dpbam import Ledger, PrivacyPlan, _jsonl, joint_release, mechanism
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.joint_release import Contributions
from dpbam.loading import PoissonBatches
from dpbam.params import digest
from dpbam.privacy import accounting, calibration
from dpbam.privacy.clipping import Clipping, StepClipping, bound_factors
from dpbam.privacy.sampling import PoissonSampler, UnitIndex
from planting import Mistake, catches
from support import cross_entropy, poisson_batches, private_plan, samples, sized_oracle, smooth_net


def check_sampling_is_as_accounted() -> None:
    """What an oracle draws is Poisson at the rate that the ledger was charged with."""
    plan = private_plan(n=150, batch_size=40, steps=300)
    (x, y), model = samples(150), smooth_net()
    drawn = [units.numpy() for _, _, units in poisson_batches(plan, (x, y), seed=3)]
    assert len(drawn) == plan.steps, "a step was skipped"
    oracle = sized_oracle(model, cross_entropy, plan)
    oracle.backward(x[:4], y[:4])
    (charge,) = oracle.ledger.charges()
    assert charge.noise_multiplier == plan.noise_multiplier
    check_poisson(drawn, 150, charge.sampling_rate)
    assert charge.sampling_rate == 40 / 150


def check_empty_batches_are_steps() -> None:
    plan = private_plan(n=100, batch_size=1, steps=30)
    x, y = samples(100)
    sizes = [len(units) for _, _, units in poisson_batches(plan, (x, y), seed=0)]
    assert len(sizes) == 30
    assert 0 in sizes


def check_groups_are_sampled_as_groups() -> None:
    """Patients are drawn at q, and one of them brings at most the cap."""
    owners = np.arange(120) // 4
    plan = private_plan(n=30, batch_size=6, steps=400, unit="patient", max_records=3)
    x, y = samples(120)
    drawn = [units.numpy() for _, _, units in poisson_batches(plan, (x, y), units=owners, seed=5)]
    assert max(np.bincount(units).max() for units in drawn if len(units)) <= 3
    check_poisson([np.unique(units) for units in drawn], 30, 0.2)


def check_calibration() -> None:
    sigma = calibration.noise_multiplier(1.0, 1e-5, 1.0, 2)
    assert accounting.epsilon(sigma, 1.0, 2, 1e-5) <= 1.0


def check_accountant_composes_every_step() -> None:
    """One Gaussian step has a closed form, at q = 1 and below; 16 at q = 1 are one of sigma / 4."""
    once = accounting.epsilon(1.0, 1.0, 1, 1e-5)
    assert accounting.epsilon(4.0, 1.0, 16, 1e-5) == pytest.approx(once, rel=1e-3)
    a, b = 1 / 2, once
    cdf = torch.distributions.Normal(0.0, 1.0).cdf
    delta = float(cdf(torch.tensor(a - b).double()))
    delta -= math.exp(once) * float(cdf(torch.tensor(-a - b).double()))
    assert delta == pytest.approx(1e-5, rel=0.01)
    for q in (0.1, 0.5):
        epsilon = accounting.epsilon(1.0, q, 1, 1e-5)
        assert delta_of_one_sampled_step(epsilon, q) == pytest.approx(1e-5, rel=0.02)


def delta_of_one_sampled_step(epsilon: float, q: float) -> float:
    """Of (1 - q) N(0, 1) + q N(1, 1) against N(0, 1): their ratio is e^epsilon at one point."""
    point = math.log((math.exp(epsilon) - 1 + q) / q) + 1 / 2
    beyond = NormalDist().cdf(-point)
    return (1 - q) * beyond + q * NormalDist().cdf(1 - point) - math.exp(epsilon) * beyond


def check_ledger_comes_first() -> None:
    """When the ledger is charged nothing has reached .grad, and it is on disk on return."""
    model, (x, y) = smooth_net(), samples(4)
    with tempfile.TemporaryDirectory() as folder:
        path, seen = Path(folder) / "ledger.jsonl", []

        class Watching(Ledger):
            def charge(self, *args, **kwargs) -> None:
                seen.append(all(p.grad is None for p in model.parameters()))
                super().charge(*args, **kwargs)
                seen.append(len(path.read_text().splitlines()) == 1)

        ledger = Watching(1e-3, path=path)
        sized_oracle(model, cross_entropy, private_plan(), ledger=ledger).backward(x, y)
    assert seen == [True, True]


def run(path: Path, seed: int | None, steps: int, scale: float = 1.0) -> int:
    """A process of its own, as far as the ledger can tell: entries afterwards."""
    model, (x, y) = smooth_net(), samples(4)
    ledger = Ledger(1e-3, path=path)
    oracle = sized_oracle(model, cross_entropy, private_plan(), seed=seed, ledger=ledger)
    oracle.expect_earlier_steps()
    for _ in range(steps):
        oracle.backward(scale * x, y)
    return len(Ledger(1e-3, path=path))


def check_replays() -> None:
    """The same release free of charge; another one refused; an unseeded one charged again."""
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / "seeded", Path(folder) / "unseeded"
        assert [run(path, 1, 2), run(path, 1, 3)] == [2, 3]
        refused = False
        try:
            run(path, 1, 1, scale=2.0)
        except ValueError:
            refused = True
        assert refused, "the same noise on two sums"
        assert [run(other, None, 2), run(other, None, 2)] == [2, 4]


class Named(torch.nn.Module):
    """A linear model whose only parameter is named as the entry of a statistic."""

    def __init__(self, features: int) -> None:
        super().__init__()
        weight = torch.nn.Parameter(torch.zeros(3, features, dtype=torch.float64))
        self.register_parameter("statistics/count", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ getattr(self, "statistics/count").T


class Counts:
    """Releases the number of units."""

    noise_multipliers = (5.0,)
    sensitivities = MappingProxyType({"count": 1.0})

    def begin(self, facts: Any) -> None:
        pass

    def contributions(self, batch: Any) -> dict[str, Any]:
        ones = torch.ones(1, len(batch.ids), dtype=torch.float64)
        return {name: Contributions(values=ones) for name in self.sensitivities}

    def publish(self, released: Any) -> None:
        pass


def check_a_replay_has_the_same_gradient() -> None:
    """Another batch of the same size, under the same seed, is no replay, whatever the names are."""
    plan = private_plan(n=100, batch_size=10, joint_noise_multipliers=Counts.noise_multipliers)
    ledger, (x, y) = Ledger(plan.delta, "rdp"), samples(9)
    for batch in (x, -x):
        model = Named(x.shape[1])
        oracle = sized_oracle(
            model, cross_entropy, plan, seed=3, ledger=ledger, statistics=Counts()
        )
        try:
            oracle.backward(batch, y)
        except ArgumentError as refusal:
            assert "already used for another release" in str(refusal)  # noqa: PT017
            assert batch is not x
            return
    raise AssertionError("two gradients have the same noise, and one entry on the ledger")


class CountsTwice(Counts):
    """Releases the number twice, and states one noise multiplier."""

    sensitivities = MappingProxyType({"first": 1.0, "second": 1.0})


def check_every_statistic_is_charged() -> None:
    plan = private_plan(n=100, batch_size=10, joint_noise_multipliers=Counts.noise_multipliers)
    x, y = samples(9)
    model = torch.nn.Linear(x.shape[1], 3).to(x.dtype)
    oracle = sized_oracle(model, cross_entropy, plan, statistics=CountsTwice())
    try:
        oracle.backward(x, y)
    except PlanViolationError as refusal:
        assert "2 sums and the plan charges 1" in str(refusal)  # noqa: PT017
        assert len(oracle.ledger) == 0
        return
    raise AssertionError("two sums were released, and one was charged")


def check_small_deltas_are_not_under_counted() -> None:
    """Rounding in a PLD does not hide loss: T steps at q = 1 are one Gaussian release, exactly."""
    for sigma, steps, delta in ((10.0, 1000, 1e-13), (100.0, 100_000, 1e-12), (1.0, 1, 1e-14)):
        accounting._on_grid.cache_clear()
        stated = accounting.epsilon(sigma, 1.0, steps, delta)
        accounting._on_grid.cache_clear()  # a mistake is not left to other tests
        assert _delta_of_one_release(stated, math.sqrt(steps) / sigma) <= delta
    assert stated < 7.9, "a single step is still counted by its loss distribution"


def check_the_type_of_a_number_changes_no_epsilon() -> None:
    """NumPy's small integers wrap around: 15 squared is -31 in int8, and epsilon was 0 by RDP."""
    for accountant in ("rdp", "pld"):
        for sigma in (np.int8(15), np.float16(15), np.uint8(15)):
            for cached in (accounting._on_grid, accounting._step_rdp):
                cached.cache_clear()  # keys of equal numbers are equal: a mistake would stay there
            try:
                charges = [accounting.Charge(sigma, 0.0137, np.int8(100))] * 2
                stated = accounting.total_epsilon(charges, 1e-5, accountant=accountant)
                plain = 0.03 if accountant == "rdp" else 0.02
            finally:
                for cached in (accounting._on_grid, accounting._step_rdp):
                    cached.cache_clear()
            assert stated > plain, (accountant, sigma)


def check_the_noise_has_the_scale_that_is_charged() -> None:
    """In half precision 1 times 8e-8 is 6e-8."""
    plan = private_plan(noise_multiplier=np.float16(1), clip_norm=8e-8)
    assert float(plan.noise_multiplier_at(0) * 8e-8) == 8e-8
    step = StepClipping(HalfPrecision(), phi=np.float16(1))
    assert float(0.7 * step.sensitivity) >= 0.7 * float(HalfPrecision.sensitivity)


class HalfPrecision(Clipping):
    sensitivity = np.float16(1.0010)

    def scales(self, norms: Tensor) -> Tensor:
        return bound_factors(norms, float(self.sensitivity))


def check_no_negative_steps_are_counted() -> None:
    plan = private_plan(steps=100)
    for wrong in ({"replays": -50}, {"steps": -1}):
        try:
            stated = plan.epsilon(**wrong)
        except ArgumentError:
            continue
        raise AssertionError(f"{wrong} has epsilon {stated}")


def _delta_of_one_release(epsilon: float, mu: float) -> float:
    """Return delta of a Gaussian release with sensitivity mu at sigma 1 (Balle and Wang 2018)."""
    import mpmath

    with mpmath.workdps(60):
        above, below = mu / 2 - mpmath.mpf(epsilon) / mu, -mu / 2 - mpmath.mpf(epsilon) / mu
        return float(mpmath.ncdf(above) - mpmath.exp(epsilon) * mpmath.ncdf(below))


# --- the mistakes


def one_over_the_number_of_batches(original):
    return property(lambda self: 1 / math.ceil(self.n / self.batch_size))


def another_rate(original):
    def sampler(self, **options):
        right = original(self, **options)
        right.sampling_rate *= 1.2
        return right

    return sampler


def shuffled(original):
    def indices(self, step):
        size = round(self.n * self.sampling_rate)
        batches = self.n // size
        order = np.random.default_rng(step // batches).permutation(self.n)
        return np.sort(order[step % batches * size :][:size])

    return indices


def drawn_with_replacement(original):
    def indices(self, step):
        generator = self.randomness.generator("sampling", step)
        return generator.integers(self.n, size=generator.binomial(self.n, self.sampling_rate))

    return indices


def truncated(original):
    return lambda self, step: original(self, step)[: round(self.n * self.sampling_rate)]


def empty_ones_left_out(original):
    return lambda self: (sample for sample in original(self) if len(sample[1]))


def every_record(original):
    def records(self, units, randomness, step):
        owned = [self._order[self._starts[u] : self._starts[u + 1]] for u in units]
        return np.concatenate([[], *owned]).astype(int), np.repeat(units, list(map(len, owned)))

    return records


def sampled_by_record(original):
    """Records drawn at q, each bringing its patient along."""

    def records(self, units, randomness, step):
        generator = randomness.generator("records", step)
        chosen = np.flatnonzero(generator.random(len(self._order)) < 0.2)
        owner = np.searchsorted(self._starts, chosen, side="right") - 1
        return self._order[chosen], owner

    return records


def the_low_end(original):
    def too_low(*args, **options):
        sigma, slope = original(*args, **options)
        return 0.999 * sigma, slope

    return too_low


def one_step_whatever_the_count(original):
    def on_grid(charges, delta, accountant, grid):
        return original(tuple(c._replace(steps=1) for c in charges), delta, accountant, grid)

    return on_grid


def at_the_rate_squared(original):
    def on_grid(charges, delta, accountant, grid):
        squared = tuple(c._replace(sampling_rate=c.sampling_rate**2) for c in charges)
        return original(squared, delta, accountant, grid)

    return on_grid


def grad_first(original):
    def clipped_sums(step):
        queries = original(step)
        for name, p in step.theta.items():
            p.grad = queries["gradient"].sums[name].to(p.dtype)
        return queries

    return clipped_sums


def not_written(original):
    return lambda path, entry: None


def every_replay_is_free(original):
    def charge(self, stream, step, **fields):
        if ("any", step) not in self._releases:
            original(self, "any", step, **fields)

    return charge


def a_digest_that_says_nothing(original):
    return lambda released: "released"


def by_name_alone(original):
    return lambda noised, step: digest({n: s for q in noised.values() for n, s in q.items()})


def nothing_lost(original):
    return lambda spent, delta: delta


def as_given(original):
    def checked(charge):
        original(charge)
        return charge

    return checked


MISTAKES = {
    "an accountant in the type of its arguments": Mistake(
        check_the_type_of_a_number_changes_no_epsilon, accounting, "checked", as_given
    ),
    "a plan in half precision": Mistake(
        check_the_noise_has_the_scale_that_is_charged,
        PrivacyPlan,
        "_make_plain",
        lambda _: lambda self: None,
    ),
    "steps that give privacy back": Mistake(
        check_no_negative_steps_are_counted,
        PrivacyPlan,
        "charges",
        lambda _: (
            lambda self, steps, replays: [*self._before(), *self._step_charges(steps, replays)]
        ),
    ),
    "statistics that are not charged": Mistake(
        check_every_statistic_is_charged,
        joint_release,
        "check_counted",
        lambda _: lambda *args: None,
    ),
    "a delta as small as the rounding": Mistake(
        check_small_deltas_are_not_under_counted, accounting, "_without_lost", nothing_lost
    ),
    "q = 1 / len(loader)": Mistake(
        check_sampling_is_as_accounted,
        PrivacyPlan,
        "sampling_rate",
        one_over_the_number_of_batches,
    ),
    "a sampler with another rate": Mistake(
        check_sampling_is_as_accounted, PrivacyPlan, "sampler", another_rate
    ),
    "a shuffled sampler": Mistake(
        check_sampling_is_as_accounted, PoissonSampler, "indices", shuffled
    ),
    "a sampler with replacement": Mistake(
        check_sampling_is_as_accounted, PoissonSampler, "indices", drawn_with_replacement
    ),
    "batches cut to the expected size": Mistake(
        check_sampling_is_as_accounted, PoissonSampler, "indices", truncated
    ),
    "empty batches left out": Mistake(
        check_empty_batches_are_steps, PoissonBatches, "_samples", empty_ones_left_out
    ),
    "no cap on a group's records": Mistake(
        check_groups_are_sampled_as_groups, UnitIndex, "records", every_record
    ),
    "groups sampled by record": Mistake(
        check_groups_are_sampled_as_groups, UnitIndex, "records", sampled_by_record
    ),
    "calibration that overshoots": Mistake(
        check_calibration, calibration, "_least_sigma", the_low_end
    ),
    "an accountant that forgets steps": Mistake(
        check_accountant_composes_every_step, accounting, "_on_grid", one_step_whatever_the_count
    ),
    "an accountant with the rate squared": Mistake(
        check_accountant_composes_every_step, accounting, "_on_grid", at_the_rate_squared
    ),
    ".grad before the ledger": Mistake(
        check_ledger_comes_first, mechanism, "clipped_sums", grad_first
    ),
    "a ledger that is not on disk": Mistake(
        check_ledger_comes_first, _jsonl, "append_durably", not_written
    ),
    "an unseeded replay that is not charged": Mistake(
        check_replays, Ledger, "charge", every_replay_is_free
    ),
    "a digest of statistics in place of the gradient": Mistake(
        check_a_replay_has_the_same_gradient, mechanism, "identify", by_name_alone
    ),
    "another release taken for a replay": Mistake(
        check_replays, mechanism, "digest", a_digest_that_says_nothing
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
