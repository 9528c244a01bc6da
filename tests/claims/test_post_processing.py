"""Filters, history and the corrected optimiser: they see what was released, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dpbam import mechanism
from dpbam.catalogue import FILTERS
from dpbam.contenders.disk import DiSK, KalmanStep
from dpbam.filters import Filter
from dpbam.methods import DPSGD, History, Method
from dpbam.oracle import PrivateGradientOracle
from dpbam.training.adam_bc import AdamBC
from planting import Mistake, catches
from support import cross_entropy, gradients, private_plan, samples, sized_oracle, smooth_net

PARTS = {name: {"filter": FILTERS.load(name)} for name in FILTERS} | {"disk": {}}


def watched(oracle: PrivateGradientOracle) -> tuple[list[dict], list[float]]:
    """Collect what the noise mechanism returns, divided by l, and the deviations it was given."""
    noised, stds, add = [], [], oracle.noise.add

    def seen(sums, std, step, **options):
        found = add(sums, std, step, **options)
        noised.append({n: s / oracle.plan.batch_size for n, s in found.items()})
        stds.append(std / oracle.plan.batch_size)
        return found

    oracle.noise.add = seen
    return noised, stds


def check_parts_see_what_was_released(name: str = "disk") -> None:
    """What a filter and a method's history get is the noised gradient, once it is charged."""
    made = {key: make() for key, make in PARTS[name].items()}
    method = DiSK(kappa=0.5) if name == "disk" else None
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, private_plan(), method, seed=0, **made)
    noised, _ = watched(oracle)
    given, apply = [], oracle.filter.apply

    def applied(gradient):
        given.append((len(oracle.ledger), {n: g.clone() for n, g in gradient.items()}))
        return apply(gradient)

    oracle.filter.apply = applied
    for step in range(1, 4):
        oracle.backward(*samples(9))
        charged, gradient = given[-1]
        assert charged == step
        assert all(torch.allclose(gradient[n], g) for n, g in noised[-1].items())
        for seen, released in zip(oracle._present()[0].gradients[::-1], noised[::-1],
                                  strict=False):  # fmt: skip
            assert all(torch.allclose(seen[n], g) for n, g in released.items())
    plain = [entry["noise_multiplier"] for entry in oracle.ledger.entries()]
    assert plain == [oracle.plan.noise_multiplier] * 3  # a filter costs nothing, and saves nothing


@pytest.mark.parametrize("name", PARTS)
def test_parts_see_what_was_released(name: str) -> None:
    check_parts_see_what_was_released(name)


def check_a_filter_sees_what_was_released() -> None:
    check_parts_see_what_was_released("doppler")


def check_every_filter_is_a_function_of_what_was_released() -> None:
    """What reaches ``.grad`` is a function of the filter's inputs alone: replayed, it is equal."""
    for make in (*map(FILTERS.load, FILTERS), lambda: KalmanStep(0.4)):
        model, given = smooth_net(), []
        oracle = sized_oracle(model, cross_entropy, private_plan(), seed=0, filter=make())
        apply = oracle.filter.apply
        oracle.filter.apply = lambda g, a=apply, seen=given: (seen.append({**g}), a(g))[1]
        for _ in range(3):
            oracle.backward(*samples(9))
        again: Filter = make()
        for gradient in given:
            expected = again.apply(gradient)
        found = gradients(model)
        assert all(torch.allclose(found[n], g.to(found[n].dtype)) for n, g in expected.items())


def test_every_filter_is_a_function_of_what_was_released() -> None:
    check_every_filter_is_a_function_of_what_was_released()


def check_the_corrected_variance_is_that_of_the_noise() -> None:
    """AdamBC subtracts (sigma_t C_t / l)^2, schedules and an adaptive C included."""
    plan = private_plan(
        clipping="slaclip", steps=4, noise_schedule=(2.0, 1.0), clip_schedule=(3.0, 1.0)
    )
    model = smooth_net()
    oracle = sized_oracle(model, cross_entropy, plan, seed=0)
    _, stds = watched(oracle)
    optimizer, expected = AdamBC(model.parameters(), oracle, betas=(0.9, 0.5)), 0.0
    for _ in range(4):
        oracle.backward(*samples(9))
        optimizer.step()
        expected = (expected + stds[-1] ** 2) / 2
        noise = next(iter(optimizer.state.values()))["noise_sq"]
        assert float(noise) == pytest.approx(expected)
    assert len(set(stds)) == 4


def test_the_corrected_variance_is_that_of_the_noise() -> None:
    check_the_corrected_variance_is_that_of_the_noise()


class Momentum(DPSGD):
    """Keeps the length of the last released gradient; ``peeks``: counts physical batches, instead.

    The count is in a global iterator, which the engines cannot see.
    """

    peeks = False

    def __init__(self):
        super().__init__()
        self.length = torch.zeros((), dtype=torch.float64)

    def direction(self, grad, theta, lam):
        if self.peeks:
            next(CALLS)
        return grad(theta)

    def update(self, released):
        self.length = torch.stack([g.norm() for g in released.values()]).norm()

    def state_dict(self):
        calls = CALLS.__reduce__()[1][0] if self.peeks else 0
        return {"length": self.length + calls}

    def load_state_dict(self, state):
        self.length = state["length"]


CALLS = itertools.count()


def check_the_state_of_a_method_is_what_was_released() -> None:
    """A method's state is in the oracle's, a function of releases, or the step is refused."""
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), Momentum(), seed=0,
                          engine="functional")  # fmt: skip
    oracle.backward(*samples(9))
    released = torch.cat([g.flatten() for g in gradients(oracle.model).values()])
    assert float(oracle.state_dict()["parts"]["method/length"]) == pytest.approx(released.norm())
    resumed = sized_oracle(
        smooth_net(), cross_entropy, oracle.plan, Momentum(), seed=0, ledger=oracle.ledger
    )
    resumed.load_state_dict(oracle.state_dict())
    assert resumed.method.length == oracle.method.length
    peeking = Momentum()
    peeking.peeks = True
    oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), peeking, seed=0,
                          engine="functional")  # fmt: skip
    refused = False
    try:
        oracle.backward(*samples(9))
    except ValueError as error:
        refused = "changed while units were seen" in str(error)
    assert refused, "a state that counts the units"
    assert not len(oracle.ledger)


def test_the_state_of_a_method_is_what_was_released() -> None:
    check_the_state_of_a_method_is_what_was_released()


@pytest.mark.parametrize(("hook", "lacking"), [("update", "state_dict"), ("state_dict", "load")])
def test_a_state_that_would_be_lost_is_refused(hook: str, lacking: str) -> None:
    cls = type("Own", (DPSGD,), {hook: lambda self, *args: {}})
    with pytest.raises(ValueError, match=f"Own overrides {hook} and not {lacking}"):
        sized_oracle(smooth_net(), cross_entropy, private_plan(), cls())


def hooked(hook: str, action: Any) -> Method:
    """A method with ``action(method, *arguments)`` at the beginning of a hook."""

    class Hooked(DPSGD):
        name = "hooked"
        remembers = 1

        def __init__(self) -> None:
            super().__init__()
            self.steps = {"taken": [0]}

    def run(self, *arguments):
        action(self, *arguments)
        return getattr(DPSGD, hook)(self, *arguments)

    setattr(Hooked, hook, run)
    return Hooked()


HOOKS = ["at", "lam_at", "ascent"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_must_not_change_the_method(hook: str) -> None:
    """They run in ``per_sample`` too, which would otherwise take a part of a step."""

    def count(method, *arguments):
        method.steps["taken"][0] += 1

    for name in ("backward", "per_sample"):
        oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), hooked(hook, count))
        with pytest.raises(ValueError, match=rf"hooked\.{hook} has changed the method's steps"):
            getattr(oracle, name)(*samples(9))
        assert not len(oracle.ledger)


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_writes_to_is_neither_theta_nor_what_was_released(hook: str) -> None:
    def overwrite(method, *arguments):
        for given in arguments:
            trees = [given]
            if isinstance(given, History):
                trees = [given.theta, *given.gradients, *given.parameters]
            for tree in trees:
                for tensor in tree.values() if isinstance(tree, dict) else ():
                    tensor.zero_()

    runs = []
    for method in (hooked(hook, overwrite), hooked(hook, lambda *arguments: None)):
        oracle = sized_oracle(smooth_net(), cross_entropy, private_plan(), method, seed=1)
        for seed in range(2):
            oracle.backward(*samples(9, seed=seed))
            oracle.per_sample(*samples(3))
            oracle.lam()
        state = oracle.state_dict()["parts"]
        runs.append(
            [*oracle.model.parameters(), *gradients(oracle.model).values(), *state.values()]
        )
    for written, ordinary in zip(*runs, strict=True):
        assert torch.equal(written, ordinary)


def without_noise(original):
    """The sum before the noise reaches the filter and the history."""

    def add_noise(query, terms):
        sums = {n: s.clone() for n, s in query.sums.items()}  # noise is written over them
        original(query, terms)
        return {n: s / query.divisor for n, s in sums.items()}

    return add_noise


def adds_something(original):
    """A filter that adds what it was not given."""

    def apply(self, gradient):
        return {n: g + torch.randn_like(g) for n, g in original(self, gradient).items()}

    return apply


MISTAKES = {
    "a history of gradients without noise": Mistake(
        check_parts_see_what_was_released, mechanism, "add_noise", without_noise
    ),
    "a filter before the noise": Mistake(
        check_a_filter_sees_what_was_released, mechanism, "add_noise", without_noise
    ),
    "a method's state that follows the units": Mistake(
        check_the_state_of_a_method_is_what_was_released, mechanism, "check_method_state",
        lambda original: lambda step: None,
    ),
    "a Kalman step that adds what it was not given": Mistake(
        check_every_filter_is_a_function_of_what_was_released, KalmanStep, "apply", adds_something
    ),
    "a low-pass filter that adds what it was not given": Mistake(
        check_every_filter_is_a_function_of_what_was_released, FILTERS.load("doppler"), "apply",
        adds_something,
    ),
    "the first step's variance corrected at every step": Mistake(
        check_the_corrected_variance_is_that_of_the_noise, PrivateGradientOracle, "noise_std",
        lambda original: property(lambda self: self.plan.noise_multiplier / self.plan.batch_size),
    ),
}  # fmt: skip


@catches(MISTAKES)
def test_the_check_catches(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.catch(monkeypatch)
