"""What the oracle is handed: refused before a charge where the plan does not account for it.

Own loop here; the trainers are in ``tests/training/test_trainer.py`` and ``tests/interop``, two
ranks in ``tests/distributed/test_oracle.py``. Each claim fails with the check of it planted wrong.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dpbam import (
    Clipping,
    Compute,
    FlatClipping,
    PerLayerClipping,
    PrivacyPlan,
    PrivateGradientOracle,
    assembly,
    batches,
    guard,
)
from dpbam.batches import LogicalBatch
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.guard import UsedBatches
from dpbam.privacy import clipping as clipping_module
from dpbam.privacy.clipping import StepClipping
from dpbam.privacy.sampling import BatchSizes
from planting import Mistake, catches
from support import cross_entropy, private_plan, samples, smooth_net

N, L = 400, 40


def oracle_of(
    clipping: Clipping | None = None,
    *,
    sampling: str = "poisson-elsewhere",
    engine: str = "auto",
    rows: int = 64,
    **fields: Any,
) -> PrivateGradientOracle:
    plan = private_plan(**{"n": N, "batch_size": L, "steps": 60, **fields})
    return PrivateGradientOracle(
        smooth_net(), cross_entropy, plan, clipping=clipping, sampling=sampling, seed=0,
        compute=Compute(engine=engine, physical_batch_size=rows),
    )  # fmt: skip


def steps_until_refused(oracle: PrivateGradientOracle, batches: Iterable[Any], words: str) -> int:
    """Steps taken before a refusal, which says ``words`` and leaves no trace; fails without."""
    refusal, before = "nothing was refused", None
    for batch in batches:
        before = (oracle.step, len(oracle.ledger), oracle.model[0].weight.grad)
        try:
            oracle.backward(*batch)
        except PlanViolationError as error:
            refusal = str(error)
            break
    assert words in refusal
    assert before == (oracle.step, len(oracle.ledger), oracle.model[0].weight.grad)
    return oracle.step


def shuffled(epochs: int = 6, **options: Any) -> Iterable[Any]:
    loader = DataLoader(TensorDataset(*samples(N)), L, shuffle=True, drop_last=True, **options)
    return (batch for _ in range(epochs) for batch in loader)


# --- the claims


def check_a_shuffled_loader_is_refused() -> None:
    """At its 12th step: P[X = 40]^10 of Binomial(401, 0.1) is above 1e-12, ^11 below."""
    assert steps_until_refused(oracle_of(), shuffled(), "12 batches in a row have 40") == 11


def check_a_shuffled_loader_is_refused_at_once() -> None:
    """An oracle that has drawn nothing takes no batch; once it draws, it does."""
    oracle = oracle_of(sampling="poisson")
    words = "this oracle has drawn no batch"
    assert steps_until_refused(oracle, shuffled(), words) == 0
    oracle.backward(*next(oracle.batches(samples(N))))
    assert oracle.step == 1


def check_an_impossible_batch_is_refused() -> None:
    """Ten times the expected size, as a batch of everything is."""
    assert steps_until_refused(oracle_of(), [samples(N)], "the batch has 400 units") == 0


def check_records_of_one_owner_count_as_one() -> None:
    """Sizes are in units: 80 rows of one patient are one unit, where 80 patients are expected."""
    x, y = samples(80)
    oracle = oracle_of(unit="patient", max_records=80, n=800, batch_size=80)
    one_patient = [(x, y, torch.zeros(80, dtype=torch.long))]
    assert steps_until_refused(oracle, one_patient, "the batch has 1 units") == 0


def check_a_full_batch_is_full() -> None:
    """q = 1."""
    oracle = oracle_of(n=L)
    oracle.backward(*samples(L - 1))
    oracle.backward(*samples(L + 1))
    assert steps_until_refused(oracle, [samples(L - 2)], "whole data set, n = 40") == 2


def check_no_step_beyond_the_plan() -> None:
    """Also after a resume at the plan's end."""
    words = "all 3 steps of the plan are taken"
    oracle = oracle_of(steps=3)
    data = samples(N)
    batches = [*oracle.batches(data), next(oracle_of().batches(data))]
    assert steps_until_refused(oracle, batches, words) == 3
    resumed = oracle_of(steps=3)
    resumed.ledger.merge(oracle.ledger.entries())
    resumed.load_state_dict(oracle.state_dict())
    assert list(resumed.batches(data)) == []
    assert steps_until_refused(resumed, batches, words) == 3


def check_a_batch_is_part_of_one_step() -> None:
    """Of one oracle, and of those that share its ledger; one that was changed in place is new."""
    words = "was part of a step before"
    oracle, other = oracle_of(), oracle_of()
    other.ledger = oracle.ledger
    other.stream = "another"
    first, second = (next(oracle.batches(samples(N))) for _ in range(2))
    assert steps_until_refused(oracle, [first, first], words) == 1
    assert steps_until_refused(other, [second, first], words) == 1
    copied = (first[0].clone(), first[1], first[2])
    assert steps_until_refused(other, [copied], words) == 1  # by its units
    assert steps_until_refused(other, [(first[0], first[1].clone())], words) == 1  # by its inputs
    first[0].mul_(2)
    other.backward(*first[:2])


def check_ledgers_on_one_file_share_their_batches() -> None:
    """Two objects of one file count as one ledger, and so do the batches that they were given."""
    with tempfile.TemporaryDirectory() as folder:
        oracle, other = oracle_of(), oracle_of()
        for each in (oracle, other):
            each.ledger = each.plan.ledger(Path(folder) / "ledger.jsonl")
            each.expect_earlier_steps()
        other.stream = "another"
        batch = next(oracle.batches(samples(N)))
        oracle.backward(*batch)
        assert steps_until_refused(other, [batch], "was part of a step before") == 0


def check_a_state_comes_with_its_ledger() -> None:
    """A resumed training whose ledger is empty would report what the last steps cost."""
    oracle = oracle_of(steps=3)
    for batch in oracle.batches(samples(N)):
        oracle.backward(*batch)
    resumed, refusal = oracle_of(steps=3), "nothing was refused"
    try:
        resumed.load_state_dict(oracle.state_dict())
    except PlanViolationError as error:
        refusal = str(error)
    assert "at step 3, but its ledger has 0 steps" in refusal
    resumed.ledger.merge(oracle.ledger.entries())
    resumed.load_state_dict(oracle.state_dict())
    assert resumed.step == 3


class Lenient(FlatClipping):
    """A clipping of a user's own that forgets to clip."""

    def scales(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


class EachWhole(PerLayerClipping):
    """Every layer to C by itself: together sqrt(2) C."""

    def scales(self, norms: Tensor) -> Tensor:
        return clipping_module.bound_factors(norms, self.clip_norm)


class Trusting(FlatClipping):
    """Leaves a unit with NaN in it as it is."""

    def factors(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


class Raising(FlatClipping):
    """Raises every unit to norm C; one that has vanished in float32, by any factor."""

    def scales(self, norms: Tensor) -> Tensor:
        return self.clip_norm / norms.clamp(min=1e-30)


def check_a_clipping_keeps_its_sensitivity() -> None:
    """A factor of 1 for all units, and layers that are each clipped to the whole C.

    A norm that is computed as 0 in float32 may be as large as 1e-18.
    """
    for make in (Lenient, EachWhole):
        oracle = oracle_of(make(0.01), clip_norm=0.01)
        words = f"{make.__name__} lets a unit through with norm"
        assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0
    step, refusal = StepClipping(Raising(0.01)), "nothing was refused"
    step.clip(torch.zeros(1, 1))
    try:
        step.verify()
    except PlanViolationError as error:
        refusal = str(error)
    assert "Raising lets a unit through with norm 1e+10" in refusal


class LenientAtFirst(FlatClipping):
    """Clips nothing of the first physical batch."""

    seen: ClassVar[int] = 0

    def scales(self, norms: Tensor) -> Tensor:
        LenientAtFirst.seen += 1
        if LenientAtFirst.seen == 1:
            return torch.ones_like(norms)
        return super().scales(norms)


def check_every_physical_batch() -> None:
    LenientAtFirst.seen = 0
    oracle = oracle_of(LenientAtFirst(0.01), clip_norm=0.01, rows=2)
    words = "LenientAtFirst lets a unit through with norm"
    assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0
    assert LenientAtFirst.seen > 1


class Following(FlatClipping):
    """C is the median of the norms that it is given: noise follows it, and so reveals it."""

    found: ClassVar[float] = 0.01

    @property
    def sensitivity(self) -> float:
        return Following.found

    def scales(self, norms: Tensor) -> Tensor:
        Following.found = float(norms.median())
        return clipping_module.bound_factors(norms, Following.found)


class Overwriting(FlatClipping):
    """Its own factors, computed in the memory of the norms that they are checked against."""

    def factors(self, norms: Tensor) -> Tensor:
        norms.clamp_(max=self.clip_norm)
        return torch.ones_like(norms)


def check_a_clipping_does_not_change_the_norms() -> None:
    oracle = oracle_of(Overwriting(0.01), clip_norm=0.01)
    words = "Overwriting lets a unit through with norm"
    assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0


class Reusing(FlatClipping):
    """Its own factors, in memory that the next call uses again."""

    memory: ClassVar[Tensor] = torch.zeros(1, 2)

    def factors(self, norms: Tensor) -> Tensor:
        factors = Reusing.memory[:, : norms.shape[1]]
        return factors.copy_(clipping_module.bound_factors(norms, self.clip_norm))


def check_factors_are_those_that_were_measured() -> None:
    """Of two units with norms 100 C and C; of others' factors, the first would add 100 C."""
    step, norms = StepClipping(Reusing(1.0)), torch.tensor([[100.0, 1.0]])
    factors, _ = step.clip(norms)
    step.verify(step.measured().tolist())
    assert (factors * norms).tolist() == [[1.0, 1.0]]


def test_factors_are_those_that_were_measured() -> None:
    check_factors_are_those_that_were_measured()


class ByTheLargest(FlatClipping):
    """Divides all units by the largest norm of them: each is within C, and follows the others."""

    def scales(self, norms: Tensor) -> Tensor:
        return self.clip_norm / norms.max().clamp(min=1e-9).expand_as(norms)


class Remembering(Clipping):
    """Clips to the mean norm of the step before, which it has kept without noise."""

    def __init__(self, clip_norm: float) -> None:
        self.present = self.next = clip_norm

    @property
    def sensitivity(self) -> float:
        return self.present

    def at(self, step: int, phi: float = 1.0) -> StepClipping:
        self.present = self.next
        return super().at(step, phi)

    def scales(self, norms: Tensor) -> Tensor:
        self.next = float(norms.mean())
        return clipping_module.bound_factors(norms, self.present)


def writable(original: Any) -> Any:
    stated: dict[int, float] = {}

    def write(step: StepClipping, value: float) -> None:
        stated[id(step)] = value

    return property(lambda step: stated.get(id(step), original.fget(step)), write)


def check_a_factor_depends_on_its_own_unit() -> None:
    for make, words in (
        (ByTheLargest, "other factors for a unit when other units were left out"),
        (Remembering, "Remembering keeps something of this step's units in an attribute"),
    ):
        oracle = oracle_of(make(0.01), clip_norm=0.01)
        assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0


def mixing(scale: float, sign: float) -> Any:
    """Mixup with the row before, or the difference from it, of rows of any size."""

    def augment(x: Tensor, keys: Tensor) -> Tensor:
        return scale * (x + sign * x.roll(1, 0)) / 2

    return augment


def centred(x: Tensor, keys: Tensor) -> Tensor:
    return x - x.mean(0)


def augmenting(augment: Any, multiplicity: int, rows: int | None) -> PrivateGradientOracle:
    return PrivateGradientOracle(
        smooth_net(), cross_entropy, private_plan(n=N, batch_size=L), augment=augment,
        multiplicity=multiplicity, compute=Compute(physical_batch_size=rows),
    )  # fmt: skip


def check_an_augmentation_changes_each_row_by_itself() -> None:
    """With one view and several, on a measured number of rows and a given one, of any size."""
    words = "augment gives a row other values when other rows are left out"
    for multiplicity, rows in itertools.product((1, 2, 3), (None, 64)):
        for mix in (lambda x, keys: centred(x, keys), mixing(1.0, 1.0), mixing(1e-5, -1.0)):
            oracle = augmenting(mix, multiplicity, rows)
            assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0


@pytest.mark.parametrize("multiplicity", [1, 2])
def test_an_augmentation_of_each_row_passes(multiplicity: int) -> None:
    """Also where rounding follows the shape, or whole rows cancel."""

    def augment(x: Tensor, keys: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) @ torch.ones(4, 4).double() + 1e-9 * (keys % 7)[
            :, None
        ]

    oracle = augmenting(augment, multiplicity, None)
    for batch in itertools.islice(oracle.batches(samples(N)), 2):
        oracle.backward(*batch)
    assert oracle.step == 2


def test_an_augmentation_that_was_refused_stays_refused() -> None:
    augment, words = mixing(1.0, 1.0), "was refused in an earlier step"
    oracle = augmenting(augment, 1, 64)
    assert steps_until_refused(oracle, oracle.batches(samples(N)), "other values") == 0
    oracle = augmenting(augment, 2, None)
    assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0


class Unchecked(FlatClipping):
    def at(self, step: int, phi: float = 1.0) -> Any:
        class Trusting(StepClipping):
            def verify(self, measured: Any = None) -> None:
                pass

        return Trusting(self, phi)


def test_a_clipping_of_a_step_that_checks_nothing_is_refused() -> None:
    oracle = oracle_of(Unchecked(0.01), clip_norm=0.01)
    with pytest.raises(ArgumentError, match=r"Unchecked\.at returned a Trusting"):
        oracle.backward(*samples(L))
    assert not len(oracle.ledger)


class Restating(FlatClipping):
    """States a hundredth of its sensitivity for the noise, or replaces a check."""

    attribute, value = "sensitivity", 1e-4

    def at(self, step: int, phi: float = 1.0) -> StepClipping:
        clipping = super().at(step, phi)
        setattr(clipping, self.attribute, self.value)
        return clipping


def check_a_clipping_of_a_step_is_not_overwritten() -> None:
    for attribute, value in (("sensitivity", 1e-4), ("verify", lambda measured: None)):
        oracle = oracle_of(Restating(0.01), clip_norm=0.01)
        Restating.attribute, Restating.value = attribute, value
        refused = False
        try:
            oracle.backward(*samples(L))
        except AttributeError:
            refused = not len(oracle.ledger)
        assert refused, f"the noise or the checks of a step follow an overwritten {attribute}"


def test_a_clipping_of_a_step_is_not_overwritten() -> None:
    check_a_clipping_of_a_step_is_not_overwritten()


class Halving(FlatClipping):
    """A schedule of the user's own."""

    def at(self, step: int, phi: float = 1.0) -> StepClipping:
        return FlatClipping(self.clip_norm / 2**step).at(step, phi)


def test_a_schedule_of_the_users_own_moves_the_noise_with_the_clip() -> None:
    oracle = oracle_of(Halving(0.01), clip_norm=0.01)
    stds = []
    for batch in [samples(L, seed=k) for k in range(3)]:
        oracle.backward(*batch)
        stds.append(oracle.noise_std * L)
    assert stds == pytest.approx([0.01, 0.005, 0.0025])


class Grouped(FlatClipping):
    """Puts weights into group 0, and biases into another one, or into none."""

    def __init__(self, clip_norm: float, biases: int | None) -> None:
        super().__init__(clip_norm)
        object.__setattr__(self, "biases", biases)

    def groups(self, names: Iterable[str]) -> dict[str, int]:
        numbers = {name: self.biases if name.endswith("bias") else 0 for name in names}
        return {name: number for name, number in numbers.items() if number is not None}


def check_the_sensitivity_does_not_follow_the_units() -> None:
    Following.found = 100.0  # so that no unit exceeds it, and only its change gives it away
    oracle = oracle_of(Following(100.0), clip_norm=100.0)
    words = "the sensitivity of Following was 100"
    assert steps_until_refused(oracle, oracle.batches(samples(N)), words) == 0


def check_every_parameter_is_in_a_group() -> None:
    """Refused when the oracle is made, whatever an engine would do with such groups."""
    oracle_of(Grouped(0.01, 1), clip_norm=0.01)
    for biases in (-1, 2, None):
        try:
            oracle_of(Grouped(0.01, biases), clip_norm=0.01)
        except ArgumentError:
            continue
        raise AssertionError(f"biases in group {biases} are in no row of the norms")


def check_bad_units_have_factor_zero() -> None:
    """NaN is not below C."""
    x, y = samples(L)
    x[3] = torch.nan
    oracle = oracle_of(Trusting(1e9), clip_norm=1e9)
    assert steps_until_refused(oracle, [(x, y)], "Trusting returned a factor") == 0


def test_an_optimiser_that_evaluates_a_batch_again_is_refused() -> None:
    oracle = oracle_of()
    optimizer = torch.optim.LBFGS(oracle.model.parameters(), max_iter=4)
    batch = next(oracle.batches(samples(N)))

    def closure() -> float:
        oracle.backward(*batch)
        return 1.0

    with pytest.raises(PlanViolationError, match="LBFGS"):
        optimizer.step(closure)
    assert len(oracle.ledger) == 1


# --- what passes


def test_the_oracles_own_batches_pass_and_end_with_the_plan() -> None:
    oracle = oracle_of(steps=100, n=60, batch_size=6)
    for batch in oracle.batches(samples(60)):
        oracle.backward(*batch)
    assert oracle.step == len(oracle.ledger) == 100


def test_a_second_attempt_at_a_step_is_not_a_second_batch() -> None:
    """Eleven equal batches pass; a step that failed for another reason is not one of them."""
    oracle, (x, y) = oracle_of(), samples(L)
    for _ in range(20):
        with pytest.raises(IndexError):
            oracle.backward(x, y + 7)  # no such class
    for _ in range(11):
        oracle.backward(x.clone(), y)
    assert oracle.step == 11


def test_a_run_of_equal_sizes_starts_again_on_resume() -> None:
    """No batch size is kept in a state that may be handed out."""
    oracle = oracle_of()
    for _ in range(11):
        oracle.backward(*samples(L))
    assert set(oracle.state_dict()) == {"step", "parts"}
    oracle.load_state_dict({"step": 11})
    again = (samples(L) for _ in range(20))
    assert steps_until_refused(oracle, again, "12 batches in a row have 40") == 22


@pytest.mark.parametrize("step", [-1, 2.5, None])
def test_a_state_with_an_impossible_step_is_refused(step: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="the state's step must be"):
        oracle_of().load_state_dict({"step": step})


# --- batches that are not drawn by the plan


def test_unchecked_batches_are_charged_without_amplification() -> None:
    oracle = oracle_of(steps=3, accountant="rdp", sampling="unchecked")
    for batch in [samples(N)] * 3:
        oracle.backward(*batch)
    full = private_plan(n=N, batch_size=N, steps=3, accountant="rdp")
    assert oracle.ledger.epsilon() == full.epsilon()
    assert oracle.ledger.epsilon() > 2 * oracle.plan.epsilon()
    with pytest.raises(PlanViolationError, match="all 3 steps"):
        oracle.backward(*samples(N))


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match="sampling 'poison' is unknown: did you mean 'poisson'"):
        PrivateGradientOracle(smooth_net(), cross_entropy, private_plan(), sampling="poison")


# --- the mistakes


def nothing(original: Any) -> Any:
    return lambda *args: None


def always_alike(original: Any) -> Any:
    return lambda one, other, inputs, units: True


def by_an_absolute_bound(original: Any) -> Any:
    return lambda one, other, inputs, units: torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def by_rows(original: Any) -> Any:
    """The views of one row without a record count as rows that were compared."""
    return lambda self, name, augment, batch, keys, units: original(
        self, name, augment, batch, keys, len(keys)
    )


def with_one_view_alone(original: Any) -> Any:
    return lambda self, name, augment, batch, keys, units: (
        original(self, name, augment, batch, keys, units)
        if self.multiplicity == 1
        else augment(batch, keys)
    )


def always_likely(original: Any) -> Any:
    return lambda self, size: 1.0


def counts_rows(original: Any) -> Any:
    return property(lambda self: len(self.ids))


def factors_alone(original: Any) -> Any:
    """A sensitivity that has changed is not noticed."""
    rows = lambda numbers: list(zip(numbers[::2], numbers[1::2], strict=True))  # noqa: E731
    return lambda self, measured: clipping_module.check_factors(
        self._clipping, self._fixed, rows(measured)
    )


def group_by_group(original: Any) -> Any:
    """Each group against the whole sensitivity."""

    def measure(clipping: Clipping, norms: Tensor, factors: Tensor, extra: None) -> Tensor:
        groups = zip(norms, factors, strict=True)
        each = [original(clipping, one[None], scale[None]) for one, scale in groups]
        return torch.stack(each).amax(0)

    return measure


def without_vanished_norms(original: Any) -> Any:
    return lambda clipping, norms, factors, extra=None: original(
        clipping, norms, torch.where(norms == 0, 0.0, factors), extra
    )


def finite_units_alone(original: Any) -> Any:
    def measure(clipping: Clipping, norms: Tensor, factors: Tensor, extra: None) -> Tensor:
        fine = norms.isfinite().all(dim=0)
        return original(clipping, norms[:, fine], factors[:, fine])

    return measure


def as_the_clipping_returns(original: Any) -> Any:
    return lambda self, norms, scaled: (self._clipping.factors(norms.clone()), None)


def last_physical_batch_alone(original: Any) -> Any:
    return lambda clipping, bound, measured: original(clipping, bound, measured[-1:])


def one_per_object(original):
    known = {}
    return lambda ledger: known.setdefault(id(ledger), UsedBatches())


MISTAKES = {
    "factors that follow other units": Mistake(
        check_a_factor_depends_on_its_own_unit, clipping_module, "check_alone", nothing
    ),
    "rows that are mixed before the clip": Mistake(
        check_an_augmentation_changes_each_row_by_itself, batches, "_alike", always_alike
    ),
    "small rows that are mixed": Mistake(
        check_an_augmentation_changes_each_row_by_itself, batches, "_alike", by_an_absolute_bound
    ),
    "compared by views": Mistake(
        check_an_augmentation_changes_each_row_by_itself, batches.Views, "_augment_units", by_rows
    ),
    "several views that are not compared": Mistake(
        check_an_augmentation_changes_each_row_by_itself,
        batches.Views,
        "_augment_units",
        with_one_view_alone,
    ),
    "a sensitivity that follows the units": Mistake(
        check_the_sensitivity_does_not_follow_the_units, StepClipping, "verify", factors_alone
    ),
    "norms that a clipping has overwritten": Mistake(
        check_a_clipping_does_not_change_the_norms,
        clipping_module,
        "shield_norms",
        lambda original: lambda clipping, norms: norms,
    ),
    "factors that a clipping has overwritten": Mistake(
        check_factors_are_those_that_were_measured,
        StepClipping,
        "_compute",
        as_the_clipping_returns,
    ),
    "a sensitivity that can be overwritten": Mistake(
        check_a_clipping_of_a_step_is_not_overwritten, StepClipping, "sensitivity", writable
    ),
    "parameters in no clipping group": Mistake(
        check_every_parameter_is_in_a_group, assembly, "check_groups", nothing
    ),
    "batches of any loader": Mistake(
        check_a_shuffled_loader_is_refused_at_once, guard, "check_source", nothing
    ),
    "equal batches do not count": Mistake(
        check_a_shuffled_loader_is_refused, BatchSizes, "count", nothing
    ),
    "equal batches count as likely": Mistake(
        check_a_shuffled_loader_is_refused, BatchSizes, "_most_likely", always_likely
    ),
    "any size is likely": Mistake(
        check_an_impossible_batch_is_refused, BatchSizes, "_tail", always_likely
    ),
    "rows counted for units": Mistake(
        check_records_of_one_owner_count_as_one, LogicalBatch, "size", counts_rows
    ),
    "any full batch": Mistake(check_a_full_batch_is_full, BatchSizes, "_check_whole", nothing),
    "steps without end": Mistake(check_no_step_beyond_the_plan, PrivacyPlan, "check_step", nothing),
    "a batch for many steps": Mistake(
        check_a_batch_is_part_of_one_step, guard, "check_new", nothing
    ),
    "a batch twice by two objects of one ledger": Mistake(
        check_ledgers_on_one_file_share_their_batches, UsedBatches, "of", one_per_object
    ),
    "a state without its ledger": Mistake(
        check_a_state_comes_with_its_ledger, PrivacyPlan, "check_resumed", nothing
    ),
    "factors as they come": Mistake(
        check_a_clipping_keeps_its_sensitivity, clipping_module, "check_factors", nothing
    ),
    "a norm of 0 that counts as 0": Mistake(
        check_a_clipping_keeps_its_sensitivity, clipping_module, "measure", without_vanished_norms
    ),
    "factors of the last physical batch alone": Mistake(
        check_every_physical_batch, clipping_module, "check_factors", last_physical_batch_alone
    ),
    "each group against the whole C": Mistake(
        check_a_clipping_keeps_its_sensitivity, clipping_module, "measure", group_by_group
    ),
    "NaN left out of the check": Mistake(
        check_bad_units_have_factor_zero, clipping_module, "measure", finite_units_alone
    ),
}


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
