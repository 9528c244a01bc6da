"""Noise: once per logical batch, sigma C on every coordinate, never the same twice.

The batches here have gradients of exactly zero, so that the released gradient times l is the noise.
"""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from checks import check_gaussian, check_uncorrelated
from dpbam import DPSGD, Compute, FlatClipping, PrivateGradientOracle, joint_release, mechanism
from dpbam.bias import PrivateStatistics
from dpbam.errors import PlanViolationError
from dpbam.joint_release import Contributions, StepStatistics
from dpbam.observers import UnitFacts
from dpbam.privacy import noise as noise_module
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness
from dpbam.scratch import SumMemory
from planting import Mistake, catches
from support import (
    clipped_sum,
    cross_entropy,
    flat,
    private_plan,
    samples,
    sized_oracle,
    smooth_net,
)

SIGMA, C, L, ROWS = 2.0, 0.5, 10, 5


def silent_oracle(seed: int | None = 7) -> PrivateGradientOracle:
    """Without biases, on inputs of zero, no gradient: layers of 60 x 60 twice, and 2 x 60."""
    model = nn.Sequential(
        nn.Linear(60, 60, bias=False), nn.Linear(60, 60, bias=False), nn.Linear(60, 2, bias=False)
    )
    plan = private_plan(noise_multiplier=SIGMA, clip_norm=C, batch_size=L)
    return PrivateGradientOracle(
        model,
        cross_entropy,
        plan,
        DPSGD(),
        sampling="poisson-elsewhere",
        compute=Compute(engine="functional", physical_batch_size=2),
        seed=seed,
    )


def noise_of(oracle: PrivateGradientOracle, steps: int = 1) -> list[list[np.ndarray]]:
    """The noise of each step, by parameter."""
    found = []
    for _ in range(steps):
        oracle.backward(torch.zeros(ROWS, 60), torch.zeros(ROWS, dtype=torch.long))
        found.append([p.grad.flatten().numpy() * L for p in oracle.model.parameters()])
    return found


def check_scale() -> None:
    """N(0, (sigma C)^2) on each parameter, whatever the number of rows and micro-batches."""
    for part in noise_of(silent_oracle())[0]:
        check_gaussian(part, SIGMA * C)


def check_independence() -> None:
    """Across parameters of one step, and across steps."""
    first, second = noise_of(silent_oracle(), steps=2)
    check_uncorrelated(first[0], first[1])
    for a, b in zip(first, second, strict=True):
        check_uncorrelated(a, b)


def check_resume_draws_anew() -> None:
    """Two unseeded processes at the same step, as after a crash."""
    one, two = (noise_of(silent_oracle(seed=None))[0][0] for _ in range(2))
    assert (one == two).mean() < 0.01


def check_own_generator() -> None:
    """Torch's seed does not reveal the noise, and noise leaves the model's draws alone."""
    found, states = [], []
    for _ in range(2):
        oracle = silent_oracle(seed=None)
        torch.manual_seed(3)
        found.append(noise_of(oracle)[0][0])
        states.append(torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(states[0], torch.get_rng_state())
    assert (found[0] == found[1]).mean() < 0.01


def check_empty_batch_is_noise() -> None:
    """A noise-only step, at full scale, and counted."""
    oracle = silent_oracle()
    oracle.backward(torch.zeros(0, 60), torch.zeros(0, dtype=torch.long))
    assert (oracle.step, len(oracle.ledger)) == (1, 1)
    for p in oracle.model.parameters():
        assert p.grad is not None
        check_gaussian(p.grad.flatten().numpy() * L, SIGMA * C)


def check_no_sum_without_noise_outlives_its_step(clipping: str = "quantile") -> None:
    """A pickled oracle, as a checkpoint of a user's own may be, has no sum of the last step."""
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(clipping=clipping), seed=0)
    batch = samples(9)
    raw = clipped_sum(oracle, *batch)
    oracle.backward(*batch)
    noise = flat({n: p.grad for n, p in oracle.model.named_parameters()})
    assert float((oracle.plan.batch_size * noise - raw[: len(noise)]).abs().max()) > 0.1
    saved = pickle.dumps(oracle)
    for name, p in oracle.model.named_parameters():
        assert p.detach().numpy().tobytes() in saved  # the search finds what is there
        values, raw = raw[: p.numel()], raw[p.numel() :]
        assert values.numpy().tobytes() not in saved, f"the clipped sum of {name} is in the file"
    for kind in ("standard", "secure"):
        check_all_sums_are_written_over(clipping, kind)


def check_all_sums_are_written_over(clipping: str, kind: str) -> None:
    """The gradient's, extra coordinates and statistics: by their noise, or by zeros."""
    statistics = PrivateStatistics([0.1, 0.4], noise_multiplier=20.0)
    plan = private_plan(
        clipping=clipping, joint_noise_multipliers=statistics.noise_multipliers, accountant="rdp"
    )
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, statistics=statistics, noise=kind)
    sums, raw, names, clipped_sums = [], [], [], mechanism.clipped_sums

    def noticed(step):
        queries = clipped_sums(step)
        names.extend(queries)
        sums.extend(s for query in queries.values() for s in query.sums.values())
        raw.extend(s.clone() for s in sums)
        assert all(bool(s.any()) for s in sums)
        return queries

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "clipped_sums", noticed)
        oracle.backward(*samples(9))
    assert len(names) == (2 if clipping == "flat" else 3)
    left = [
        bool(((now == before) & (before != 0)).any()) for now, before in zip(sums, raw, strict=True)
    ]
    assert not any(left), "a sum without noise is left"


def test_no_sum_without_noise_outlives_its_step() -> None:
    check_no_sum_without_noise_outlives_its_step("flat")


def check_the_memory_of_sums_has_none(noise: str = "secure") -> None:
    """What the next step sums into has been released, or is zero; a copy of the oracle has none."""
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), noise=noise)
    oracle.backward(*samples(9))
    memory = oracle._memory
    assert sorted(memory._sums) == sorted(n for n, _ in oracle.model.named_parameters())
    for name, p in oracle.model.named_parameters():
        entry = memory._sums[name]
        assert bool((entry == 0).all()) or torch.equal(entry.to(p), p.grad), name
    assert copy.deepcopy(memory)._sums is None


@pytest.mark.parametrize("noise", ["standard", "secure"])
def test_the_memory_of_sums_has_none(noise: str) -> None:
    check_the_memory_of_sums_has_none(noise)


def check_no_statistic_without_noise_outlives_its_step() -> None:
    """A copy of the oracle, between two steps, has neither the counts nor the batch."""
    statistics = PrivateStatistics([0.1, 0.2, 0.4, 0.8], noise_multiplier=20.0)
    plan = private_plan(joint_noise_multipliers=statistics.noise_multipliers)
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, statistics=statistics, seed=0)
    batch, counts = samples(9), []
    queries = StepStatistics.queries

    def noticed(self):
        found = queries(self)
        counts.append(found["counts"].sums["statistics/counts"].clone())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepStatistics, "queries", noticed)
        oracle.backward(*batch)
    saved = pickle.dumps(oracle)
    assert counts[0].sum() == 9
    assert counts[0].numpy().tobytes() not in saved, "the counts without noise are in the file"
    assert batch[0][0].numpy().tobytes() not in saved, "a record is in the file"


def check_no_statistic_outlives_a_refused_step() -> None:
    """Nor has it those of a step that was refused after its units were seen."""
    statistics = PrivateStatistics([0.1, 0.4], noise_multiplier=20.0, bias_bound=0.01)
    plan = private_plan(joint_noise_multipliers=statistics.noise_multipliers)
    clipping = Unclipped(plan.clip_norm)
    oracle = sized_oracle(
        smooth_net(), cross_entropy, plan, statistics=statistics, clipping=clipping, seed=0
    )
    seen = []
    add = StepStatistics.add

    def noticed(self, batch):
        add(self, batch)
        seen.append(self._sums["counts"]["statistics/counts"].clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepStatistics, "add", noticed)
        with pytest.raises(PlanViolationError):
            oracle.backward(*samples(9))
    assert len(oracle.ledger) == 0
    assert seen[-1].sum() == 9
    assert seen[-1].numpy().tobytes() not in pickle.dumps(oracle), "the refused step is in the file"


class Unclipped(FlatClipping):
    """Exceeds its sensitivity, so that the step is refused once its units are seen."""

    def scales(self, norms):
        return torch.full_like(norms, 100.0)


def test_no_statistic_without_noise_outlives_its_step() -> None:
    check_no_statistic_without_noise_outlives_its_step()
    check_no_statistic_outlives_a_refused_step()


class Count:
    """Releases the number of units, in units of ``bound``, which it states as its sensitivity."""

    noise_multipliers = (5.0,)

    def __init__(self, bound: float) -> None:
        self.sensitivities, self.published = {"count": bound}, []

    def begin(self, facts):
        pass

    def contributions(self, batch):
        bound = self.sensitivities["count"]
        each = bound if 0 <= bound < math.inf else 1.0
        return {"count": Contributions(values=torch.full((1, len(batch.ids)), each).double())}

    def publish(self, released):
        self.published.append(float(released["count"]["statistics/count"]))


class TwoAUnit(Count):
    """Adds 2 for each unit."""

    def contributions(self, batch):
        return {"count": Contributions(values=torch.full((1, len(batch.ids)), 2.0))}


class OneUnitManyCoordinates(Count):
    """Adds one number to several coordinates, if there are units."""

    def contributions(self, batch):
        return {
            "count": Contributions(values=torch.ones(1 if len(batch.ids) else 4, len(batch.ids)))
        }


class ShareOfTheLargest(Count):
    """Adds a unit's norm over the largest of the batch."""

    def contributions(self, batch):
        norms = batch.norms.norm(dim=0, keepdim=True)
        return {"count": Contributions(values=norms / norms.max() if len(batch.ids) else norms)}


class WholeDirections(Count):
    """Adds directions as they are, to a sum with a small bound."""

    def contributions(self, batch):
        return {"count": Contributions(factors=torch.ones_like(batch.norms))}


class TwoColumnsPerUnit(Count):
    """Adds two columns for each unit, each within the bound."""

    def contributions(self, batch):
        return {"count": Contributions(values=torch.ones(1, 2 * len(batch.ids)))}


class AMatrixPerUnit(Count):
    """Adds 100 columns for each unit, along a third axis: 10 times the bound."""

    def contributions(self, batch):
        return {"count": Contributions(values=torch.ones(1, len(batch.ids), 100))}


class OverwrittenNorms(Count):
    """Cuts the norms that its factors are checked against, in place."""

    def contributions(self, batch):
        norms = batch.norms.clamp_(max=self.sensitivities["count"])
        return {"count": Contributions(factors=torch.ones_like(norms))}

    def publish(self, released):
        self.published.append(float(flat(released["count"]).norm()))


class Remembers(Count):
    """Keeps the largest norm in an attribute."""

    largest = 0.0

    def contributions(self, batch):
        if len(batch.ids):
            self.largest = float(batch.norms.max())
        return super().contributions(batch)


STATISTICS = {
    "a sum": TwoAUnit, "coordinates": OneUnitManyCoordinates, "others": ShareOfTheLargest,
    "directions": WholeDirections, "an attribute": Remembers, "columns": TwoColumnsPerUnit,
    "a third axis": AMatrixPerUnit, "norms of its own": OverwrittenNorms,
}  # fmt: skip


def check_a_statistic_keeps_its_bound(kind: str = "a sum", rows: int = 64) -> None:
    """What a unit adds beyond it, or takes from other units, is refused before a charge."""
    small = kind in ("directions", "norms of its own")
    statistics = STATISTICS[kind](1e-3 if small else 1.0)
    plan = private_plan(joint_noise_multipliers=statistics.noise_multipliers)
    oracle = sized_oracle(
        smooth_net(), cross_entropy, plan, statistics=statistics, seed=0, physical_batch_size=rows
    )
    try:
        oracle.backward(*samples(9))
    except PlanViolationError:
        assert (len(oracle.ledger), oracle.step, statistics.published) == (0, 0, [])
        return
    raise AssertionError(f"a statistic was released that exceeds its bound by {kind}")


@pytest.mark.parametrize("kind", STATISTICS)
def test_a_statistic_keeps_its_bound(kind: str) -> None:
    check_a_statistic_keeps_its_bound(kind)


def check_a_statistic_of_one_unit_has_one_column() -> None:
    """Also where units come one at a time, so that none can be left out for a comparison."""
    check_a_statistic_keeps_its_bound("columns", rows=1)


def check_a_statistic_does_not_change_the_norms() -> None:
    check_a_statistic_keeps_its_bound("norms of its own")


def test_a_statistic_of_one_unit_has_one_column() -> None:
    check_a_statistic_of_one_unit_has_one_column()


def check_a_sum_without_noise_is_refused(std: float = 0.0) -> None:
    """Before it is charged, and before the gradient of its step is written."""
    statistics = Count(std / Count.noise_multipliers[0])
    plan = private_plan(joint_noise_multipliers=statistics.noise_multipliers)
    oracle = sized_oracle(smooth_net(), cross_entropy, plan, statistics=statistics, seed=0)
    try:
        oracle.backward(*samples(9))
    except PlanViolationError as refusal:
        assert "has standard deviation" in str(refusal) or "lets a unit add" in str(refusal)  # noqa: PT017
        assert (len(oracle.ledger), oracle.step, statistics.published) == (0, 0, [])
        assert all(p.grad is None for p in oracle.model.parameters())
        return
    raise AssertionError(f"of 9 units, {statistics.published} was released as their number")


@pytest.mark.parametrize("std", [0.0, -5.0, math.inf, math.nan])
def test_a_sum_without_noise_is_refused(std: float) -> None:
    check_a_sum_without_noise_is_refused(std)


def test_a_sum_with_noise_is_released() -> None:
    with pytest.raises(AssertionError, match="was released"):
        check_a_sum_without_noise_is_refused(5.0)


# --- the mistakes


def scaled(factor: float):
    def wrong(original):
        return lambda self, sums, std, step, **more: original(
            self, sums, factor * std, step, **more
        )

    return wrong


def once_per_micro_batch(original):
    def clipped_sums(step):
        queries = original(step)
        total = queries["gradient"].sums
        for k, _ in enumerate(step.computation.physical(step.batch)):
            total = step.terms.noise.add(total, SIGMA * C, 1000 + k)
        return {**queries, "gradient": replace(queries["gradient"], sums=total)}

    return clipped_sums


def scaled_by_the_realised_batch(original):
    def backward(self, inputs, targets, units=None):
        self.plan = replace(self.plan, noise_multiplier=SIGMA * len(inputs) / L)
        return original(self, inputs, targets, units)

    return backward


def missing_on_the_last(original):
    def add(self, sums, std, step, **more):
        *_, last = sums
        raw = sums[last].clone()  # noise may be written over it
        return {**original(self, sums, std, step, **more), last: raw}

    return add


def the_same_in_every_leaf(original):
    def add(self, sums, std, step, **more):
        return {n: original(self, {n: s}, std, step, **more)[n] for n, s in sums.items()}

    return add


def the_same_at_every_step(original):
    return lambda self, name, step, block=0: original(self, name, 0, block)


def a_constant_key(original):
    return lambda self, name, step, block=0: original(Randomness(0), name, step, block)


def torchs_generator(original):
    def wrong(randomness, std, stream, step, start, sums, noised):
        return np.add(sums, std * torch.randn(len(noised)).double().numpy(), out=noised)

    return wrong


def skips_an_empty_batch(original):
    def backward(self, inputs, targets, units=None):
        if len(inputs):
            original(self, inputs, targets, units)

    return backward


def kept_by_the_noise(original):
    def add(self, sums, std, step, **more):
        self.seen = [*vars(self).get("seen", []), {n: s.clone() for n, s in sums.items()}]
        return original(self, sums, std, step, **more)

    return add


def the_gradient_alone(original):
    def clear(self, queries, noised, noise):
        original(self, {"gradient": queries["gradient"]}, noised, noise)

    return clear


def left_in_the_object(original):
    def add(self, batch):
        original(self, batch)
        self._statistics.sums = copy.deepcopy(self._sums)

    return add


Oracle = PrivateGradientOracle
MISTAKES = {
    "a statistic without noise": Mistake(
        check_a_sum_without_noise_is_refused,
        mechanism,
        "check_noise",
        lambda original: lambda queries, terms: None,
    ),
    "a statistic left by a refused step": Mistake(
        check_no_statistic_outlives_a_refused_step, StepStatistics, "add", left_in_the_object
    ),
    "a statistic of any size": Mistake(
        check_a_statistic_keeps_its_bound, StepStatistics, "_verify", lambda _: lambda self: None
    ),
    "a statistic of any shape": Mistake(
        check_a_statistic_of_one_unit_has_one_column,
        joint_release,
        "_check_shape",
        lambda _: lambda name, added, batch: None,
    ),
    "norms that a statistic has overwritten": Mistake(
        check_a_statistic_does_not_change_the_norms,
        UnitFacts,
        "copy",
        lambda _: lambda self: self,
    ),
    "two thirds of it": Mistake(check_scale, GaussianNoise, "add", scaled(2 / 3)),
    "three halves of it": Mistake(check_scale, GaussianNoise, "add", scaled(3 / 2)),
    "none": Mistake(check_scale, GaussianNoise, "add", scaled(0)),
    "per micro-batch": Mistake(check_scale, mechanism, "clipped_sums", once_per_micro_batch),
    "by the realised batch": Mistake(check_scale, Oracle, "backward", scaled_by_the_realised_batch),
    "not on one parameter": Mistake(check_scale, GaussianNoise, "add", missing_on_the_last),
    "the same in two leaves": Mistake(
        check_independence, GaussianNoise, "add", the_same_in_every_leaf
    ),
    "the same at two steps": Mistake(
        check_independence, Randomness, "noise_generator", the_same_at_every_step
    ),
    "the same after a resume": Mistake(
        check_resume_draws_anew, Randomness, "noise_generator", a_constant_key
    ),
    "from torch's generator": Mistake(
        check_own_generator, noise_module, "_normal", torchs_generator
    ),
    "a sum left to the next step": Mistake(
        check_no_sum_without_noise_outlives_its_step, GaussianNoise, "add", kept_by_the_noise
    ),
    "a sum that is not written over": Mistake(
        check_the_memory_of_sums_has_none,
        SumMemory,
        "clear",
        lambda original: lambda self, queries, noised, noise: None,
    ),
    "sums other than the gradient's left to the next step": Mistake(
        check_no_sum_without_noise_outlives_its_step, SumMemory, "clear", the_gradient_alone
    ),
    "a statistic left to the next step": Mistake(
        check_no_statistic_without_noise_outlives_its_step,
        StepStatistics,
        "add",
        left_in_the_object,
    ),
    "an empty batch skipped": Mistake(
        check_empty_batch_is_noise, Oracle, "backward", skips_an_empty_batch
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
