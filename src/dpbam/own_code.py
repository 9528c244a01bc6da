"""Code of the user's that units pass through: what is measured of it, and what follows a refusal.

A clipping, a statistic and an augmentation of the user's own must compute each unit's result from
that unit alone, and keep nothing of it. Neither can be proved by calls from outside:

=====================  ============================================================================
measured               how
=====================  ============================================================================
dependence on others   the same units are computed again in other batches (:func:`other_batches`):
                       every other unit, two halves at random, one unit repeatedly
what is kept           attributes before and after the units (:func:`attributes_of`); of a method,
                       :func:`dpbam.engines.state.fixed_method`
=====================  ============================================================================

An object that was refused, or a copy of it, is refused in every later step: it may hold what it
took, and what it mixed might pass in another batch.

This is a search for mistakes, and no proof. What is continuous in the other units, such as a mean,
is found at the first step. What is discrete, such as "more than 13 norms exceed 1.7", is found
where one of these batches has another outcome than the whole.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbam.catalogue import is_built_in
from dpbam.errors import ArgumentError, PlanViolationError
from dpbam.params import digest

_ALIKE = 1e-5  # relative: vector instructions may round the last of a row differently
_ALIKE_AT_ZERO = 1e-6  # of what a unit's values may be
_LEVELS = 4  # of objects inside one another
_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
_REFUSED = "_dpbam_refused"  # an attribute, so that a copy has it, too


class OwnCode:
    """A component of the user's at one step: whether it mixes units, and what it keeps of them.

    Of dpbam's own components nothing is measured, unless a function of them was replaced.

    Guarantee: a component that was refused is refused in all later steps, by any oracle, and so is
    one that has kept something in its attributes in a step that failed for another reason.

    Assumptions: a copy is one by ``copy`` or ``pickle``; what is kept is in the attributes that
    :func:`attributes_of` compares.

    Proof: the mark is an attribute of the component; one that cannot have any is refused.

    Args:
        component: the object.
    """

    def __init__(self, component: object) -> None:
        check_not_refused(component)
        self.measured = not is_built_in(type(component)) or _replaces_functions(component)
        self._component = component
        self._before = attributes_of(component) if self.measured else None
        self._mixed: list[Tensor] = []  # scalars on the device
        if self.measured and not hasattr(component, "__dict__"):
            raise ArgumentError(
                f"{type(component).__name__} has __slots__ alone, so that nothing can be seen of "
                "what it keeps: leave __slots__ out"
            )

    def other_batches(self, norms: Tensor) -> list[Tensor]:
        """Return :func:`other_batches` of units with norms [G, U]; none of a single unit.

        Of dpbam's own components there are none.
        """
        units = norms.shape[1]
        if not self.measured or units < 2:
            return []
        sizes = torch.linalg.vector_norm(norms.nan_to_num(0.0, 0.0, 0.0), dim=0)  # [U]
        return other_batches(units, norms.device, sizes)

    def compare(self, together: Tensor, apart: Tensor | None, bound: float) -> None:
        """Note whether [K, U] values of units are others in another batch.

        ``bound`` is what a unit's values may be, to which small differences are relative.
        """
        self._mixed.append(differs(together, apart, bound))

    def mixes(self) -> bool:
        """Whether a unit had other values in another batch."""
        return bool(self._mixed) and bool(torch.stack(self._mixed).any())

    def keeps(self) -> bool:
        """Whether an attribute has changed since the step began."""
        return self.measured and attributes_of(self._component) != self._before

    def refuse(self) -> None:
        """Refuse the component from now on."""
        if self.measured:
            refuse(self._component)

    def abandon(self) -> None:
        """Refuse the component from now on if it has kept something of a step that failed."""
        if self.keeps():
            refuse(self._component)


class MethodState:
    """The state of a method at one step, of which a checkpoint is made: units must not change it.

    Guarantee: a change while units are seen is noticed.

    Assumptions: the state is what ``state_dict`` returns.

    Proof: its digest is computed before observers and units, and again after the units.

    Args:
        method: the oracle's.
    """

    def __init__(self, method: Any) -> None:
        check_not_refused(method)
        self._method = method
        self._before = self._compute()

    def has_changed(self) -> bool:
        return self._compute() != self._before

    def abandon(self) -> None:
        """Refuse the method from now on if it has kept something of a step that failed."""
        if self.has_changed():
            refuse(self._method)

    def _compute(self) -> str:
        """Return a digest of the state; nothing is computed where it has none."""
        state = self._method.state_dict()
        if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
            raise ArgumentError(
                f"the state_dict of {type(self._method).__name__} must hold tensors, and "
                f"{others[0]} is a {type(state[others[0]]).__name__}: make it one, such as "
                "torch.tensor(0.5)"
            )
        return digest(state) if state else ""


def has_own_code(component: object) -> bool:
    """Whether code of the user's is in a component: its class, a function or part that it holds.

    Example:
        >>> from dpbam.methods import BAM
        >>> has_own_code(BAM(0.1)), has_own_code(torch.nn.ReLU())
        (False, True)
    """
    if not is_built_in(type(component)) or _replaces_functions(component):
        return True
    parts = [v for v in getattr(component, "__dict__", {}).values() if hasattr(v, "__dict__")]
    functions = [v for v in parts if isinstance(v, FunctionType)]
    others = [v for v in parts if callable(v) or is_built_in(type(v))]
    return not all(map(is_built_in, functions)) or any(
        has_own_code(v) for v in others if not isinstance(v, FunctionType)
    )


def _replaces_functions(component: object) -> bool:
    """Whether a function of its class is another one in this object.

    By place: ``functools.wraps`` gives a function the module of the one that it replaces.
    """
    names = getattr(component, "__dict__", ())
    return any(callable(getattr(type(component), name, None)) for name in names)


def call_hook(component: Any, hook: str, *arguments: Any) -> Any:
    """Return ``component.hook(...)``; refuse a component that it changes.

    For what runs whenever the present method is asked for, in ``per_sample`` and for ``lam()`` too.
    """
    before = {name: attributes_of(value, 1) for name, value in vars(component).items()}
    result = getattr(component, hook)(*arguments)
    for name, value in vars(component).items():
        if name not in before or attributes_of(value, 1) != before[name]:
            raise ArgumentError(
                f"{component.name}.{hook} has changed the method's {name}, and it runs in "
                "per_sample and for lam() too: adapt in update, or let at return a copy.copy(self) "
                "with the change"
            )
    return result


def refuse(component: object) -> None:
    """Mark a component, so that :func:`check_not_refused` refuses it and its copies."""
    # a bound method has no attributes of its own: its object has the mark
    with suppress(AttributeError, TypeError):
        object.__setattr__(getattr(component, "__self__", component), _REFUSED, True)


def is_built_in_function(function: Callable[..., Any]) -> bool:
    """Whether a function, or the class of an object that is called, comes with dpbam."""
    owner = getattr(function, "__self__", function)
    return is_built_in(function) or is_built_in(type(owner))


def run_kept_apart(function: Callable[..., Any], *units: Any) -> Any:
    """Return ``function(*units)``; refuse it, for good, if its attributes have changed.

    Guarantee: what a function keeps of its units in its attributes is not used in a later call.

    Assumptions: those of :class:`OwnCode`. Of dpbam's own functions nothing is compared.

    Proof: attributes are compared around the call, also where it fails.
    """
    if is_built_in_function(function):
        return function(*units)
    owner = getattr(function, "__self__", function)
    before = attributes_of(owner)
    try:
        return function(*units)
    finally:
        if attributes_of(owner) != before:
            refuse(function)
            name = getattr(function, "__name__", type(function).__name__)
            raise PlanViolationError(
                f"{name} keeps something of its rows in an attribute, where a later step could "
                "read it: compute it anew at each call, or before training"
            )


def check_not_refused(component: object, *, refused: bool = False) -> None:
    """Refuse a component that was refused before, as its mark or ``refused`` says.

    Guarantee: what a component took from the units of a refused step is not used in a later one.

    Assumptions: those of :class:`OwnCode`.

    Proof: it is called at each step, before a unit is seen.
    """
    if refused or getattr(getattr(component, "__self__", component), _REFUSED, False):
        name = getattr(component, "__name__", type(component).__name__)
        raise PlanViolationError(
            f"{name} was refused in an earlier step, and may hold what it took from its units: "
            "correct it, and make a new one and a new oracle, with the same ledger"
        )


def other_batches(units: int, device: torch.device, sizes: Tensor | None = None) -> list[Tensor]:
    """Return other batches of the same units, as places, to compute the units' results again.

    Every other unit, two random halves, drawn anew at each call whatever the run's seed, and one
    unit repeatedly: that of the largest size, of the least, and two at random. Repetition turns
    "more than so many units" into all or none, and "above the mean" into none. The number of
    copies is a power of two, since the mean of another number of equal values may be rounded
    below all of them.

    Args:
        units: how many.
        device: of the places.
        sizes: [U] of the units; None: they have none.

    Example:
        >>> [len(places) for places in other_batches(5, torch.device("cpu"))]
        [3, 2, 2, 3, 4, 4]
    """
    places = torch.arange(units, device=device)
    order = torch.from_numpy(np.random.default_rng().permutation(units)).to(device)
    repeated = [order[0], order[-1]]
    if sizes is not None:
        repeated += [sizes.argmax(), sizes.argmin()]
    halves = [places[::2], places[1::2], order[: units // 2], order[units // 2 :]]
    copies = 2 ** (units.bit_length() - 1)
    return [*halves, *(place.expand(copies) for place in repeated)]


def differs(together: Tensor, apart: Tensor | None, bound: float) -> Tensor:
    """Return whether [K, U] values of units are others in another batch: a scalar.

    A value near 0, such as a difference from the mean over groups, has no relative accuracy: it may
    be rounded by a share of ``bound``, which a unit's values may be.
    """
    if apart is None or together.shape != apart.shape:
        return torch.ones((), dtype=torch.bool, device=together.device)
    rounding = _ALIKE_AT_ZERO * max(0.0, bound) if math.isfinite(bound) else 0.0
    return ~torch.isclose(together, apart, rtol=_ALIKE, atol=rounding, equal_nan=True).all()


def attributes_of(value: Any, level: int = 0) -> object:
    """Return what is equal as long as an object's attributes, and theirs, have not changed.

    Functions, objects more than four levels deep, and objects without a dict that cannot be
    pickled are compared by identity: what changes inside them is not seen.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, digest({"": value})
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return [(repr(key), attributes_of(each, level + 1)) for key, each in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [attributes_of(each, level + 1) for each in value]
    if isinstance(value, (bool, int, float, str, bytes, set, frozenset, type(None))):
        return repr(value)  # NaN is equal to itself by it
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, _CODE) or level > _LEVELS:
        return id(value)
    if attributes is not None:
        return id(value), attributes_of(dict(attributes), level + 1)
    with suppress(Exception):  # an array, a buffer, an object with slots
        return id(value), pickle.dumps(value)
    return id(value)
