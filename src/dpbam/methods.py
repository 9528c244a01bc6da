"""Methods: what a unit's direction is. The paper's Algorithm 2 and its relatives.

Notation, as in the paper: theta the parameters, g_i = grad L_i(theta) the gradient of one unit of
privacy (the mean over its augmented views, or over a patient's records, where it has several),
lambda the weight of the regulariser. A method sees one unit at a time and never the batch, so
clipping its result to C bounds the sum's sensitivity by C: every method costs what DP-SGD costs.

What an engine may replace. ``direction`` is the definition of a method, and an engine calls it,
unless that very function declares a form that the engine computes by itself
(:func:`computed_as`). The declaration belongs to the function and to nothing else: a subclass, a
mixin, an instance attribute or a patch that puts another ``direction`` in its place has none, and
what was put there is called, or refused by an engine that cannot call it.

=================  =====================================================  ====================
method             direction of unit i                                    where in the paper
=================  =====================================================  ====================
``DPSGD``          g_i(theta)                                             Algorithm 1
``DPSAT``          g_i(theta + lambda u), u = previous private gradient   Section 2, App. B.1
``BAM``            g_i(theta + lambda g_i / |g_i|)                        Algorithm 2, Eq. 12
``BAM(exact)``     g_i + lambda H_i g_i / |g_i|                           Eq. 11
``DiSK``           a d_i(theta + gamma v) + (1 - a) d_i(theta),           Zhang et al. 2025
                   v = theta_t - theta_(t-1), d_i of another method
``SGD``, ``SAM``   references without privacy                             App. B.2
=================  =====================================================  ====================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dpbam import _validate
from dpbam.errors import ArgumentError
from dpbam.filters import Filter

if TYPE_CHECKING:  # torch is imported where it computes: reading a configuration stays fast
    from dpbam.params import Params

GradFn = Callable[["Params"], "Params"]
Schedule = Callable[[int, "Params"], float]
SHARE = 1.5e-4  # BAM's default: lambda over the norm of the trained parameters


@dataclass(frozen=True)
class Relative:
    """A schedule: lambda(t) = share |theta_t|, with the norm over the trained parameters.

    A net whose layers are normalised computes the same at theta and at c theta, and its gradient is
    1/c as long: what a step of length lambda changes depends on lambda / |theta|. ``python
    tools/choosing.py shares`` prints which shares were best on which nets. theta is public: initial
    weights and released gradients.

    Example:
        >>> import torch
        >>> Relative(0.01)(0, {"w": torch.tensor([3.0, 4.0])})
        0.05
    """

    share: float

    def __post_init__(self) -> None:
        _validate.non_negative("share", self.share)

    def __call__(self, step: int, theta: Params) -> float:
        from dpbam.params import norm

        return self.share * float(norm(theta).detach())


@dataclass(frozen=True)
class WarmUp:
    """A schedule: lambda rises linearly to its value over the first ``steps`` steps.

    Example:
        >>> [WarmUp(0.02, steps=4)(step, {}) for step in (0, 1, 3, 9)]
        [0.005, 0.01, 0.02, 0.02]
    """

    lam: float | Schedule
    steps: int

    def __call__(self, step: int, theta: Params) -> float:
        lam = self.lam(step, theta) if callable(self.lam) else self.lam
        return lam * min(1.0, (step + 1) / max(1, self.steps))


@dataclass(frozen=True)
class History:
    """What earlier steps have made public; a method may use all of it.

    Attributes:
        gradients: the released gradients of earlier steps, the latest last.
        parameters: theta at which each of them was taken.
        theta: the present parameters.
    """

    gradients: tuple[Params, ...]
    parameters: tuple[Params, ...]
    theta: Params

    @property
    def previous(self) -> Params | None:
        """The latest released gradient; None before the first, or where none is remembered."""
        return self.gradients[-1] if self.gradients else None


_BY_SHARE = Relative(SHARE)


@dataclass(frozen=True)
class Penalised:
    """The form of a direction that is the exact gradient of L_i + penalty |g_i|; g_i itself at 0.

    Example:
        >>> Penalised(0.3).weight
        0.3
    """

    penalty: float

    def __post_init__(self) -> None:
        _validate.non_negative("penalty", self.penalty)

    @property
    def weight(self) -> float:
        """The lambda of the regulariser lambda |g_i|."""
        return self.penalty


@dataclass(frozen=True)
class Ascended:
    """The form of a direction that is g_i(theta + step g_i / |g_i|).

    Example:
        >>> Ascended(0.3).weight  # of the regulariser, to first order
        0.3
    """

    step: float

    def __post_init__(self) -> None:
        _validate.non_negative("step", self.step)

    @property
    def weight(self) -> float:
        """The lambda of the regulariser lambda |g_i|, to first order."""
        return self.step


Form = Penalised | Ascended
_Direction = TypeVar("_Direction", bound=Callable[..., Any])


def computed_as(form: Callable[[Any, float], Form | None]) -> Callable[[_Direction], _Direction]:
    """Declare the form of the ``direction`` below, so that an engine need not call it.

    The author of the function vouches for it: the fused and the loop engine compute the form, the
    functional engine calls the function, and the results must agree.

    Args:
        form: (method, lambda) -> the form at that lambda, or None where there is none.

    Example: twice BAM's penalty.
        >>> class Twice(BAM):
        ...     @computed_as(lambda method, lam: Penalised(2 * lam))
        ...     def direction(self, grad, theta, lam):
        ...         return super().direction(grad, theta, 2 * lam)
        >>> form_of(Twice(0.1, exact=True), 0.1)
        Penalised(penalty=0.2)
    """

    def declare(direction: _Direction) -> _Direction:
        # the function is named, since functools.wraps copies attributes to another one
        direction._declared_form = (direction, form)  # type: ignore[attr-defined]
        return direction

    return declare


def form_of(method: Method, lam: float) -> Form | None:
    """Return the form that ``method.direction`` declares at ``lam``; None: it has to be called.

    Guarantee: the form is that of the function that ``method.direction(...)`` would run.

    Assumptions: the function's author declared it rightly.

    Proof: the declaration names its function, which must be the one that is bound to ``method``.

    Example:
        >>> class Negative(DPSGD):
        ...     def direction(self, grad, theta, lam):
        ...         return {name: -g for name, g in grad(theta).items()}
        >>> form_of(DPSGD(), 0.0), form_of(Negative(), 0.0)
        (Penalised(penalty=0.0), None)
    """
    bound = method.direction
    function = getattr(bound, "__func__", None)
    if function is None or getattr(bound, "__self__", None) is not method:
        return None
    declared, form = getattr(function, "_declared_form", (None, None))
    return form(method, lam) if form is not None and declared is function else None


class Method(ABC):
    """Defines a unit's direction. Subclass it and write :meth:`direction` to make your own.

    Args:
        lam: the paper's lambda >= 0, or a schedule: a function of the step (from 0) and of the
            trained parameters, both of which are public.

    Example: a mixture of the plain and the perturbed gradient.
        >>> from dpbam.params import add, unit_vector
        >>> class Mixture(Method):
        ...     name = "mixture"
        ...     def direction(self, grad, theta, lam):
        ...         plain = grad(theta)
        ...         perturbed = grad(add(theta, unit_vector(plain), lam))
        ...         return {k: (plain[k] + perturbed[k]) / 2 for k in plain}
        >>> Mixture(lam=0.02).lam_at(0, {})
        0.02
    """

    name: ClassVar[str] = "method"  # of a subclass: that of the class, unless it gives another
    private: ClassVar[bool] = True  # False: uses the batch without noise; a reference only
    remembers: ClassVar[int] = 0  # how many earlier releases :meth:`at` and :meth:`ascent` get

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):  # a record must not name the class that it was derived from
            cls.name = cls.__name__

    def __init__(self, lam: float | Schedule = 0.0) -> None:
        if not callable(lam):
            _validate.non_negative("lam", lam)
        self.lam = lam

    def lam_at(self, step: int, theta: Params) -> float:
        """Return lambda at ``step`` and ``theta``: the constant, or the schedule's value."""
        if callable(self.lam):
            return _validate.non_negative(f"lam at step {step}", self.lam(step, theta))
        return float(self.lam)

    def ascent(
        self, lam: float, previous: Params | None, batch_gradient: Callable[[], Params]
    ) -> Params | None:
        """Return a shift of theta for the whole logical batch, or None.

        It must be a function of what was released before (``previous``, the last private gradient).
        Privacy does not protect ``batch_gradient``: it is for methods with ``private = False``. A
        class that overrides this says how many releases it ``remembers``; with 0, ``previous`` is
        None.
        """
        return None

    def at(self, history: History) -> Method:
        """Return this step's method, which may depend on public history; by default itself.

        A class that overrides this says how many releases it ``remembers``, 0 included. It runs in
        :meth:`~dpbam.oracle.PrivateGradientOracle.per_sample` too, so it must not change ``self``.
        """
        return self

    def filter(self) -> Filter | None:
        """Return a new filter of the released gradient that belongs to the method, if any."""
        return None

    def update(self, released: Params) -> None:  # noqa: B027
        """Adapt to the released gradient of a step, when it is on the ledger: public, a copy.

        This is the only place where a method may change its state. A class that overrides it has
        the state in :meth:`state_dict` and :meth:`load_state_dict`, so that a resumed run continues
        with it; a state that changes while units are seen is refused before the step is charged.
        """

    def state_dict(self) -> Params:
        """Return what :meth:`update` has changed, as tensors by name, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Params) -> None:  # noqa: B027
        """Resume from :meth:`state_dict`."""

    @abstractmethod
    def direction(self, grad: GradFn, theta: Params, lam: float) -> Params:
        """Return the direction of one unit, given the gradient function of its own loss.

        Runs under ``torch.func.vmap``: use torch operations, no Python branches on values. The
        result has the names and shapes of theta, which is not to be changed. An engine that has no
        per-sample gradients computes what :func:`computed_as` declares, and refuses the rest.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lam={self.lam!r})"


class DPSGD(Method):
    """DP-SGD: the plain gradient g_i.

    Example:
        >>> DPSGD().direction(lambda theta: {"w": 2 * theta["w"]}, {"w": 3.0}, lam=0.0)
        {'w': 6.0}
    """

    name = "dp-sgd"

    def __init__(self) -> None:
        super().__init__(lam=0.0)

    @computed_as(lambda method, lam: Penalised(0.0))
    def direction(self, grad: GradFn, theta: Params, lam: float) -> Params:
        return grad(theta)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class DPSAT(Method):
    """DP-SAT: ascend once for the whole batch along the previous private gradient, then DP-SGD.

    After Park et al. 2023; compared with their code (JinseongP/DPSAT, ``DPSAT``): the same. The
    ascent direction was released with noise at the step before, so it costs no privacy. The first
    step has none and does not ascend.

    Example:
        >>> import torch
        >>> DPSAT(lam=0.5).ascent(0.5, {"w": torch.tensor([0.0, 2.0])}, dict)
        {'w': tensor([0.0000, 0.5000])}
    """

    name = "dp-sat"
    remembers = 1

    def ascent(
        self, lam: float, previous: Params | None, batch_gradient: Callable[[], Params]
    ) -> Params | None:
        """Return lambda g_priv(t-1) / |g_priv(t-1)|."""
        if previous is None or lam == 0:
            return None
        from dpbam.params import unit_vector

        return {name: lam * u for name, u in unit_vector(previous).items()}

    @computed_as(lambda method, lam: Penalised(0.0))
    def direction(self, grad: GradFn, theta: Params, lam: float) -> Params:
        return grad(theta)  # the oracle has shifted theta


class BAM(Method):
    """Bias-aware minimisation: the gradient of L_i + lambda |g_i|, approximately or exactly.

    Args:
        lam: the weight lambda of the regulariser, or a schedule; by default
            :class:`Relative` to |theta|.
        exact: False: the paper's ascent step, exact to first order in lambda (Eq. 12).
            True: with the Hessian-vector product, by forward-over-reverse (Eq. 11).

    Where g_i = 0 the norm's subgradient is 0: no perturbation and no NaN.

    Example:
        >>> import torch
        >>> grad = lambda theta: {"w": theta["w"] ** 2}  # L = w^3/3: L + lam |L'| = w^3/3 + lam w^2
        >>> theta = {"w": torch.tensor(3.0)}
        >>> BAM(lam=0.1, exact=True).direction(grad, theta, 0.1)["w"]  # 9 + 0.1 * 6
        tensor(9.6000)
        >>> BAM(lam=0.1).direction(grad, theta, 0.1)["w"]  # (3 + 0.1)^2
        tensor(9.6100)
    """

    name = "bam"

    def __init__(self, lam: float | Schedule = _BY_SHARE, *, exact: bool = False) -> None:
        super().__init__(lam)
        self.exact = exact

    @computed_as(lambda method, lam: Penalised(lam) if method.exact or lam == 0 else Ascended(lam))
    def direction(self, grad: GradFn, theta: Params, lam: float) -> Params:
        from torch.func import jvp

        from dpbam.params import add, unit_vector

        u = unit_vector(grad(theta))  # u = g_i / |g_i|
        if not self.exact:
            return grad(add(theta, u, lam))  # g_i(theta + lambda u)
        g, hvp = jvp(grad, (theta,), (u,))[:2]  # g_i and H_i u in one sweep
        return add(g, hvp, lam)  # g_i + lambda H_i u

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lam={self.lam!r}, exact={self.exact})"


class SGD(DPSGD):
    """SGD, without privacy: it needs ``PrivacyPlan.non_private``."""

    name = "sgd"
    private = False


class SAM(Method):
    """Sharpness-aware minimisation, without privacy: ascend along the current batch gradient.

    It is the reference for the ascent directions of DP-SAT and BAM (App. B.2).
    """

    name = "sam"
    private = False
    remembers = 0

    def ascent(
        self, lam: float, previous: Params | None, batch_gradient: Callable[[], Params]
    ) -> Params | None:
        """Return lambda g_hat / |g_hat|, g_hat the batch gradient without noise."""
        from dpbam.params import unit_vector

        return {name: lam * u for name, u in unit_vector(batch_gradient()).items()}

    @computed_as(lambda method, lam: Penalised(0.0))
    def direction(self, grad: GradFn, theta: Params, lam: float) -> Params:
        return grad(theta)  # the oracle has shifted theta


def overrides(method: Method, hook: str) -> bool:
    """Whether ``method`` has a ``part`` other than that of :class:`Method`.

    Example:
        >>> overrides(DPSAT(0.1), "ascent"), overrides(DPSGD(), "ascent")
        (True, False)
    """
    return _function(method, hook) is not getattr(Method, hook)


def _function(method: Method, hook: str) -> object:
    """Return the function that ``method.part(...)`` runs, without the object it is bound to."""
    bound = getattr(method, hook)
    return getattr(bound, "__func__", bound)


def check_declared(method: Method) -> None:
    """Refuse a method that overrides what it is not given the values for.

    Guarantee: an ``ascent`` that never gets a previous gradient, or an ``at`` without a history, is
    what the author of it asked for.

    Example:
        >>> class Ascending(DPSGD):
        ...     def ascent(self, lam, previous, batch_gradient):
        ...         return previous
        >>> check_declared(Ascending())
        Traceback (most recent call last):
        ...
        dpbam.errors.ArgumentError: Ascending overrides ascent and does not declare ...
    """
    for hook in ("ascent", "at"):
        if overrides(method, hook) and not _declares_next_to(method, hook, "remembers"):
            raise ArgumentError(
                f"{type(method).__name__} overrides {hook} and does not declare remembers: set "
                "remembers next to it, the number of earlier releases that it uses, else it would "
                "never get any"
            )

    for hook, other in (("update", "state_dict"), ("state_dict", "load_state_dict")):
        if overrides(method, hook) and not overrides(method, other):
            raise ArgumentError(
                f"{type(method).__name__} overrides {hook} and not {other}: without it a resumed "
                "run would continue with another state than it had"
            )


def _declares_next_to(method: Method, hook: str, name: str) -> bool:
    """Whether ``name`` is set where ``part`` is, or by a class derived from that one."""
    places = [vars(method), *map(vars, type(method).__mro__)]
    first = {key: next(i for i, place in enumerate(places) if key in place) for key in (hook, name)}
    return first[name] <= first[hook]


def check_needs(method: Method, now: Method) -> None:
    """Refuse the method of a step that has other needs than the one the oracle was made with.

    The filter, the previous gradient and the history of a training are those of ``method``; one
    that asks for others would not get them.
    """
    if now is method:
        return
    check_declared(now)
    needs = {
        "remembers": now.remembers > method.remembers,
        "private": method.private and not now.private,
        "filter": _function(now, "filter") is not _function(method, "filter"),
    }
    if wanting := [name for name, missing in needs.items() if missing]:
        raise ArgumentError(
            f"{method.name}.at returned {now.name}, whose {' and '.join(wanting)} the oracle was "
            f"not made with: give {method.name} the same"
        )
