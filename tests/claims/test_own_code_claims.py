"""Code of the user's: it mixes no units, keeps nothing of them, and stays refused once it was.

A search for mistakes, and no proof (``dpbam.own_code``): what is discrete in the other units may
pass a step. Each claim fails with a mistake planted.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam import (
    BAM,
    DPSAT,
    DPSGD,
    Clipping,
    FlatClipping,
    PrivateGradientOracle,
    assembly,
    batches,
    own_code,
)
from dpbam.batches import Views
from dpbam.bias import PrivateStatistics
from dpbam.engines import StatefulModelError, state
from dpbam.engines.materialised import MaterialisedDirections
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.joint_release import Contributions
from dpbam.observers import Observation, StepFacts, TrainingLoss, UnitFacts
from dpbam.privacy.clipping import bound_factors
from planting import Mistake, catches
from support import cross_entropy, flat, gradients, private_plan, samples, sized_oracle, smooth_net

N, L, SIGMA = 400, 40, 5.0


def oracle_of(
    clipping: Clipping | None = None, statistics: Any = None, **options: Any
) -> PrivateGradientOracle:
    sigmas = () if statistics is None else statistics.noise_multipliers
    plan = private_plan(n=N, batch_size=L, steps=60, joint_noise_multipliers=sigmas)
    return sized_oracle(
        smooth_net(), cross_entropy, plan, options.pop("method", None), clipping=clipping,
        statistics=statistics, **{"engine": "functional", **options},
    )  # fmt: skip


def refusal_of(oracle: PrivateGradientOracle, seed: int = 0) -> str:
    """Why a step on the batch of this seed is refused, or what was released."""
    charged = len(oracle.ledger)
    try:
        oracle.backward(*samples(L, seed=seed))
    except (PlanViolationError, StatefulModelError) as error:
        assert len(oracle.ledger) == charged
        return str(error)
    return "released"


class Statistic:
    """Counts the units."""

    noise_multipliers, sensitivities = (SIGMA,), {"count": 1.0}

    def begin(self, facts: StepFacts) -> None:
        pass

    def contributions(self, batch: Any) -> dict[str, Contributions]:
        return {"count": Contributions(self.count(batch)[None])}

    def count(self, batch: Any) -> Tensor:
        return torch.ones(len(batch.ids))

    def publish(self, released: Any) -> None:
        self.released = float(flat(released["count"]))


# --- once refused


class FirstMedian(FlatClipping):
    """Clips to the median norm of the first batch that it sees."""

    def scales(self, norms: Tensor) -> Tensor:
        if "median" not in vars(self):
            vars(self)["median"] = float(norms.median())
        return bound_factors(norms, min(self.clip_norm, self.median))


class RaisingMedian(FirstMedian):
    """Raises an error of its own at its first use, when it has kept the median."""

    def scales(self, norms: Tensor) -> Tensor:
        seen = "median" in vars(self)
        factors = super().scales(norms)
        if not seen:
            raise PlanViolationError("a mistake of the user's own")
        return factors


class AboveFirstMedian(Statistic):
    """Counts norms above the median of the first batch."""

    median = None

    def count(self, batch: Any) -> Tensor:
        norms = batch.norms[0]
        if len(norms) and self.median is None:
            self.median = float(norms.median())
        return (norms > (self.median or 0.0)).float()


class CountingMethod(DPSGD):
    """Has the number of its calls in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def direction(self, grad: Any, theta: Any, lam: float) -> Any:
        self.calls += self.calls < 1
        return grad(theta)

    def state_dict(self) -> dict[str, Tensor]:
        return {"calls": torch.tensor(float(self.calls))}

    def load_state_dict(self, state: Any) -> None:
        self.calls = int(state["calls"])


def check_what_was_refused_stays_refused(first: type[FirstMedian] = FirstMedian) -> None:
    """By the same oracle, and by a new one with the object or a copy of it."""
    clipping, statistics, method = first(1.0), AboveFirstMedian(), CountingMethod()
    for kind, component in (("clipping", clipping), ("statistics", statistics), ("method", method)):
        oracle = oracle_of(**{kind: component})
        assert refusal_of(oracle) != "released"
        copies = [copy.copy(component), copy.deepcopy(component)]
        copies.append(pickle.loads(pickle.dumps(component)))
        oracles = [oracle, *(oracle_of(**{kind: each}) for each in (component, *copies))]
        for again in oracles:
            assert "was refused in an earlier step" in refusal_of(again, seed=1), kind


def check_what_was_kept_in_a_step_that_failed_is_refused() -> None:
    check_what_was_refused_stays_refused(RaisingMedian)


def check_a_refused_augmentation_stays_refused() -> None:
    """Also where no unit can be compared, as the method of an object, and without a mark."""

    class Centring:
        def __call__(self, inputs: Tensor, keys: Tensor) -> Tensor:
            return inputs - inputs.mean(0)

        apply = __call__

    class Slotted(Centring):
        __slots__ = ()

    for augment in (Centring(), Centring().apply, Slotted()):
        views = Views(augment)
        inputs, keys = torch.randn(6, 3), torch.arange(6)
        refusals = []
        for rows in (6, 1):
            try:
                views.of(inputs[:rows], keys[:rows].clone, rows)
            except PlanViolationError as error:
                refusals.append(str(error))
        assert len(refusals) == 2, "it was used again"
        assert "other rows are left out" in refusals[0]
        assert "was refused in an earlier step" in refusals[1]


class FromRow:
    """Subtracts a row that it has kept, once it has been compared."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls, self.kept, self.fails = 0, None, fails

    def __call__(self, inputs: Tensor, keys: Tensor) -> Tensor:
        if self.kept is not None:
            return inputs - self.kept
        self.calls += 1
        if self.calls > 8:
            self.kept = inputs[0].clone()
            if self.fails:
                raise ValueError("a mistake of the user's own")
        return inputs


def check_an_augmentation_keeps_nothing() -> None:
    """One that keeps a row of a step moves the sum of the next; also where its step fails."""
    for augment in (FromRow(), FromRow().__call__, FromRow(fails=True)):
        views, inputs = Views(augment), torch.randn(6, 3)
        refusals = []
        for _ in range(3):
            try:
                views.of(inputs, torch.arange(6).clone, 6)
            except PlanViolationError as error:
                refusals.append(str(error))
            except ValueError:
                refusals.append("its own")
        assert len(refusals) == 3, "what it kept was used"
        assert "keeps something of its rows in an attribute" in refusals[0]
        assert "was refused in an earlier step" in refusals[1]


def test_an_augmentation_may_read_what_it_holds() -> None:
    class Shift:
        def __init__(self) -> None:
            self.by, self.table = torch.ones(3), {"a": [torch.zeros(2).to_sparse()]}

        def __call__(self, inputs: Tensor, keys: Tensor) -> Tensor:
            return inputs + self.by

    views = Views(Shift())
    for _ in range(3):
        assert torch.equal(views.of(torch.zeros(6, 3), torch.arange(6).clone, 6), torch.ones(6, 3))


class SometimesCentred:
    """Subtracts the mean of the rows, from the second batch on."""

    def __call__(self, inputs: Tensor, keys: Tensor) -> Tensor:
        return inputs - inputs.mean(0) if float(inputs.abs().max()) > 5 else inputs


def test_an_augmentation_that_mixes_rarely_is_found_later() -> None:
    """An eighth of the later batches is compared: 400 pass with probability 1e-23."""
    views, keys = Views(SometimesCentred()), torch.arange(6).clone
    views.of(torch.randn(6, 3).clamp(-1, 1), keys, 6)

    def train() -> None:
        for _ in range(400):
            views.of(10 + torch.randn(6, 3), keys, 6)

    with pytest.raises(PlanViolationError, match="other rows are left out"):
        train()


class Alternating(DPSGD):
    """Changes the sign of the directions from pass to pass."""

    calls = 0

    def direction(self, grad: Any, theta: Any, lam: float) -> Any:
        self.calls += 1
        return {name: (-1) ** self.calls * g for name, g in grad(theta).items()}


def check_a_method_counts_no_passes() -> None:
    """With the first unit gone, all others would have the other sign."""
    for engine in ("functional", "loop"):
        oracle = oracle_of(method=Alternating(), engine=engine, physical_batch_size=1)
        assert "changes calls of the method" in refusal_of(oracle), engine
        assert "was refused in an earlier step" in refusal_of(oracle), engine


def test_a_refused_augmentation_stays_refused() -> None:
    check_a_refused_augmentation_stays_refused()


class OfLayers:
    """Releases, for each layer, by how much its norm exceeds the mean over the layers."""

    noise_multipliers, sensitivities = (SIGMA,), {"layers": 1.0}

    def begin(self, facts: StepFacts) -> None: ...

    def contributions(self, batch: Any) -> dict[str, Contributions]:
        norms = torch.stack(list(batch.layer_norms().values()))  # [layers, U]
        shares = norms / norms.sum(0).clamp(min=1e-9)
        return {"layers": Contributions(shares - shares.mean(0))}

    def publish(self, sums: Any) -> None: ...


def test_a_statistic_near_zero_is_not_taken_for_one_that_mixes_units() -> None:
    """Values that nearly cancel have no relative accuracy; a false alarm would end a training."""
    statistics = OfLayers()
    for seed in range(20):
        oracle = oracle_of(statistics=statistics)
        assert refusal_of(oracle, seed=seed) == "released"


def test_a_method_that_cannot_be_copied_is_observed() -> None:
    """It holds a lock."""

    class Locked(DPSGD):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    watched = TrainingLoss()
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), Locked(), observers=watched)
    oracle.backward(*samples(9))
    assert len(watched.non_private_losses) == 1


def test_a_state_that_is_no_tensor_is_refused_in_a_sentence() -> None:
    class Counting(DPSGD):
        def state_dict(self) -> dict[str, Any]:
            return {"rate": 0.5}

        def load_state_dict(self, state: Any) -> None: ...

    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), Counting())
    with pytest.raises(ArgumentError, match="must hold tensors, and rate is a float"):
        oracle.backward(*samples(9))


def test_what_was_refused_stays_refused() -> None:
    check_what_was_refused_stays_refused()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_code_that_keeps_nothing_may_fail(error: type[BaseException]) -> None:
    """Another batch, or the same again, is possible."""

    class Failing(FlatClipping):
        def scales(self, norms: Tensor) -> Tensor:
            if norms.shape[1] == 1:
                raise error
            return bound_factors(norms, self.clip_norm)

    oracle = oracle_of(Failing(1.0))
    x, y = samples(L)
    with pytest.raises(error):
        oracle.backward(x[:1], y[:1])
    assert not len(oracle.ledger)
    oracle = oracle_of(FlatClipping(1.0))
    assert refusal_of(oracle) == "released"


def test_a_statistic_of_slots_alone_is_refused() -> None:
    class Slots:
        __slots__ = ("released",)
        noise_multipliers, sensitivities = (SIGMA,), {"count": 1.0}
        begin, contributions = Statistic.begin, Statistic.contributions
        count, publish = Statistic.count, Statistic.publish

    with pytest.raises(ArgumentError, match="has __slots__ alone"):
        oracle_of(statistics=Slots()).backward(*samples(L))


class Meter:
    """A running maximum that is called."""

    largest = 0.0

    def __call__(self, value: float) -> None:
        self.largest = max(self.largest, value)


class Slots:
    __slots__ = ("largest",)

    def __init__(self) -> None:
        self.largest = 0.0


def set_first(box: Any, value: float) -> None:
    box[0] = value


KEEPERS = {
    "an array": (lambda: array("d", [0.0]), set_first),
    "bytes": (lambda: bytearray(1), lambda box, value: set_first(box, 1 + int(value))),
    "a module": (
        lambda: nn.Linear(1, 1).requires_grad_(False),
        lambda box, value: box.weight.fill_(value),
    ),
    "an object that is called": (Meter, lambda box, value: box(value)),
    "an object with slots": (Slots, lambda box, value: setattr(box, "largest", value)),
    "a sparse tensor": (
        lambda: torch.zeros(1).to_sparse(),
        lambda box, value: box.copy_(torch.full((1,), value).to_sparse()),
    ),
}


@pytest.mark.parametrize("what", KEEPERS)
def test_what_a_clipping_keeps_in_an_attribute_of_any_kind_is_seen(what: str) -> None:
    make, keep = KEEPERS[what]

    class Keeping(FlatClipping):
        def __init__(self) -> None:
            super().__init__(1.0)
            vars(self)["box"] = make()

        def scales(self, norms: Tensor) -> Tensor:
            if norms.numel():
                keep(self.box, float(norms.max()))
            return super().scales(norms)

    assert "in an attribute" in refusal_of(oracle_of(Keeping()))


def test_a_clipping_may_hold_the_model_whose_weights_a_method_shifts() -> None:
    """They are compared when the shift is undone."""

    class OfModel(FlatClipping):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(1.0)
            vars(self)["model"] = model

    model = nn.Linear(4, 3).double()
    oracle = sized_oracle(model, cross_entropy, private_plan(), DPSAT(0.1), clipping=OfModel(model))
    for seed in range(2):
        oracle.backward(*samples(9, seed=seed))
    assert len(oracle.ledger) == 2


# --- discrete in the other units


class Switch(FlatClipping):
    """Halves all factors if more than 13 norms exceed 1.7."""

    def scales(self, norms: Tensor) -> Tensor:
        halved = float((norms > 1.7).sum()) > 13
        return bound_factors(norms, self.clip_norm) / (2 if halved else 1)


class AboveMean(Statistic):
    """Counts the losses above their mean."""

    def count(self, batch: Any) -> Tensor:
        losses = batch.losses()
        return (losses > losses.mean()).float() if len(losses) else losses


class AboveMeanInPlace(Statistic):
    """Likewise; it writes the result over the losses."""

    def count(self, batch: Any) -> Tensor:
        losses = batch.losses()
        if len(losses):
            losses.copy_((losses - losses.mean()).sign())
        return (losses > 0).float()


def check_a_rule_that_counts_units_is_refused() -> None:
    """At its first step: ten batches of 40, some above the threshold, and some below."""
    for seed in range(10):
        assert "other factors" in refusal_of(oracle_of(Switch(1.0)), seed)


def check_a_statistic_above_the_mean_is_refused(most_passed: int = 2) -> None:
    """At nearly all first steps: 0 of 240 passed here, and up to 4 of 40 with losses in two groups.

    One that passes a step is compared again at the next one. Every other unit alone: 6 of 20 pass.
    """
    for kind in (AboveMean, AboveMeanInPlace):
        refusals = [refusal_of(oracle_of(statistics=kind()), seed) for seed in range(20)]
        assert refusals.count("released") <= most_passed, kind.__name__


# --- what observers and statistics are given


class AboveLevel(Statistic):
    """Counts losses above a level that is public."""

    def count(self, batch: Any) -> Tensor:
        return (batch.losses() > 1.1).float()


def by_all_norms(batch: Any) -> dict[str, Contributions]:
    """What each unit adds follows the norms of all."""
    share = float(torch.tanh(batch.norms.sum() / 100))
    return {"counts": Contributions(torch.full((3, len(batch.ids)), share / 2))}


def check_a_replaced_function_is_searched() -> None:
    """Also where ``functools.wraps`` gives it the module of dpbam's own function."""
    statistics = PrivateStatistics([0.5], noise_multiplier=SIGMA)
    statistics.contributions = functools.wraps(statistics.contributions)(by_all_norms)
    clipping = FlatClipping(1.0)
    switch = functools.wraps(clipping.scales)(lambda norms: Switch(1.0).scales(norms))
    object.__setattr__(clipping, "scales", switch)
    for parts in ({"statistics": statistics}, {"clipping": clipping}):
        assert refusal_of(oracle_of(**parts)) != "released", parts


class ByHandle(Statistic):
    """Counts units, with the sign of all of them: by the engine's handle, if it gets it."""

    def count(self, batch: Any) -> Tensor:
        units = batch.directions.norms().shape[1] if len(batch.ids) else 0
        return torch.full((len(batch.ids),), (-1.0) ** units)


def check_statistics_get_no_handle() -> None:
    """What it tells of all units is not seen by a comparison: it is the same in every batch."""
    refused = False
    try:
        oracle_of(statistics=ByHandle()).backward(*samples(L))
    except AttributeError as error:
        refused = "directions" in str(error)
    assert refused, "one unit changes what all others add"


class Watcher:
    """An observer that writes over what it is given."""

    wants_plain = False

    def begin(self, facts: StepFacts) -> bool:
        gradient = facts.batch_gradient()
        facts.method.exact = bool(flat(gradient).norm() > 0)
        for tensor in (facts.previous or {}).values():
            tensor.fill_(7.0)
        return True

    def observe(self, batch: Any) -> None:
        batch.losses().zero_()
        batch.directions.losses().zero_()

    def finish(self, clipped: Any, released: Any) -> None:
        pass


def check_observers_change_nothing_that_is_released() -> None:
    """Not a count of losses, nor the method, on the engines that hold the losses as a tensor."""
    for engine in ("functional", "loop"):
        runs = []
        for observers in ((), Watcher()):
            oracle = oracle_of(
                statistics=AboveLevel(), method=BAM(0.1), observers=observers, engine=engine, seed=3
            )
            for seed in range(2):
                oracle.backward(*samples(L, seed=seed))
            runs.append((oracle.statistics.released, flat(gradients(oracle.model))))
            assert not oracle.method.exact
        assert runs[0][0] == runs[1][0]
        assert torch.equal(runs[0][1], runs[1][1])


class Carrier(Statistic, Watcher):
    """Observes, and releases what it has observed."""

    def __init__(self) -> None:
        self.seen = torch.zeros(())

    def begin(self, facts: StepFacts) -> bool:
        try:
            self.seen = flat(facts.batch_gradient()).norm()
        except PlanViolationError:  # asked as a statistic
            self.seen = torch.zeros(())
        return True

    def count(self, batch: Any) -> Tensor:
        return torch.tanh(self.seen).expand(len(batch.ids))


class Courier(Watcher):
    """An observer that writes into a statistic."""

    def __init__(self, statistics: Carrier) -> None:
        self.statistics = statistics

    def begin(self, facts: StepFacts) -> bool:
        self.statistics.seen = flat(facts.batch_gradient()).norm()
        return True


def check_no_observer_is_a_statistic() -> None:
    carrier = Carrier()
    try:
        oracle_of(statistics=carrier, observers=carrier)
    except ArgumentError as refusal:
        assert "observer and as statistics" in str(refusal)  # noqa: PT017
        return
    raise AssertionError("what was observed is released")


def check_no_observer_writes_into_a_statistic() -> None:
    """The statistic's attributes are known before observers may see the batch gradient."""
    carrier = Carrier()
    oracle = oracle_of(statistics=carrier, observers=Courier(carrier))
    assert "keeps something of this step's units" in refusal_of(oracle)


# --- the mistakes


def nothing(original: Any) -> Any:
    return lambda *args, **more: None


def every_other_alone(original: Any) -> Any:
    def other_batches(units: int, device: Any, sizes: Any = None) -> list[Tensor]:
        places = torch.arange(units, device=device)
        return [places[::2], places[1::2]]

    return other_batches


def the_same_object(original: Any) -> Any:
    return lambda self: self


def the_engines_own(original: Any) -> Any:
    return lambda self: self._losses


MISTAKES = {
    "a function of dpbam's own that was replaced": Mistake(
        check_a_replaced_function_is_searched, own_code, "_replaces_functions",
        lambda original: lambda component: False,
    ),
    "an augmentation that keeps a row": Mistake(
        check_an_augmentation_keeps_nothing, batches, "run_kept_apart",
        lambda original: lambda augment, *units: augment(*units),
    ),
    "a method that counts the passes": Mistake(
        check_a_method_counts_no_passes, state, "snapshot_method",
        lambda original: lambda method: state.Snapshot(),
    ),
    "statistics that get the engine's handle": Mistake(
        check_statistics_get_no_handle, UnitFacts, "copy",
        lambda original: lambda self: Observation(
            self.ids, self.norms, self.factors, self._handle, self._places
        ),
    ),
    "a refused augmentation, again": Mistake(
        check_a_refused_augmentation_stays_refused, batches, "check_not_refused", nothing
    ),
    "code that was refused, again": Mistake(
        check_what_was_refused_stays_refused, own_code, "refuse", nothing
    ),
    "what was kept in a step that failed": Mistake(
        check_what_was_kept_in_a_step_that_failed_is_refused, own_code.OwnCode, "abandon", nothing
    ),
    "a rule that counts units, compared by every other one": Mistake(
        check_a_rule_that_counts_units_is_refused, own_code, "other_batches",
        every_other_alone,
    ),
    "a statistic above the mean, compared by every other unit": Mistake(
        check_a_statistic_above_the_mean_is_refused, own_code, "other_batches",
        every_other_alone,
    ),
    "losses that an observer has overwritten": Mistake(
        check_observers_change_nothing_that_is_released, MaterialisedDirections, "losses",
        the_engines_own,
    ),
    "a method that an observer has changed": Mistake(
        check_observers_change_nothing_that_is_released, StepFacts, "copy", the_same_object
    ),
    "an observer that is a statistic": Mistake(
        check_no_observer_is_a_statistic, assembly, "check_apart", nothing
    ),
    "an observer that writes into a statistic": Mistake(
        check_no_observer_writes_into_a_statistic, own_code.OwnCode, "keeps",
        lambda original: lambda self: False,
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
