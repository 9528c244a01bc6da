"""The generic rule: the per-unit gradient of any call by the call's own vjp.

For a use y = F(theta, x) with any torch function, row by row under ``vmap``:

    plain   vjp_theta F(., x_i) (b_i)
    BAM     d/dtheta [ <ybar_i, F(theta, x_i)> + <hbar_i, vjp_x F(theta, .)(b_i)>
                       + (p / |g_i|) <g_i, vjp_theta F(., x_i)(b_i)> ]

The last term is the direct dependence of the norm on theta where F is not linear in theta. It is
zero for bilinear layers, whose uses leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import is_batched, requires_grad
from dpbam.engines.fused.tape import Call, Capture, is_in_place
from dpbam.engines.fused.uses import Flow, Use
from dpbam.engines.fused.weights import Weight
from dpbam.params import Params

_Function = Callable[[Mapping[str, Tensor], list[Tensor]], Any]  # F(theta, xs), of one row


@dataclass(frozen=True)
class GenericUse(Use):
    """A use of parameters by an arbitrary torch function.

    Attributes:
        theta: the parameters' values.
        function: F(theta, xs), of one row.
        xs: the indices of the inputs on the tape.
        y: that of the output.
        moved: for the ascent step, the parameters of every row, [N, *shape].
    """

    theta: Params
    function: _Function
    xs: list[int]
    y: int
    moved: Params | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.theta)

    def materialise(self, flow: Flow) -> Params:
        """Return the formula above, summed over the rows of each unit."""
        if flow.b[self.y] is None and (flow.ybar is None or flow.ybar[self.y] is None):
            return {}
        try:
            per_row: Params = vmap(self._row_gradient)(self._rows(flow))
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            names = ", ".join(self.names)
            raise UnsupportedModelError(
                f"{names}: torch cannot vectorise its function: {error}"
            ) from error
        return {n: flow.fold(g).sum(1) for n, g in per_row.items()}

    def _rows(self, flow: Flow) -> dict[str, Any]:
        """Return the terms of the formula, each with the row as leading axis."""
        n = flow.fold.rows
        theta = {k: v.expand(n, *v.shape) for k, v in self.theta.items()}
        values: dict[str, Any] = {"theta": self.moved or theta, "x": [flow.x[k] for k in self.xs]}
        b = flow.b[self.y]
        first = b if flow.ybar is None else flow.ybar[self.y]
        if first is not None:
            values["first"] = first
        if flow.hbar is not None and b is not None:
            values["b"] = b
            hbar = {str(i): flow.hbar[k] for i, k in enumerate(self.xs)}
            values["hbar"] = {i: h for i, h in hbar.items() if h is not None}
            values["direction"] = {
                name: flow.fold.to_rows(d).to(self.theta[name].dtype)
                for name, d in (flow.third_term(self.names) if flow.third_term else {}).items()
            }
        return values

    def _row_gradient(self, values: dict[str, Any]) -> Params:
        def objective(theta: Params) -> Tensor:
            parts = []
            if "first" in values:
                parts.append(_inner(values["first"], self.function(theta, values["x"])))
            if "b" in values:
                parts.append(self._second(theta, values))
            return torch.stack(parts).sum()

        gradient: Params = grad(objective)(values["theta"])
        return gradient

    def _second(self, theta: Params, values: dict[str, Any]) -> Tensor:
        """Return <hbar, vjp_x F(b)> + <direction, vjp_theta F(b)>."""
        xs, hbar = values["x"], values["hbar"]

        def f(theta: Params, moving: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.function(theta, [moving.get(str(i), x) for i, x in enumerate(xs)])
            return out

        moving = {i: xs[int(i)] for i in hbar}
        in_theta, in_x = vjp(f, theta, moving)[1](values["b"])
        total: Tensor = values["b"].new_zeros(())
        for i, h in hbar.items():
            total = total + _inner(h, in_x[i])
        for name, d in values["direction"].items():
            total = total + _inner(d, in_theta[name])
        return total


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.to(b.dtype) * b).sum()


def generic(capture: Capture, call: Call) -> Any:
    """Record a call of any torch function that returns one tensor."""
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
        out = capture.all_rows(lambda *xs: vmap(function)(moved, list(xs)), *xs)
    if not isinstance(out, Tensor):
        raise UnsupportedModelError(f"{what} returns several tensors, and has no rule of its own")
    if not differentiable:
        return out
    y, j = capture.output(out, what)
    capture.tape.uses.append(GenericUse(theta, function, [k for _, k in nodes], j, moved=moved))
    return y


@dataclass(frozen=True)
class _Slot:
    """The position of a tensor of the row among a call's arguments."""

    index: int


def _replay(func: Callable[..., Any], hidden: Any) -> _Function:
    """Return F(theta, xs): the call with parameters and the row's tensors filled in."""

    def function(theta: Mapping[str, Tensor], xs: list[Tensor]) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Slot):
                return xs[leaf.index]
            return leaf.evaluate(theta) if isinstance(leaf, Weight) else leaf

        args, kwargs = tree_map(value, hidden)
        return func(*args, **kwargs)

    return function


def _depends(function: _Function, parameters: Mapping[str, Tensor], xs: list[Tensor]) -> bool:
    """Whether the result depends on the parameters' values (``x.type_as(weight)`` does not)."""
    out = function(parameters, [x.detach() for x in xs])
    parts = out if isinstance(out, tuple | list) else (out,)
    return any(isinstance(t, Tensor) and requires_grad(t) for t in parts)
