"""Code of the user that raises, or Ctrl-C, at every point of a step.

Before the charge nothing is spent, and the same batch may be handed over again; after it the step
is taken, and the next one is possible. Each claim fails with a mistake planted.
"""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._functorch import _vmap_increment_nesting, get_dynamic_layer_stack_depth
from torch.overrides import TorchFunctionMode

from dpbam import DPSAT, Ledger, PrivateGradientOracle, mechanism, params
from dpbam import observers as observers_module
from dpbam import oracle as oracle_module
from dpbam.bias import PrivateStatistics
from dpbam.engines.interruption import switched_back
from dpbam.engines.isolation import Isolation
from dpbam.errors import PlanViolationError
from dpbam.filters import Exponential
from dpbam.guard import Guard
from dpbam.params import WeakTensors
from interrupts import interrupt_at
from planting import Mistake, catches
from support import cross_entropy, flat, gradients, private_plan, samples, sized_oracle, smooth_net

N, L = 400, 40
Oracle = PrivateGradientOracle


class Watcher:
    """An observer that sees everything and changes nothing."""

    wants_plain = False

    def begin(self, facts: Any) -> bool:
        return True

    def observe(self, batch: Any) -> None:
        pass

    def finish(self, clipped: Any, released: Any) -> None:
        pass


def oracle_of(seed: int | None, ledger: Ledger | None = None) -> PrivateGradientOracle:
    """An oracle with all parts that a user may have written."""
    statistics = PrivateStatistics([0.5], noise_multiplier=20.0)
    plan = private_plan(
        n=N, batch_size=L, steps=6, clipping="quantile", accountant="rdp",
        joint_noise_multipliers=statistics.noise_multipliers,
    )  # fmt: skip
    return sized_oracle(
        smooth_net(), cross_entropy, plan, DPSAT(0.1), seed=seed, filter=Exponential(0.5),
        statistics=statistics, observers=Watcher(), physical_batch_size=16, ledger=ledger,
    )  # fmt: skip


@contextmanager
def raising(owner: Any, name: str, error: type[BaseException], *, late: bool) -> Iterator[None]:
    """Let ``owner.name`` raise, at its beginning or after it has done what it does."""
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if late:
            real(*args, **options)
        raise error("a mistake of the user's own")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


#: the part of an oracle, its function, and whether that raises after it has run
Point = tuple[Callable[[PrivateGradientOracle], Any], str, bool]
BEFORE: dict[str, Point] = {
    "observer.begin": (lambda o: o.observers[0], "begin", True),
    "observer.observe": (lambda o: o.observers[0], "observe", True),
    "statistics.begin": (lambda o: o.statistics, "begin", True),
    "statistics.contributions": (lambda o: o.statistics, "contributions", True),
    "the model": (lambda o: o.model[2], "forward", True),
    "the method": (lambda o: o.method, "lam_at", True),
    "the clipping": (lambda o: o.clipping, "factors", True),
    "the noise": (lambda o: o.noise, "add", True),
    "the ledger, not written": (lambda o: o.ledger, "charge", False),
}
AFTER: dict[str, Point] = {
    "the ledger, written": (lambda o: o.ledger, "charge", True),
    "the other ranks": (lambda o: o.ranks, "gather", False),
    "clipping.update": (lambda o: o.clipping, "update", False),
    "the filter": (lambda o: o.filter, "apply", False),
    "the filter, applied": (lambda o: o.filter, "apply", True),
    "statistics.publish": (lambda o: o.statistics, "publish", False),
    "observer.finish": (lambda o: o.observers[0], "finish", False),
}
_WRITTEN = {"statistics.publish", "observer.finish"}


def interrupted(
    oracle: PrivateGradientOracle, point: Point, error: type[BaseException], batch: Any
) -> list[str]:
    """Take a step with ``error`` raised at ``point``; return the notes for the user."""
    owner, name, late = point
    notes: list[str] | None = None
    with raising(owner(oracle), name, error, late=late):
        try:
            oracle.backward(*batch)
        except error as raised:
            notes = getattr(raised, "__notes__", [])
    assert notes is not None, f"{name} was not called"
    return notes


def steps(oracle: PrivateGradientOracle, count: int) -> list[Any]:
    """The next ``count`` batches of an oracle."""
    return list(itertools.islice(oracle.batches(samples(N)), count))


def check_what_raises_before_the_charge_costs_nothing() -> None:
    """The same batch again is the step of a run without an interruption, bit for bit."""
    undisturbed = oracle_of(0)
    one, two = steps(undisturbed, 2)
    for batch in (one, two):
        undisturbed.backward(*batch)
    for name, point in BEFORE.items():
        oracle = oracle_of(0)
        oracle.backward(*one)
        notes = interrupted(oracle, point, KeyboardInterrupt, two)
        assert not any("charged" in note for note in notes), name
        assert (oracle.step, len(oracle.ledger)) == (1, 1), name
        oracle.backward(*two)
        assert (oracle.step, len(oracle.ledger)) == (2, 2), name
        assert torch.equal(flat(gradients(oracle.model)), flat(gradients(undisturbed.model))), name


def check_what_raises_after_the_charge_leaves_a_step_that_is_taken() -> None:
    """With a seed and without one in turn."""
    for k, name in enumerate(AFTER):
        check_the_step_is_taken(name, None if k % 2 else 0)


def check_the_step_is_taken(name: str, seed: int | None) -> None:
    """Ledger, step, sampler and state agree, the next step is possible, no noise comes twice."""
    oracle, noised = oracle_of(seed), []
    add = oracle.noise.add

    def adding(*args: Any, stream: str = "noise", start: int = 0, **more: Any) -> Any:
        noised.append((stream, args[2], start))
        return add(*args, stream=stream, start=start, **more)

    oracle.noise.add = adding
    one, two, three = steps(oracle, 3)
    oracle.backward(*one)
    notes = interrupted(oracle, AFTER[name], KeyboardInterrupt, two)
    written = name in ("statistics.publish", "observer.finish")
    holds = "holds its private gradient" if written else "is None"
    sentence = f"step 1 is charged and counts as taken, and .grad {holds}: continue with the next"
    assert [note for note in notes if note.startswith(sentence)], name
    assert all((p.grad is not None) == written for p in oracle.model.parameters()), name
    assert oracle.sampler().start == oracle.step == len(oracle.ledger) == 2, name
    refused = False
    try:
        oracle.backward(*two)
    except PlanViolationError:
        refused = True
    assert refused, f"{name}: the batch of a step that is taken, again"
    oracle.backward(*three)
    assert all(p.grad is not None for p in oracle.model.parameters())
    assert len(noised) == len(set(noised)) == 9, name  # gradient, bit and counts, three steps
    assert oracle.ledger.epsilon() == pytest.approx(oracle.plan.epsilon(steps=3))
    resumed = oracle_of(seed, oracle.ledger)
    resumed.load_state_dict(oracle.state_dict())
    resumed.backward(*steps(resumed, 1)[0])
    assert resumed.step == len(resumed.ledger) == 4, name


def check_a_charged_step_is_taken_again_on_resume() -> None:
    """By a state that is saved then: it has the parameters of before that step."""
    undisturbed, oracle = oracle_of(0), oracle_of(0)
    for batch in steps(undisturbed, 2):
        undisturbed.backward(*batch)
    one, two = steps(oracle, 2)
    oracle.backward(*one)
    interrupted(oracle, AFTER["the other ranks"], KeyboardInterrupt, two)
    resumed = oracle_of(0, oracle.ledger)
    resumed.load_state_dict(oracle.state_dict())
    (replay,) = steps(resumed, 1)
    resumed.backward(*replay)
    assert (resumed.step, len(resumed.ledger)) == (2, 2)
    assert torch.equal(flat(gradients(resumed.model)), flat(gradients(undisturbed.model)))


def check_a_replay_that_is_interrupted_is_replayed() -> None:
    """A seeded step that the ledger has from before is not taken until it is computed again."""
    ledger = oracle_of(0).plan.ledger()
    for attempt in range(2):
        oracle = oracle_of(0, ledger)
        batch = next(oracle.batches(samples(N)))
        if attempt:
            interrupted(oracle, BEFORE["observer.observe"], ValueError, batch)
            interrupted(oracle, BEFORE["statistics.contributions"], ValueError, batch)
            assert oracle.step == 0
        oracle.backward(*batch)
        assert (oracle.step, len(ledger)) == (1, 1)


class Recorder(Watcher):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def observe(self, batch: Any) -> None:
        self.seen += [batch.ids.clone(), batch.norms.clone(), batch.factors.clone()]

    def finish(self, clipped: Any, released: Any) -> None:
        self.seen += [flat(clipped).clone(), flat(released).clone()]


class Spoiler(Watcher):
    """Writes zeros over everything that it is given."""

    def begin(self, facts: Any) -> bool:
        for tensor in (facts.previous or {}).values():
            tensor.zero_()
        return True

    def observe(self, batch: Any) -> None:
        for tensor in (batch.ids, batch.norms, batch.factors):
            tensor.zero_()

    def finish(self, clipped: Any, released: Any) -> None:
        for tensor in (*clipped.values(), *released.values()):
            tensor.zero_()


def check_observers_and_filters_get_copies() -> None:
    """One that writes over what it gets changes no gradient, history, statistics or observation."""
    runs = []
    for observer in (Watcher(), Spoiler()):
        oracle, recorder = oracle_of(0), Recorder()
        oracle.observers = (observer, recorder)
        if isinstance(observer, Spoiler):
            apply = oracle.filter.apply
            oracle.filter.apply = lambda g, apply=apply: (
                apply({n: t.clone() for n, t in g.items()}),
                [t.zero_() for t in g.values()],
            )[0]
        for batch in steps(oracle, 3):
            oracle.backward(*batch)
        runs.append((flat(gradients(oracle.model)), oracle.statistics.released, recorder.seen))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert all(map(torch.equal, runs[0][2], runs[1][2]))


# --- the claims themselves, point by point


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("name", AFTER)
@pytest.mark.slow
def test_what_raises_after_the_charge_leaves_a_step_that_is_taken(
    name: str, seed: int | None
) -> None:
    check_the_step_is_taken(name, seed)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_filter_that_raises_leaves_no_gradient(error: type[BaseException]) -> None:
    oracle = oracle_of(0)
    for batch in steps(oracle, 2):
        interrupted(oracle, AFTER["the filter"], error, batch)
        assert all(p.grad is None for p in oracle.model.parameters())
    assert oracle.step == len(oracle.ledger) == 2


def test_a_filter_that_leaves_a_parameter_out_writes_none() -> None:
    oracle = oracle_of(0)
    (batch,) = steps(oracle, 1)
    oracle.filter.apply = lambda gradient: {"0.weight": gradient["0.weight"]}
    with pytest.raises(KeyError) as raised:
        oracle.backward(*batch)
    assert "step 0 is charged" in raised.value.__notes__[-1]
    assert all(p.grad is None for p in oracle.model.parameters())


def test_a_charge_that_fails_without_a_seed_uses_no_name_twice() -> None:
    """It may be on disk though it failed: the next attempt has another name."""
    oracle = oracle_of(None)
    batch, name = next(oracle.batches(samples(N))), oracle.stream
    interrupted(oracle, BEFORE["the ledger, not written"], OSError, batch)
    assert oracle.stream != name
    oracle.backward(*batch)
    assert oracle.step == len(oracle.ledger) == 1


def test_a_charged_step_is_taken_again_on_resume() -> None:
    check_a_charged_step_is_taken_again_on_resume()


def test_a_replay_that_is_interrupted_is_replayed() -> None:
    check_a_replay_that_is_interrupted_is_replayed()


def check_an_interrupted_step_leaves_no_record() -> None:
    """Ctrl-C while the ledger writes: an oracle that is pickled then has no record in it."""
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(n=N, batch_size=L), seed=0)
    inputs, targets, units = steps(oracle, 1)[0]
    interrupted(oracle, AFTER["the ledger, written"], KeyboardInterrupt, (inputs, targets, units))
    vars(oracle.ledger).pop("charge", None)  # what raised, which cannot be pickled
    saved = pickle.dumps(oracle)
    assert not any(row.numpy().tobytes() in saved for row in inputs), "a record is in the file"
    with pytest.raises(PlanViolationError, match="part of a step before"):
        oracle.backward(inputs, targets, units)


def check_an_interrupt_leaves_theta() -> None:
    """Ctrl-C between two parameters, while DP-SAT's shift of theta is undone."""
    model = smooth_net()
    theta = flat({n: p.detach().clone() for n, p in model.named_parameters()})
    shift = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    copy, copies = Tensor.copy_, []

    def copy_(self: Tensor, values: Tensor) -> Tensor:
        copies.append(values)
        if len(copies) == 2:
            raise KeyboardInterrupt
        return copy(self, values)

    parameters = dict(model.named_parameters())
    with (
        pytest.MonkeyPatch.context() as patch,
        suppress(KeyboardInterrupt),
        params.shifted(parameters, shift),
    ):
        patch.setattr(Tensor, "copy_", copy_)
    assert len(copies) > 2, "nothing was interrupted"
    assert torch.equal(flat({n: p.detach() for n, p in model.named_parameters()}), theta)


def check_an_interrupt_at_any_line_leaves_theta() -> None:
    """Ctrl-C before each line of the functions that shift theta and undo it, by the oracle."""
    for line in itertools.count():
        oracle = oracle_of(0)
        for batch in steps(oracle, 1):
            oracle.backward(*batch)
        theta = flat({n: p.detach().clone() for n, p in oracle.model.named_parameters()})
        names = ("shifted", "restored", "overwrite", "_copy_into")
        interrupted = interrupt_at(
            line, names, partial(oracle.backward, *samples(L, seed=3)), code_of=params
        )
        assert torch.equal(flat({n: p.detach() for n, p in oracle.model.named_parameters()}), theta)
        if not interrupted:
            break
    assert line > 10


def check_a_mode_that_an_interrupt_leaves_is_switched_off() -> None:
    """Ctrl-C right before the end of the block around the model: theta, torch, the next step."""
    oracle, leave = oracle_of(seed=None), Isolation.__exit__
    oracle.backward(*samples(L, seed=0))
    theta = flat(dict(oracle.model.named_parameters())).clone()

    def interrupted(self, *error: Any) -> None:
        raise KeyboardInterrupt

    outcome: type[BaseException] | None = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Isolation, "__exit__", interrupted)
        try:
            oracle.backward(*samples(L, seed=1))
        except BaseException as error:
            outcome = type(error)
    modes, depth = torch._C._len_torch_function_stack(), get_dynamic_layer_stack_depth()
    while torch._C._len_torch_function_stack():  # for the tests after this one
        torch._C._pop_torch_function_stack()
    assert Isolation.__exit__ is leave
    assert (modes, depth, outcome) == (0, 0, KeyboardInterrupt)
    assert torch.equal(flat(dict(oracle.model.named_parameters())), theta)
    oracle.backward(*samples(L, seed=2))
    assert len(oracle.ledger) == 2


def test_what_an_interrupt_may_leave_is_switched_back() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    def leave_all() -> None:
        with switched_back():
            Mode().__enter__()
            _vmap_increment_nesting(3, "error")
            torch._C._set_grad_enabled(False)
            gc.disable()
            torch._C._autograd._saved_tensors_hooks_disable("left")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave_all()
    assert not torch._C._len_torch_function_stack()
    assert not get_dynamic_layer_stack_depth()
    assert torch.is_grad_enabled()
    assert gc.isenabled()
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_an_error_that_an_interrupt_ends_in_is_the_interrupt() -> None:
    """But not one of a step that is taken while another interrupt is handled."""

    def fail_in_a_handler() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            with switched_back():
                raise RuntimeError("the stack of modes is empty")  # noqa: B904

    def fail_by_an_interrupt() -> None:
        with switched_back():
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError("the stack of modes is empty")

    with pytest.raises(KeyboardInterrupt):
        fail_by_an_interrupt()
    with pytest.raises(RuntimeError):
        fail_in_a_handler()


# --- the mistakes


def restored_once(original: Any) -> Any:
    @contextmanager
    def restored(parameters: Any, copies: Any = None) -> Iterator[None]:
        saved = {n: p.detach().clone() for n, p in parameters.items()}
        try:
            yield
        finally:
            params._copy_into(parameters, saved)

    return restored


def taken_at_its_end(original: Any) -> Any:
    def commit(self: PrivateGradientOracle, attempt: Any) -> None:
        if attempt.written:
            original(self, attempt)

    return commit


def taken_before_the_charge(original: Any) -> Any:
    def settle(self: PrivateGradientOracle) -> None:
        if self._attempt is not None:
            self._attempt.charged = True
        original(self)

    return settle


def silent(original: Any) -> Any:
    return lambda self, attempt, error: None


def as_it_is(original: Any) -> Any:
    return lambda tree: tree


def keeps_the_batch(original: Any) -> Any:
    return lambda self: dict(self.__dict__, _references=self.alive())


class Full(Watcher):
    """An observer that fails from its second step on, as where a disk is full."""

    steps = 0

    def observe(self, batch: Any) -> None:
        self.steps += 1
        if self.steps > 1:
            raise OSError("no space left")


class Nested:
    """A filter that takes the next step, and goes on if that fails."""

    oracle: PrivateGradientOracle
    error: Exception | None = None

    def apply(self, gradient: Any) -> Any:
        try:
            self.oracle.backward(*samples(9))
        except Exception as error:
            self.error = error
        return gradient

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def check_no_step_begins_inside_another() -> None:
    """The inner one would sum into memory of which the outer one hands out what it released."""
    nested = Nested()
    nested.oracle = sized_oracle(
        smooth_net(), cross_entropy, private_plan(), filter=nested, observers=Full()
    )
    nested.oracle.backward(*samples(9))
    assert isinstance(nested.error, PlanViolationError), nested.error
    assert "while a step of this oracle runs" in str(nested.error)
    assert len(nested.oracle.ledger) == nested.oracle.step == 1


def test_no_step_begins_inside_another() -> None:
    check_no_step_begins_inside_another()


def test_a_copy_made_inside_a_step_can_take_steps() -> None:
    copies = []

    class Copying(Watcher):
        def observe(self, batch: Any) -> None:
            copies.append(pickle.dumps(oracle._guard))

    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), observers=Copying())
    oracle.backward(*samples(9))
    assert not pickle.loads(copies[0]).step_runs


MISTAKES = {
    "a mode that an interrupt has left on": Mistake(
        check_a_mode_that_an_interrupt_leaves_is_switched_off, oracle_module, "switched_back",
        lambda original: nullcontext,
    ),
    "a step inside another": Mistake(
        check_no_step_begins_inside_another, Guard, "check_no_step_runs",
        lambda original: lambda self: None,
    ),
    "a shift that is not undone": Mistake(
        check_an_interrupt_at_any_line_leaves_theta, mechanism, "overwrite",
        lambda original: lambda parameters, values: None,
    ),
    "a shift that is half undone": Mistake(
        check_an_interrupt_leaves_theta, params, "restored", restored_once
    ),
    "an interrupted batch kept": Mistake(
        check_an_interrupted_step_leaves_no_record, WeakTensors, "__getstate__", keeps_the_batch
    ),
    "a step that counts when its gradient is written": Mistake(
        check_what_raises_after_the_charge_leaves_a_step_that_is_taken, Oracle, "_commit",
        taken_at_its_end,
    ),
    "a step that counts before its charge": Mistake(
        check_what_raises_before_the_charge_costs_nothing, Oracle, "_settle",
        taken_before_the_charge,
    ),
    "the gradient of the step before stays": Mistake(
        check_what_raises_after_the_charge_leaves_a_step_that_is_taken, Oracle, "_explain", silent
    ),
    "filters get the originals": Mistake(
        check_observers_and_filters_get_copies, oracle_module, "copied", as_it_is
    ),
    "observers get the originals": Mistake(
        check_observers_and_filters_get_copies, observers_module, "copied", as_it_is
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
