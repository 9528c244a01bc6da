"""Rules: what to record on the tape for a torch function that takes a trainable parameter.

A rule gets the capture and the call; it does the call with parameters detached and records uses. A
function without a rule gets the :func:`generic` one, which is right for any function; a rule is
there only where it is faster, where the generic one cannot go, or to refuse with a clear sentence.

To add one for a function of your own, make it a torch function and register a rule::

    def scaled(x, weight):                                  # your layer's function
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(scaled, (x, weight), x, weight)
        return x * weight

    @rule(scaled)
    def _(capture, call):
        x, k = capture.input(call.args[0], "scaled")        # k: x's place on the tape
        weight = capture.weight(call.args[1])               # what the parameter is made of
        y, j = capture.output(x * call.args[1].detach(), "scaled")
        capture.tape.uses.append(ScaleUse(weight, tuple(weight.tensor.shape), k, j))
        return y

Inside a rule a tensor looks as one row's; ``capture.all_rows`` hands over those of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import is_batched, requires_grad
from dpbam.engines.fused.generic import GenericUse
from dpbam.engines.fused.layers.base import Layer
from dpbam.engines.fused.tape import Capture, is_in_place
from dpbam.engines.fused.uses import MatrixUse, SumUse
from dpbam.engines.fused.weights import Weight


class Call(NamedTuple):
    """A torch function and its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.func, "__name__", str(self.func))

    def run(self) -> Any:
        """Do the call as it is."""
        return self.func(*self.args, **self.kwargs)


Rule = Callable[[Capture, Call], Any]
RULES: dict[Callable[..., Any], Rule] = {}
ALWAYS: set[Callable[..., Any]] = set()  # functions whose rule applies without a parameter too
LOOKUPS: set[Callable[..., Any]] = set()  # functions that look a parameter up at given places


def rule(*funcs: Callable[..., Any], always: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions; ``always``: for calls without parameters too."""

    def register(made: Rule) -> Rule:
        for func in funcs:
            RULES[func] = made
        if always:
            ALWAYS.update(funcs)
        return made

    return register


class Rules:
    """The registered rules, as a capture asks for them."""

    lookups = LOOKUPS

    @staticmethod
    def without_weights(
        capture: Capture, func: Callable[..., Any], args: Any, kwargs: Any, *, varying: bool
    ) -> Any:
        """Do a call that takes no trainable parameter."""
        if varying and func in ALWAYS:
            return RULES[func](capture, Call(func, args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def use(
        capture: Capture, func: Callable[..., Any], args: Any, kwargs: Any, *, constant: bool
    ) -> Any:
        """Do a call that takes a parameter and the row; a constant one moves, without a use."""
        made = generic if constant else RULES.get(func, generic)
        return made(capture, Call(func, args, kwargs))


def bind(names: str, call: Call) -> dict[str, Any]:
    """Return the arguments by name; those not given are None."""
    listed = names.split()
    return {**dict.fromkeys(listed), **dict(zip(listed, call.args, strict=False)), **call.kwargs}


def bare(t: Any) -> Any:
    """Return a tensor without its graph: parameters take no part in ours."""
    return t.detach() if isinstance(t, Tensor) else t


def name_of(capture: Capture, call: Call, weight: Any) -> str:
    """Return what a message calls this use."""
    source = capture.weight(weight)
    return f"{call.name} of {', '.join(source.names) if source else 'a constant'}"


def ready(capture: Capture, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the call is x times a weight, plus a bias, that :func:`use_matrix` knows."""
    if not is_batched(x) or is_batched(weight) or (bias is not None and is_batched(bias)):
        return False
    source, shift = capture.weight(weight), capture.weight(bias)
    known = source is None or source.selection or source.centred
    return known and (shift is None or shift.linear)


def use_matrix(
    capture: Capture,
    what: str,
    function: Callable[[Tensor, Tensor, Any], Tensor],
    layer: Layer,
    operands: tuple[Tensor, Tensor, Tensor | None],
    *,
    channel_axes: int = 0,
    swap: bool = False,
) -> Tensor:
    """Return y = function(x, weight, bias), with uses of the weight and the bias that are trained.

    Args:
        capture: the capture.
        what: names the call in messages.
        function: of x for all rows, [N, *row].
        layer: f, without the bias.
        operands: x, weight, bias.
        channel_axes: how many axes of y follow its channels.
        swap: x and y change places in the layer (transposed convolutions).
    """
    x, weight, bias = operands
    source, shift = capture.weight(weight), capture.weight(bias)
    tape, ascent = capture.tape, capture.ascent

    def for_all_rows(x: Tensor) -> Tensor:
        k = -1
        if source is not None:
            x, k = tape.input(x, what)

        def shared() -> Tensor:
            return function(x, bare(weight), bare(bias))

        use = MatrixUse(source, layer, k, len(tape.outputs), swap) if source else None
        if ascent is None or use is None:
            y = shared()
        else:
            constant = None if bias is None else bare(bias).view(-1, *(1,) * channel_axes)
            y = ascent.matrix(use, x, shared, constant)
        if ascent is not None and shift is not None:
            y = ascent.shifted(y, shift, channel_axes)
        y, j = tape.output(y, what)
        if use is not None:
            tape.uses.append(use)
        if shift is not None:
            shape = tuple(shift.tensor.shape) + (1,) * channel_axes
            tape.uses.append(SumUse(shift, shape, j))
        return y

    return capture.all_rows(for_all_rows, x)


# --- any torch function of the row and of parameters that returns one tensor


def generic(capture: Capture, call: Call) -> Any:
    """Record the call itself: its per-row gradient comes from its own vector-Jacobian product."""
    xs: list[Tensor] = []

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and is_batched(leaf):
            xs.append(leaf)
            return _Slot(len(xs) - 1)
        return leaf

    hidden = tree_map(slot, capture.hide((call.args, call.kwargs)))
    names = {n for w in tree_leaves(hidden) if isinstance(w, Weight) for n in w.names}
    what = f"{call.name} of {', '.join(sorted(names))}"
    if is_in_place(call.name):
        raise UnsupportedModelError(f"{what} changes a tensor in place")
    function = _replay(call.func, hidden)
    theta = {n: p.detach() for n, p in capture.parameters.items() if n in names}
    differentiable = torch.is_grad_enabled() and _depends(function, capture.parameters, xs)
    if not differentiable and capture.ascent is None:
        return function(theta, xs)
    if differentiable:
        nodes = [capture.input(x, what) for x in xs]
        xs = [x for x, _ in nodes]
    if capture.ascent is None:
        moved, out = None, function(theta, xs)
    else:
        moved = capture.ascent.parameters(theta)
        out = capture.all_rows(_row_by_row(function, moved, len(xs)), *xs)
    if not isinstance(out, Tensor):
        raise UnsupportedModelError(f"{what} returns several tensors, and no rule knows it")
    if not differentiable:
        return out
    y, j = capture.output(out, what)
    capture.tape.uses.append(GenericUse(theta, function, [k for _, k in nodes], j, moved=moved))
    return y


class _Slot:
    """The place of the row's tensor in a call's arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


def _replay(func: Callable[..., Any], hidden: Any) -> Callable[[Any, list[Tensor]], Any]:
    """Return F(theta, xs): the call with parameters and the row's tensors put in."""

    def function(theta: Any, xs: list[Tensor]) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Slot):
                return xs[leaf.index]
            return leaf.evaluate(theta) if isinstance(leaf, Weight) else leaf

        args, kwargs = tree_map(value, hidden)
        return func(*args, **kwargs)

    return function


def _row_by_row(function: Any, theta: dict[str, Tensor], count: int) -> Callable[..., Tensor]:
    """Return F for all rows, each with its own parameters, [N, *shape]."""

    def for_all_rows(*xs: Tensor) -> Tensor:
        assert len(xs) == count
        out: Tensor = torch.func.vmap(function)(theta, list(xs))
        return out

    return for_all_rows


def _depends(function: Any, parameters: Mapping[str, Tensor], xs: list[Tensor]) -> bool:
    """Whether the result depends on the parameters' values (``x.type_as(weight)`` does not)."""
    out = function(parameters, [x.detach() for x in xs])
    parts = out if isinstance(out, tuple | list) else (out,)
    return any(isinstance(t, Tensor) and requires_grad(t) for t in parts)
