"""The generic use: the per-unit gradient of any call by the call's own vjp.

For a use y = F(theta, x) with any torch function, row by row under ``vmap``:

    plain   vjp_theta F(., x_i) (b_i)
    BAM     d/dtheta [ <ybar_i, F(theta, x_i)> + <hbar_i, vjp_x F(theta, .)(b_i)>
                       + (p / |g_i|) <g_i, vjp_theta F(., x_i)(b_i)> ]

The last term is there because the norm sees theta directly wherever F is not linear in theta; for
bilinear layers it is zero, and their uses leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.uses import Flow
from dpbam.params import Params


@dataclass(frozen=True)
class GenericUse:
    """A use of parameters by an arbitrary torch function.

    Attributes:
        theta: the parameters' values.
        function: F(theta, xs), of one row.
        xs: the inputs' places on the tape.
        y: the output's.
        direction: for exact BAM, (p / |g_u|) g_u for these parameters.
        moved: for the ascent step, the parameters of every row, [N, *shape].
    """

    theta: Params
    function: Callable[[Params, list[Tensor]], Tensor]
    xs: list[int]
    y: int
    direction: Params | None = None
    moved: Params | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters it uses."""
        return tuple(self.theta)

    def materialise(self, flow: Flow) -> Params:
        """The formula above, summed over a unit's rows."""
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
        """Return everything the formula needs with the row as leading axis."""
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
                for name, d in (self.direction or {}).items()
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
        """<hbar, vjp_x F(b)> + <direction, vjp_theta F(b)>."""
        xs, hbar = values["x"], values["hbar"]

        def f(theta: Params, moving: dict[str, Tensor]) -> Tensor:
            return self.function(theta, [moving.get(str(i), x) for i, x in enumerate(xs)])

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
