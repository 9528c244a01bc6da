"""Record every use of a trainable parameter in one forward pass.

:class:`Capture` intercepts each torch function that the model calls on one row, inside ``vmap``:

=============================  ================================================================
the call takes                 what happens
=============================  ================================================================
no trainable parameter         nothing
parameters alone               its result is a :class:`~dpbam.engines.fused.weights.Weight`
a parameter, and the row       a *use*: the call runs with the parameter detached, for all rows;
                               its input x and its output y become nodes of the graph for which
                               gradients are available, and its rule records the use
=============================  ================================================================

Reused layers, tied weights, custom modules and bare parameters are one case: a parameter with
several uses. All state is in the :class:`Tape`; modules and parameters are not modified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import batched, is_batched, on_all_rows
from dpbam.engines.fused.fold import split_axis
from dpbam.engines.fused.weights import Weight
from dpbam.params import Keywords

if TYPE_CHECKING:
    from dpbam.engines.fused.ascent import Ascent
    from dpbam.engines.fused.uses import Use

_READS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "is_nonzero", "equal", "allclose", "__reduce_ex__", "__dlpack__",
}  # fmt: skip
_NESTED = (list, tuple, dict)
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # not a view for autograd
_ALIASES = {Tensor.data.__get__}  # type: ignore[attr-defined]


class Call(NamedTuple):
    """A torch function and its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Keywords

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def operands(self, names: str) -> tuple[Any, ...]:
        """Return the arguments in the order of ``names``; those not given are None."""
        if self.kwargs:
            return tuple(self.bind(names).values())
        return self.args + (None,) * (len(_absent(names)) - len(self.args))

    def bind(self, names: str) -> Keywords:
        """Return the arguments by name; those not given are None."""
        absent = _absent(names)
        return {**absent, **dict(zip(absent, self.args, strict=False)), **self.kwargs}


@cache
def _absent(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


Rule = Callable[["Capture", Call], Any]
RULES: dict[Callable[..., Any], Rule] = {}
ALWAYS: set[Callable[..., Any]] = set()  # functions whose rule also applies without a parameter
#: A function -> the same, by functions that have rules.
COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {}
LOOKUPS: set[Callable[..., Any]] = set()  # functions that read a parameter at given indices


@dataclass
class Node:
    """An x or a y of the tape, for all rows: [N, *row]."""

    tensor: Tensor | None  # the value of an x; None for a y
    edge: GradientEdge | None
    version: int
    what: str
    recorded: bool = False  # y of a layer that records its parameters' gradients itself


@dataclass
class Tape:
    """The nodes x and y of one forward pass, and the uses between them.

    ``twice``: there will be a second backward pass, for which gradients at x are needed.
    """

    twice: bool = False
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    def input(self, x: Tensor, what: str) -> tuple[Tensor, int]:
        """Return x and its index; for a second pass, x is a graph node of this call alone."""
        edge, value = None, x
        if self.twice and x.requires_grad:
            value = x = x.view_as(x)
            edge = get_gradient_edge(x)
        self.inputs.append(Node(value, edge, x._version, what))
        return x, len(self.inputs) - 1

    def output(self, y: Tensor, what: str, *, recorded: bool = False) -> tuple[Tensor, int]:
        """Return a graph node for y, and its index on the tape."""
        if not y.requires_grad:  # computed from constants alone: it starts the graph
            y = y.detach().requires_grad_()
        if y.is_leaf or y._is_view():
            # On the same memory, neither a leaf nor a view, so that a layer may overwrite it: torch
            # loses gradients at a view that is overwritten later.
            y = UNSAFE_VIEW(y, y.shape)
        edge = None if recorded else get_gradient_edge(y)
        self.outputs.append(Node(None, edge, 0, what, recorded))
        return y, len(self.outputs) - 1

    def check_untouched(self) -> None:
        """Refuse a model that overwrote an input which a per-sample gradient needs."""
        for node in self.inputs:
            if node.tensor is not None and node.tensor._version != node.version:
                raise UnsupportedModelError(
                    f"the input of {node.what} is changed in place later in the forward pass"
                )


class Capture(TorchFunctionMode):
    """Fill a tape while a row's forward pass runs under this mode.

    Args:
        parameters: the trainable parameters by name.
        rows: N.
        generic: the rule for functions without one.
        twice: there will be a second backward pass.
        ascent: moves the parameters of every unit, for BAM's ascent step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rows: int,
        generic: Rule,
        *,
        twice: bool = False,
        ascent: Ascent | None = None,
    ) -> None:
        super().__init__()
        self.tape, self.rows, self.twice = Tape(twice), rows, twice
        self.parameters, self.ascent, self._generic = parameters, ascent, generic
        # weights hold their tensors, so no id is reused while this capture lives
        self._weights = {id(p): Weight(p, (name,)) for name, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weights: list[Weight] = []
        varying = self._look(args, weights)
        if kwargs:
            varying = self._look(kwargs.values(), weights) or varying
        if not weights and not (varying and func in ALWAYS):  # most calls
            return func(*args, **kwargs)
        call = Call(func, args, kwargs)
        out = self._run(call, weights, varying)
        for weight in weights:  # an in-place function, or an argument such as inplace=True
            if weight.tensor._version != weight.version:
                raise UnsupportedModelError(
                    f"{call.name} changes a function of parameters in place"
                )
        return out

    def _look(self, arguments: Iterable[Any], weights: list[Weight]) -> bool:
        """Add the weights among the arguments to ``weights``; return whether one is of the row."""
        varying, known = False, self._weights
        for leaf in arguments:
            if isinstance(leaf, Tensor):
                if id(leaf) in known:
                    weights.append(known[id(leaf)])
                varying = varying or is_batched(leaf)
            elif isinstance(leaf, _NESTED):
                inside = leaf.values() if isinstance(leaf, dict) else leaf
                varying = self._look(inside, weights) or varying
        return varying

    def _run(self, call: Call, weights: list[Weight], varying: bool) -> Any:
        constant = not torch.is_grad_enabled() or any(weight.constant for weight in weights)
        if weights and constant and call.func in COMPOSED:
            # perhaps one weight alone is constant: run the parts
            with self:
                return COMPOSED[call.func](*call.args, **call.kwargs)
        # a detached parameter is a constant, unless the ascent step moves it
        if not weights or (constant and self.ascent is None):
            ruled = varying and call.func in ALWAYS and not weights
            return RULES[call.func](self, call) if ruled else call.run()
        if not varying:
            return self._derive(call)
        # a constant one moves, without a use
        rule = self._generic if constant else RULES.get(call.func, self._generic)
        return rule(self, call)

    # --- functions of parameters alone

    def _derive(self, call: Call) -> Any:
        """Return the result as weights: D = s(theta)."""
        if call.func in LOOKUPS:  # constant indices: as if each row had looked them up
            args, kwargs = tree_map(self._repeat, (call.args, call.kwargs))
            rule = RULES.get(call.func, self._generic)
            return rule(self, Call(call.func, args, kwargs))
        out = call.run()
        if call.func in _ALIASES and self.weight(call.args[0]).func is not None:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"{call.name} of a function of parameters could be written to unseen"
            )
        parts = out if isinstance(out, list | tuple) else [out]
        if not any(isinstance(t, Tensor) for t in parts) and self.ascent and call.name in _READS:
            raise UnsupportedModelError(
                f"{call.name} reads a parameter's value, which BAM's ascent moves"
            )
        for i, t in enumerate(parts):
            if isinstance(t, Tensor) and id(t) not in self._weights:
                self._add(t, call, None if out is t else i)
        return out

    def _add(self, t: Tensor, call: Call, pick: int | None) -> None:
        constant = not t.requires_grad
        if constant and self.ascent is None:
            return
        args, kwargs = self.hide((call.args, call.kwargs))
        inside = [w for w in tree_leaves((args, kwargs)) if isinstance(w, Weight)]
        names = tuple(sorted({n for w in inside for n in w.names}))
        self._weights[id(t)] = Weight(t, names, call.func, args, kwargs, pick, constant)

    def _repeat(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or self.weight(leaf) is not None:
            return leaf
        return batched(leaf.expand(self.rows, *leaf.shape))

    # --- what rules use

    def hide(self, tree: Any) -> Any:
        """Return the tree with weights in place of tracked tensors."""
        return tree_map(lambda leaf: self.weight(leaf) or leaf, tree)

    def weight(self, t: Any) -> Weight | None:
        return self._weights.get(id(t)) if isinstance(t, Tensor) else None

    def name_of(self, call: Call, t: Any) -> str:
        """Return how a message names this use of a tensor."""
        source = self.weight(t)
        return f"{call.name} of {', '.join(source.names) if source else 'a constant'}"

    def all_rows(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return ``function`` of [N, *row] tensors, computed for all rows at once."""
        return on_all_rows(function, self.rows, *tensors)

    def input(self, x: Tensor, what: str) -> tuple[Tensor, int]:
        """Return x as a node of the tape, and its index there."""
        noted: Tensor = self.all_rows(lambda of_all: self.tape.input(of_all, what)[0], x)
        return noted, len(self.tape.inputs) - 1

    def output(self, y: Tensor, what: str) -> tuple[Tensor, int]:
        """Return y as a node of the tape, and its index there."""
        noted: Tensor = self.all_rows(lambda of_all: self.tape.output(of_all, what)[0], y)
        return noted, len(self.tape.outputs) - 1

    def move(self, value: Tensor, weight: Weight | None) -> Tensor:
        """Return D, perhaps reshaped, plus the step of the ascent: then one value per row."""
        step = None if self.ascent is None or weight is None else self.ascent.step_of(weight)
        if step is None:
            return value
        return value + batched(step).reshape(value.shape).to(value.dtype)


def is_in_place(name: str) -> bool:
    """Whether a torch function of this name changes its first argument."""
    if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__"):
        return True
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def not_a_view(y: Tensor) -> Tensor:
    """Return a tensor on the same memory that torch does not treat as a view."""
    same: Tensor = y.new_empty(0).set_(y)  # type: ignore[call-overload]
    return same


def with_rows(y: Tensor, rows: int) -> Tensor:
    """Return a new tensor [n, ...] as [rows, n / rows, ...], not as a view."""
    if rows == y.shape[0]:
        return y.unsqueeze_(1)
    return not_a_view(split_axis(y, 0, (rows, -1)))
