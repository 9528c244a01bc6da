"""One forward pass, run so that every use of a trainable parameter is known.

:class:`Capture` sees each torch function that the model calls on one row, inside ``vmap``:

=============================  ================================================================
the call takes                 what is done
=============================  ================================================================
no trainable parameter         nothing
parameters alone               its result is a :class:`~dpbam.engines.fused.weights.Weight`
a parameter, and the row       a *use*: the call is done with the parameter detached, for all
                               rows; its input x and its output y become nodes of the graph
                               that gradients can be asked for, and the use is recorded
=============================  ================================================================

Reused layers, tied weights, custom modules and bare parameters are then one case: a parameter with
several uses. All state is in the :class:`Tape`: nothing is left on modules or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import batched, is_batched, on_all_rows
from dpbam.engines.fused.weights import Weight

if TYPE_CHECKING:
    from dpbam.engines.fused.ascent import Ascent
    from dpbam.engines.fused.rules import Rules
    from dpbam.engines.fused.uses import Use

_READS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "is_nonzero", "equal", "allclose", "__reduce_ex__", "__dlpack__",
}  # fmt: skip


_ALIASES = {Tensor.data.__get__}  # type: ignore[attr-defined]


@dataclass
class Node:
    """An x or a y of the tape, for all rows: [N, *row]."""

    tensor: Tensor | None  # x's value; y's is not kept
    shape: torch.Size
    edge: GradientEdge | None
    version: int
    what: str
    recorded: bool = False  # y of a layer that records its parameters' gradients itself


@dataclass
class Tape:
    """The nodes x and y of one forward pass, and the uses that join them."""

    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def input(self, x: Tensor, what: str) -> tuple[Tensor, int]:
        """Return a graph node for x that only this call uses, and its place on the tape."""
        if x.requires_grad:
            x = x.view_as(x)
        edge = get_gradient_edge(x) if x.requires_grad else None
        held = x.detach() if edge is None else x
        self.inputs.append(Node(held, x.shape, edge, x._version, what))
        return x, len(self.inputs) - 1

    def output(self, y: Tensor, what: str, *, recorded: bool = False) -> tuple[Tensor, int]:
        """Return a graph node for y, and its place on the tape."""
        if not y.requires_grad:
            y = self._root(y)
        elif y._is_view():
            y = _Same.apply(y)  # type: ignore[no-untyped-call]
        self.outputs.append(Node(None, y.shape, get_gradient_edge(y), 0, what, recorded))
        return y, len(self.outputs) - 1

    def _root(self, y: Tensor) -> Tensor:
        """Return y, computed from constants alone, as the start of the graph."""
        if y._is_view():
            y = _no_view(y)
        started: Tensor = _Root.apply(y, self._anchor)  # type: ignore[no-untyped-call]
        return started

    def check_untouched(self) -> None:
        """Refuse if the model overwrote an input that a per-sample gradient needs."""
        for node in self.inputs:
            if node.tensor is not None and node.tensor._version != node.version:
                raise UnsupportedModelError(
                    f"the input of {node.what} is changed in place later in the forward pass"
                )


class Capture(TorchFunctionMode):
    """Run a row's forward pass under this mode to fill its tape.

    Args:
        parameters: the trainable parameters by name.
        rows: N.
        rules: what to do with a use, by torch function.
        twice: there will be a second backward pass.
        ascent: moves the parameters of every unit, for BAM's ascent step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rows: int,
        rules: Rules,
        *,
        twice: bool = False,
        ascent: Ascent | None = None,
    ) -> None:
        super().__init__()
        self.tape, self.rows, self.twice = Tape(), rows, twice
        self.parameters, self.ascent, self._rules = parameters, ascent, rules
        # weights hold their tensors, so an id is not used again while this capture lives
        self._weights = {id(p): Weight(p, (name,)) for name, p in parameters.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        weights: list[Weight] = []
        varying = False
        for t in _tensors((args, kwargs)):
            weight = self._weights.get(id(t))
            if weight is not None:
                weights.append(weight)
            varying = varying or is_batched(t)
        constant = any(weight.constant for weight in weights)
        out = self._do(
            func, args, kwargs, tracked=bool(weights), varying=varying, constant=constant
        )
        for weight in weights:  # by the function's name, or by an argument such as inplace=True
            if weight.tensor._version != weight.version:
                name = getattr(func, "__name__", str(func))
                raise UnsupportedModelError(f"{name} changes a function of parameters in place")
        return out

    def _do(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        tracked: bool,
        varying: bool,
        constant: bool,
    ) -> Any:
        constant = constant or not torch.is_grad_enabled()
        if constant and self.ascent is None:  # a detached parameter is a constant, unless it moves
            tracked = False
        if not tracked:
            return self._rules.without_weights(self, func, args, kwargs, varying=varying)
        if not varying:
            return self._derive(func, args, kwargs)
        return self._rules.use(self, func, args, kwargs, constant=constant)

    # --- functions of parameters alone

    def _derive(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result as weights: D = s(theta)."""
        if func in self._rules.lookups:  # a table at constant places: as if each row had looked up
            args, kwargs = tree_map(self._repeated, (args, kwargs))
            return self._rules.use(self, func, args, kwargs, constant=False)
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        if func in _ALIASES and self.weight(args[0]).func is not None:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"{name} of a function of parameters could be written to unseen"
            )
        parts = out if isinstance(out, list | tuple) else [out]
        if not any(isinstance(t, Tensor) for t in parts) and self.ascent and name in _READS:
            raise UnsupportedModelError(
                f"{name} reads a parameter's value, which BAM's ascent moves"
            )
        for i, t in enumerate(parts):
            if isinstance(t, Tensor) and id(t) not in self._weights:
                self._add(t, func, args, kwargs, None if out is t else i)
        return out

    def _add(self, t: Tensor, func: Any, args: Any, kwargs: Any, pick: int | None) -> None:
        constant = not t.requires_grad
        if constant and self.ascent is None:
            return
        args, kwargs = self.hide((args, kwargs))
        inside = [w for w in tree_leaves((args, kwargs)) if isinstance(w, Weight)]
        names = tuple(sorted({n for w in inside for n in w.names}))
        self._weights[id(t)] = Weight(t, names, func, args, kwargs, pick, constant)

    def _repeated(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or self.weight(leaf) is not None:
            return leaf
        return batched(leaf.expand(self.rows, *leaf.shape))

    # --- what rules use

    def hide(self, tree: Any) -> Any:
        """Return the tree with weights in place of the tensors that are tracked."""
        return tree_map(lambda leaf: self.weight(leaf) or leaf, tree)

    def weight(self, t: Any) -> Weight | None:
        """Return the weight of a tracked tensor."""
        return self._weights.get(id(t)) if isinstance(t, Tensor) else None

    def all_rows(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return ``function`` of [N, *row] tensors, computed for all rows at once."""
        return on_all_rows(function, self.rows, *tensors)

    def input(self, x: Tensor, what: str) -> tuple[Tensor, int]:
        """Return x as a node of the tape, and its place there."""
        noted = self.all_rows(lambda whole: self.tape.input(whole, what)[0], x)
        return noted, len(self.tape.inputs) - 1

    def output(self, y: Tensor, what: str) -> tuple[Tensor, int]:
        """Return y as a node of the tape, and its place there."""
        noted = self.all_rows(lambda whole: self.tape.output(whole, what)[0], y)
        return noted, len(self.tape.outputs) - 1

    def moved(
        self, y: Tensor, weight: Weight, trailing: int = 0, x: Tensor | None = None
    ) -> Tensor:
        """Return y plus what the ascent adds to D (and ``trailing`` axes), times x if given."""
        step = None if self.ascent is None else self.ascent.step_of(weight)
        if step is None:
            return y
        placed = batched(step.reshape(*step.shape, *(1,) * trailing)).to(y.dtype)
        return y + placed if x is None else torch.addcmul(y, x, placed)


def is_in_place(name: str) -> bool:
    """Whether a torch function of this name changes its first argument."""
    if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__"):
        return True
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


class _Root(torch.autograd.Function):
    """Makes y, computed from constants alone, the start of the graph."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(y)  # so that y is no view, and a layer may still overwrite it
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _no_view(y: Tensor) -> Tensor:
    """Return a tensor on the same memory that torch does not take for a view."""
    same: Tensor = y.new_empty(0).set_(y)  # type: ignore[call-overload]
    return same


class _Same(torch.autograd.Function):
    """The same values as no view: torch loses gradients at a view that is overwritten later."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return _no_view(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, list | tuple | dict):
            yield from _tensors(leaf)
