"""One forward pass, run so that every use of a trainable parameter is known.

:class:`Capture` sees each torch function that the model calls. A call that takes no trainable
parameter is none of its business. A call on parameters alone makes a :class:`Source`. A call that
takes a parameter (or a source) and something of the batch is a *use*: the call is done with the
parameter detached, its input x and its output y become nodes of the graph that we can ask
gradients for, and a site is written on the :class:`Tape`. So reused layers, tied weights, custom
modules and bare parameters are one case: a parameter with several uses.

All state is in the tape: nothing is left on modules or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dpbam.engines.ascent import Ascent
from dpbam.engines.base import CannotServe
from dpbam.engines.sites import Layout, Site
from dpbam.engines.sources import Source

ALWAYS: set[Callable[..., Any]] = set()  # functions whose rule applies without a parameter too
_EXPANSIONS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
_LOOKUPS = {"embedding"}  # BERT looks token types up at zeros, one a token of every sample


@dataclass
class Node:
    """An x or a y of the tape."""

    tensor: Tensor | None  # x's value; y's is not kept
    shape: torch.Size
    edge: GradientEdge | None
    version: int
    what: str
    told: bool = False  # y of a layer that tells its gradients itself


@dataclass
class Tape:
    """What one forward pass wrote down: nodes x and y, and the sites that join them."""

    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    expansions: dict[int, torch.Size] = field(default_factory=dict)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for two passes through the same calls."""
        return (
            tuple((n.what, len(n.shape)) for n in self.inputs),
            tuple((n.what, len(n.shape)) for n in self.outputs),
        )

    def check_untouched(self) -> None:
        """Refuse if the model overwrote an input that a per-sample gradient needs."""
        for node in self.inputs:
            if node.tensor is not None and node.tensor._version != node.version:
                raise CannotServe(
                    f"the input of {node.what} is changed in place later in the forward pass"
                )


@dataclass(frozen=True)
class Plan:
    """What the probe found: where the rows are in each node, which calls repeat over rows."""

    expansions: frozenset[int] = frozenset()
    inputs: tuple[Layout, ...] = ()
    outputs: tuple[Layout, ...] = ()


Rule = Callable[["Capture", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Capture(TorchFunctionMode):
    """Run a forward pass under this mode to fill its tape.

    Args:
        parameters: the trainable parameters by name.
        batch: the tensors that vary by row: the model's inputs.
        rows: N.
        rules: what to do with a use, by torch function; ``None`` holds the rule for the others.
        plan: what the probe found; without it no row axis is known yet.
        twice: there will be a second backward pass.
        ascent: moves the parameters of every unit, for BAM's ascent step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        batch: list[Tensor],
        rows: int,
        rules: Mapping[Callable[..., Any] | None, Rule],
        plan: Plan,
        *,
        twice: bool = False,
        ascent: Ascent | None = None,
    ) -> None:
        super().__init__()
        self.tape, self.rows, self.plan, self.twice = Tape(), rows, plan, twice
        self._rules, self.parameters, self.ascent = rules, parameters, ascent
        self._anchor = torch.zeros((), requires_grad=True)
        self._calls = 0
        self._sources: Any = WeakIdKeyDictionary()
        self._varying: Any = WeakIdKeyDictionary()
        for name, p in parameters.items():
            self._sources[p] = Source(p, (name,))
        for t in batch:
            self._varying[t] = True

    # --- the interception

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._calls += 1
        tensors = list(_tensors(args)) + list(_tensors(tuple(kwargs.values())))
        tracked = torch.is_grad_enabled() and any(t in self._sources for t in tensors)
        varying = any(self.varies(t) for t in tensors)
        if not tracked:
            rule = self._rules.get(func) if varying and func in ALWAYS else None
            out = rule(self, func, args, kwargs) if rule else func(*args, **kwargs)
            return self._mark(out) if varying else out
        if not varying:
            return self._derive(func, args, kwargs)
        rule = self._rules.get(func, self._rules[None])
        return self._mark(rule(self, func, args, kwargs))

    def varies(self, t: Tensor) -> bool:
        """Whether ``t`` depends on the batch: parameters apart, only that has a gradient."""
        return t in self._varying or (t.requires_grad and t not in self._sources)

    def _mark(self, out: Any) -> Any:
        for t in _tensors((out,)):
            if not t.requires_grad:
                self._varying[t] = True
        return out

    def _derive(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A function of parameters alone: a source, unless it repeats them over the rows."""
        with torch.enable_grad():
            out = func(*args, **kwargs)
        if not any(t.requires_grad for t in _tensors((out,))):
            return out
        hidden_args, hidden_kwargs = self.hide((args, kwargs))
        names = tuple(sorted({n for s in _sources((hidden_args, hidden_kwargs)) for n in s.names}))
        if isinstance(out, Tensor):
            self._sources[out] = Source(out, names, func, hidden_args, hidden_kwargs)
            self.tape.expansions[self._calls] = out.shape
            if self._calls in self.plan.expansions:
                return self._repeated(func, out, args, kwargs)
            return out
        for i, t in enumerate(out):
            self._sources[t] = Source(t, names, func, hidden_args, hidden_kwargs, i)
        return out

    def _repeated(self, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The parameters again for every row: by expansion, or looked up at constant places."""
        if func.__name__ in _EXPANSIONS:
            return self._rules[_expand_rows](self, func, (out, args[0]), {})
        if func.__name__ in _LOOKUPS:
            return self._mark(self._rules[func](self, func, args, kwargs))
        raise CannotServe(f"{func.__name__} makes one entry a sample of parameters alone")

    # --- what rules use

    def hide(self, tree: Any) -> Any:
        """Sources in place of the tensors that are tracked."""
        return tree_map(lambda t: self.source(t) or t if isinstance(t, Tensor) else t, tree)

    def source(self, t: Any) -> Source | None:
        """The source of a tracked tensor."""
        found: Source | None = self._sources.get(t) if isinstance(t, Tensor) else None
        return found

    def adopt(self, source: Source) -> None:
        """Know a source that a rule made itself."""
        self._sources[source.tensor] = source

    def input(self, x: Tensor, what: str) -> tuple[Tensor, int]:
        """A graph node for x that only this call uses, and its place on the tape."""
        if x.requires_grad:
            x = x.view_as(x)
        edge = get_gradient_edge(x) if x.requires_grad else None
        self.tape.inputs.append(
            Node(x.detach() if edge is None else x, x.shape, edge, x._version, what)
        )
        return x, len(self.tape.inputs) - 1

    def output(self, y: Tensor, what: str, *, told: bool = False) -> tuple[Tensor, int]:
        """A graph node for y, and its place on the tape; ``told``: nobody will ask its gradient."""
        if not y.requires_grad:
            y = self.root(y)
        elif y._is_view():
            y = _Same.apply(y)  # type: ignore[no-untyped-call]
        self.tape.outputs.append(Node(None, y.shape, get_gradient_edge(y), 0, what, told))
        return y, len(self.tape.outputs) - 1

    def moved(
        self, y: Tensor, source: Source, shape: tuple[int, ...], x: Tensor | None = None
    ) -> Tensor:
        """y plus what the ascent adds: eps_u g_u, broadcast as ``shape``, times x if given."""
        if self.ascent is None:
            return y
        step = self.ascent.spread(source, shape, len(self.tape.outputs), y.ndim)
        if step is None:
            return y
        step = step.to(y.dtype)
        return y + step if x is None else torch.addcmul(y, x, step)

    def root(self, y: Tensor) -> Tensor:
        """y, computed from constants alone, as the start of the graph."""
        if y._is_view():
            y = _no_view(y)
        started: Tensor = _Root.apply(y, self._anchor)  # type: ignore[no-untyped-call]
        return started

    def site(self, site: Site) -> None:
        """Write a use down."""
        self.tape.sites.append(site)


def _expand_rows() -> None:
    """The key of the rule for parameters repeated over the rows."""


EXPAND_ROWS = _expand_rows


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
    """A tensor on the same memory that torch does not take for a view."""
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
    for leaf in tree:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, list | tuple):
            yield from _tensors(leaf)
        elif isinstance(leaf, dict):
            yield from _tensors(leaf.values())


def _sources(tree: Any) -> Iterator[Source]:
    for leaf in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(leaf, Source):
            yield leaf
        elif isinstance(leaf, list | tuple | dict):
            yield from _sources(leaf)
