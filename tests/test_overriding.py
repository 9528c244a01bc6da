"""What a user overrides in a method, clipping, filter or noise is used by every engine, or refused.

The reference is a loop with ``torch.autograd`` that calls the method's own parts. A part that an
engine cannot call is refused; none is silently replaced by that of the class below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbam import PrivateGradientOracle
from dpbam.contenders.clippings import (
    NormalisedClipping,
    PSACClipping,
    QuantileClipping,
    SlackClipping,
)
from dpbam.contenders.disk import DiSK, KalmanStep
from dpbam.engines import UnsupportedModelError
from dpbam.errors import ArgumentTypeError
from dpbam.filters import Exponential
from dpbam.methods import (
    BAM,
    DPSAT,
    DPSGD,
    SAM,
    SGD,
    Ascended,
    History,
    Method,
    Penalised,
    computed_as,
    form_of,
)
from dpbam.params import Params, add
from dpbam.privacy.clipping import AutomaticClipping, Clipping, FlatClipping, PerLayerClipping
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness, SecureRandomness
from dpbam.privacy.secure_noise import SecureGaussianNoise
from support import (
    cross_entropy,
    flat,
    gradients,
    in_turn,
    private_plan,
    quiet_plan,
    samples,
    sized_oracle,
    smooth_net,
)

#: auto falls back to an engine that can call the override, and says so
pytestmark = pytest.mark.filterwarnings("ignore:the fused engine does not support this")
L = 10  # the expected batch size of the plans here
LAM = 0.3
ENGINES = ["fused", "functional", "loop", "auto"]
BASES: dict[str, tuple[type[Method], dict[str, Any]]] = {
    "dp-sgd": (DPSGD, {}),
    "dp-sat": (DPSAT, {"lam": LAM}),
    "bam": (BAM, {"lam": LAM}),
    "bam-exact": (BAM, {"lam": LAM, "exact": True}),
    "bam-zero": (BAM, {"lam": 0.0}),
    "sgd": (SGD, {}),
    "sam": (SAM, {"lam": LAM}),
    "disk": (DiSK, {"kappa": 0.7}),
    "disk-two-gradients": (DiSK, {"kappa": 0.7, "gamma": 0.2}),
    "disk-bam": (DiSK, {"kappa": 0.7, "inner": BAM(LAM)}),
    "disk-bam-exact": (DiSK, {"kappa": 0.7, "inner": BAM(LAM, exact=True)}),
}


def negative(direction: Callable[..., Params], *args: Any) -> Params:
    return {name: -d for name, d in direction(*args).items()}


def by_subclass(base: type[Method], options: dict[str, Any]) -> Method:
    class Neg(base):
        def direction(self, grad, theta, lam):
            return negative(super().direction, grad, theta, lam)

    return Neg(**options)


def by_mixin(base: type[Method], options: dict[str, Any]) -> Method:
    class Mixin:
        def direction(self, grad, theta, lam):
            return negative(super().direction, grad, theta, lam)

    return type("Mixed", (Mixin, base), {})(**options)


def by_wraps(base: type[Method], options: dict[str, Any]) -> Method:
    """``functools.wraps`` copies the attributes of a function, a declaration among them."""

    class Wrapped(base):
        @functools.wraps(base.direction)
        def direction(self, grad, theta, lam):
            return negative(super().direction, grad, theta, lam)

    return Wrapped(**options)


def by_partial(base: type[Method], options: dict[str, Any]) -> Method:
    class Partial(base):
        def scaled(self, factor, grad, theta, lam):
            return {n: factor * d for n, d in super().direction(grad, theta, lam).items()}

        direction = functools.partialmethod(scaled, -1.0)

    return Partial(**options)


def by_grandchild(base: type[Method], options: dict[str, Any]) -> Method:
    """A class between that overrides ``__init__`` alone, and one below it with the direction."""

    class Between(base):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)

    return by_subclass(Between, options)


def by_instance(base: type[Method], options: dict[str, Any]) -> Method:
    method = base(**options)
    method.direction = functools.partial(negative, method.direction)  # type: ignore[method-assign]
    return method


def by_another_object(base: type[Method], options: dict[str, Any]) -> Method:
    """The bound method of another object, which declares a form of its own."""
    method = base(**options)
    method.direction = by_subclass(base, options).direction  # type: ignore[method-assign]
    return method


WAYS = {f.__name__: f for f in (
    by_subclass, by_mixin, by_wraps, by_partial, by_grandchild, by_instance, by_another_object,
)}  # fmt: skip


def autograd(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Params], Params]:
    """theta -> the gradient of one record's loss, by torch.func.grad on that record alone."""

    def value(theta: Params) -> Tensor:
        output = torch.func.functional_call(model, theta, (x[None],))
        return nn.functional.cross_entropy(output, y[None])

    return torch.func.grad(value)


def after_two_steps(method: Method, engine: str, **options: Any) -> Tensor:
    """What the second step sums: the method has a history, a shift and a previous gradient."""
    model, (x, y) = smooth_net(), samples(5)
    oracle = sized_oracle(model, cross_entropy, quiet_plan(), method, engine=engine, **options)
    oracle.backward(x.clone(), y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03
    filtered, oracle.filter = oracle.filter, None  # the sum itself
    oracle.backward(x.clone(), y)
    oracle.filter = filtered
    return flat(gradients(model))


def by_the_loop(method: Method) -> Tensor:
    """The same, with the method's own parts called one after the other."""
    model, (x, y) = smooth_net(), samples(5)
    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    first = summed(method, model, theta, x, y, None)
    moved = {n: t + 0.03 for n, t in theta.items()}
    now = method.at(History((first,), (theta,), moved))
    return flat(summed(now, model, moved, x, y, first))


def summed(
    method: Method, model: nn.Module, theta: Params, x: Tensor, y: Tensor, previous: Params | None
) -> Params:
    lam = method.lam_at(0, theta)

    def mean(direction: Callable[..., Params], at: Params) -> Params:
        each = [direction(autograd(model, a, b), at, lam) for a, b in zip(x, y, strict=True)]
        return {n: torch.stack([d[n] for d in each]).sum(0) / L for n in each[0]}

    shift = method.ascent(lam, previous, lambda: mean(lambda grad, at, lam: grad(at), theta))
    return mean(method.direction, theta if shift is None else add(theta, shift))


# --- a direction of one's own


@pytest.mark.parametrize(
    ("base", "way", "engine"), in_turn([(b, w) for b in BASES for w in WAYS], ENGINES)
)
def test_an_overridden_direction_is_used_or_refused(base: str, way: str, engine: str) -> None:
    cls, options = BASES[base]
    method = WAYS[way](cls, options)
    assert form_of(method, LAM) is None
    try:
        found = after_two_steps(method, engine)
    except UnsupportedModelError as refusal:
        jvp = "computed_as" in str(refusal)
        assert engine == "fused" or (engine == "loop" and base.endswith("exact") and jvp)
        return
    assert torch.allclose(found, by_the_loop(method), atol=1e-12)
    assert float(found @ after_two_steps(cls(**options), "functional")) < 0  # not the base's


@pytest.mark.parametrize(("base", "engine"), in_turn(list(BASES), ENGINES))
def test_every_method_agrees_with_the_loop(base: str, engine: str) -> None:
    cls, options = BASES[base]
    method = cls(**options)
    if engine == "fused" and base == "disk-two-gradients":
        with pytest.raises(UnsupportedModelError, match="computed_as"):
            after_two_steps(method, engine)
        return
    assert torch.allclose(after_two_steps(method, engine), by_the_loop(method), atol=1e-12)


@pytest.mark.parametrize("inner", ["dp-sgd", "bam", "bam-exact"])
@pytest.mark.parametrize("gamma", [None, 0.2])
@pytest.mark.parametrize("engine", ["functional", "auto"])
def test_a_direction_inside_disk_is_used(inner: str, gamma: float | None, engine: str) -> None:
    method = DiSK(0.7, gamma, by_subclass(*BASES[inner]))
    assert torch.allclose(after_two_steps(method, engine), by_the_loop(method), atol=1e-12)
    with pytest.raises(UnsupportedModelError, match="computed_as"):
        after_two_steps(method, "fused")


def test_a_patched_class_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DPSGD.direction
    monkeypatch.setattr(DPSGD, "direction", lambda s, *args: negative(right, s, *args))
    assert form_of(DPSGD(), 0.0) is None
    monkeypatch.undo()
    assert form_of(DPSGD(), 0.0) == Penalised(0.0)


@pytest.mark.parametrize("base", BASES)
def test_a_subclass_with_the_same_direction_keeps_the_form(base: str) -> None:
    """Overriding ``__init__``, ``lam_at``, ``ascent`` or a name leaves the fused engine in use."""
    cls, options = BASES[base]

    class Other(cls):
        name = "other"
        remembers = cls.remembers

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)

        def lam_at(self, step, theta):
            return 2 * super().lam_at(step, theta)

        def ascent(self, lam, previous, batch_gradient):
            shift = super().ascent(lam, previous, batch_gradient)
            return None if shift is None else {n: -s for n, s in shift.items()}

    method = Other(**options)
    assert form_of(method, LAM) == form_of(cls(**options), LAM)
    engine = "functional" if base == "disk-two-gradients" else "fused"
    assert torch.allclose(after_two_steps(method, engine), by_the_loop(method), atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", [Penalised, Ascended])
def test_a_form_of_ones_own_is_computed(engine: str, form: Any) -> None:
    class Twice(BAM):
        @computed_as(lambda method, lam: form(2 * lam))
        def direction(self, grad, theta, lam):
            return super().direction(grad, theta, 2 * lam)

    method = Twice(LAM, exact=form is Penalised)
    assert torch.allclose(after_two_steps(method, engine), by_the_loop(method), atol=1e-12)


# --- other parts of a method


def test_lambda_of_the_method_inside_disk_is_its_own() -> None:
    class Doubled(BAM):
        def lam_at(self, step, theta):
            return 2 * super().lam_at(step, theta)

    assert DiSK(inner=Doubled(LAM)).lam_at(0, {}) == 2 * LAM


@pytest.mark.parametrize("part", ["ascent", "at", "filter"])
def test_disk_refuses_a_method_of_which_it_would_ignore_a_part(part: str) -> None:
    cls = type("Own", (DPSGD,), {part: lambda self, *args: None})
    with pytest.raises(ValueError, match=f"Own cannot be inside it .it has its own {part}"):
        DiSK(inner=cls())
    method = DPSGD()
    setattr(method, part, lambda *args: None)
    with pytest.raises(ValueError, match=part):
        DiSK(inner=method)


@pytest.mark.parametrize("part", ["ascent", "at"])
def test_a_part_that_would_get_nothing_is_refused(part: str) -> None:
    own = {part: lambda self, *args: None if part == "ascent" else self}
    for cls in (type("Own", (DPSGD,), own), type("Own", (DPSAT,), own)):
        with pytest.raises(ValueError, match=f"Own overrides {part} and does not declare remem"):
            sized_oracle(smooth_net(), cross_entropy, quiet_plan(), cls())
    declared = type("Own", (DPSGD,), {**own, "remembers": 1})
    sized_oracle(smooth_net(), cross_entropy, quiet_plan(), declared())


class Switched(DPSGD):
    """Another method from the second step on."""

    remembers = 1
    later: Method = BAM(LAM)

    def at(self, history):
        return self.later if history.gradients else self


@pytest.mark.parametrize("engine", ENGINES)
def test_the_method_of_a_step_has_its_own_lambda_and_direction(engine: str) -> None:
    assert torch.allclose(
        after_two_steps(Switched(), engine), after_two_steps(BAM(LAM), engine), atol=1e-12
    )


class LongMemory(DPSAT):
    remembers = 2


@pytest.mark.parametrize(
    ("later", "needs"),
    [(LongMemory(LAM), "remembers"), (DiSK(), "filter"), (SAM(LAM), "private")],
)
def test_a_method_of_a_step_with_other_needs_is_refused(later: Method, needs: str) -> None:
    method = type("Needy", (Switched,), {"later": later})()
    with pytest.raises(ValueError, match=f"Needy.at returned {later.name}, whose {needs} "):
        after_two_steps(method, "functional")


def test_a_negative_lambda_of_ones_own_is_refused() -> None:
    cls = type("Odd", (BAM,), {"lam_at": lambda self, step, theta: -0.5})
    for engine in ENGINES:
        with pytest.raises(ValueError, match="lam of Odd at step 0"):
            after_two_steps(cls(LAM, exact=True), engine)


def test_a_subclass_has_a_name_of_its_own() -> None:
    assert (by_subclass(DPSGD, {}).name, DPSGD.name) == ("Neg", "dp-sgd")
    assert repr(by_subclass(BAM, {"lam": 0.1})) == "Neg(lam=0.1, exact=False)"


# --- clipping, filter, noise

CLIPPINGS: dict[str, type[Clipping]] = {
    cls.__name__: cls
    for cls in (
        FlatClipping, AutomaticClipping, PerLayerClipping, NormalisedClipping, PSACClipping,
        QuantileClipping, SlackClipping,
    )
}  # fmt: skip


class Used(Exception):  # noqa: N818
    """Raised by a part that is overridden."""


def raising(*args: Any, **options: Any) -> Any:
    raise Used


@pytest.mark.parametrize("part", ["groups", "scales", "factors", "extra", "update"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_an_overridden_part_of_a_clipping_is_used_or_refused(clipping: str, part: str) -> None:
    cls = CLIPPINGS[clipping]
    own = type("Own", (cls,), {part: raising})(0.3)
    model, (x, y) = smooth_net(), samples(5)
    refused = not own.coordinates and part in ("extra", "update")
    said = "never be called" if refused else None
    with pytest.raises(ValueError if refused else Used, match=said):
        sized_oracle(
            model, cross_entropy, private_plan(clip_norm=0.3), clipping=own, engine="functional"
        ).backward(x, y)


class Empty(Exponential):
    """A filter that is false in a condition, as one with a length of 0 is."""

    apply = raising

    def __len__(self) -> int:
        return 0


class Calm(KalmanStep):
    apply = raising


def test_an_overridden_filter_is_used() -> None:
    model, (x, y) = smooth_net(), samples(5)
    disk = type("Own", (DiSK,), {"filter": lambda self: Calm(0.5)})()
    for options in ({"filter": Empty()}, {"method": disk}):
        with pytest.raises(Used):
            sized_oracle(model, cross_entropy, quiet_plan(), **options).backward(x, y)


@pytest.mark.parametrize("part", ["add", "charged"])
@pytest.mark.parametrize("base", [GaussianNoise, SecureGaussianNoise])
def test_an_overridden_part_of_a_noise_is_used(base: type, part: str) -> None:
    model, (x, y) = smooth_net(), samples(5)
    randomness = SecureRandomness() if base is SecureGaussianNoise else Randomness(0)
    noise = type("Own", (base,), {part: raising})(randomness)
    with pytest.raises(Used):
        sized_oracle(model, cross_entropy, private_plan(), noise=noise).backward(x, y)


class WithoutLambda(DPSGD):
    def direction(self, grad, theta):  # type: ignore[override]
        return grad(theta)


class WithoutStep(FlatClipping):
    def at(self):  # type: ignore[override]
        return super().at(0)


class WithoutGradient(Exponential):
    def apply(self):  # type: ignore[override]
        return {}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"method": WithoutLambda()}, r"WithoutLambda.direction cannot .*\(grad, theta, lam\)"),
        ({"clipping": WithoutStep(1.0)}, r"WithoutStep.at cannot .* define at\(self, step, phi\)"),
        ({"filter": WithoutGradient()}, r"define apply\(self, gradient\)"),
    ],
)
def test_a_part_with_another_signature_is_refused_by_name(
    parts: dict[str, Any], words: str
) -> None:
    """Before, the first step ended in a TypeError, which the command line called a bug."""
    with pytest.raises(ArgumentTypeError, match=words):
        PrivateGradientOracle(smooth_net(), cross_entropy, private_plan(), **parts)
