"""The generic rule: the per-unit gradient of any call by the call's own vjp.

For a use y = F(theta, x) with any torch function, row by row under ``vmap``:

    plain   vjp_theta F(., x_i) (b_i)
    BAM     d/dtheta [ <ybar_i, F(theta, x_i)> + <hbar_i, vjp_x F(theta, .)(b_i)>
                       + (p / |g_i|) <g_i, vjp_theta F(., x_i)(b_i)> ]

The last term is there because the norm sees theta directly wherever F is not linear in theta; for
bilinear layers it is zero, and their special rules leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from dpbam.engines.base import CannotServe
from dpbam.engines.sites import Flow, Layout
from dpbam.trees import Params, accumulation_dtype


@dataclass
class GenericSite:
    """A use of parameters by an arbitrary torch function.

    Attributes:
        theta: the parameters' values.
        function: F(theta, xs) on tensors with the axes of the call itself.
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

    def instantiate(self, flow: Flow) -> Params:
        """The formula above, summed over a unit's rows."""
        if flow.b[self.y] is None and (flow.ybar is None or flow.ybar[self.y] is None):
            return {}
        try:
            per_row: Params = vmap(self._row_gradient(flow))(self._rows(flow))
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            names = ", ".join(self.names)
            raise CannotServe(f"{names}: torch cannot vectorise its function: {error}") from error
        return {
            n: flow.fold.by_unit(g.to(accumulation_dtype(g.dtype))).sum(1)
            for n, g in per_row.items()
        }

    def rows_apart(
        self, xs: list[Tensor], inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]
    ) -> Tensor:
        """F row by row, each row with its own parameters."""
        assert self.moved is not None
        n = next(iter(self.moved.values())).shape[0]
        layouts = [inputs[k] for k in self.xs]
        out = outputs[self.y]

        def row(theta: Params, parts: list[Tensor]) -> Tensor:
            placed = [x.movedim(0, layout.axis) for x, layout in zip(parts, layouts, strict=True)]
            return self.function(theta, placed).movedim(out.axis, 0)

        split = [layout.rows_first(x, n) for x, layout in zip(xs, layouts, strict=True)]
        return out.place(vmap(row)(self.moved, split))

    def _rows(self, flow: Flow) -> dict[str, Any]:
        """Everything the formula needs with the row as leading axis."""
        n = flow.fold.rows

        def rows(t: Tensor, layout: Layout) -> Tensor:
            return layout.rows_first(t, n)

        out = flow.outputs[self.y]
        theta = {k: v.expand(n, *v.shape) for k, v in self.theta.items()}
        values: dict[str, Any] = {
            "theta": self.moved or theta,
            "x": [rows(flow.x[k], flow.inputs[k]) for k in self.xs],
        }
        for key, source in (("b", flow.b), ("ybar", flow.ybar)):
            if source is not None and source[self.y] is not None:
                values[key] = rows(source[self.y], out)  # type: ignore[arg-type]
        if flow.hbar is not None and flow.b[self.y] is not None:
            values["hbar"] = {
                str(i): rows(h, flow.inputs[k])
                for i, k in enumerate(self.xs)
                if (h := flow.hbar[k]) is not None
            }
            if self.direction is not None:
                values["direction"] = {
                    name: flow.fold.to_rows(d).to(self.theta[name].dtype)
                    for name, d in self.direction.items()
                }
        return values

    def _row_gradient(self, flow: Flow) -> Callable[[dict[str, Any]], Params]:
        in_layouts = [flow.inputs[k] for k in self.xs]
        out_layout = flow.outputs[self.y]
        plain = flow.ybar is None

        def call(theta: Params, xs: list[Tensor]) -> Tensor:
            """F on one row: [many, *rest] in and out."""
            placed = [x.movedim(0, layout.axis) for x, layout in zip(xs, in_layouts, strict=True)]
            return self.function(theta, placed).movedim(out_layout.axis, 0)

        def row(values: dict[str, Any]) -> Params:
            def objective(theta: Params) -> Tensor:
                xs = values["x"]
                if plain:
                    return _inner(values["b"], call(theta, xs))
                total = torch.zeros((), dtype=xs[0].dtype) if "ybar" not in values else None
                if total is None:
                    total = _inner(values["ybar"], call(theta, xs))
                if "b" in values:
                    total = total + self._second(call, theta, values)
                return total

            gradient: Params = grad(objective)(values["theta"])
            return gradient

        return row

    def _second(self, call: Any, theta: Params, values: dict[str, Any]) -> Tensor:
        """<hbar, vjp_x F(b)> + <direction, vjp_theta F(b)>."""
        xs, hbar = values["x"], values["hbar"]

        def f(theta: Params, moving: dict[str, Tensor]) -> Tensor:
            used = [moving.get(str(i), x) for i, x in enumerate(xs)]
            out: Tensor = call(theta, used)
            return out

        moving = {i: xs[int(i)] for i in hbar}
        pull = vjp(f, theta, moving)[1]
        in_theta, in_x = pull(values["b"])
        total = torch.zeros((), dtype=values["b"].dtype, device=values["b"].device)
        for i, h in hbar.items():
            total = total + _inner(h, in_x[i])
        for name, d in values.get("direction", {}).items():
            total = total + _inner(d, in_theta[name])
        return total


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.to(b.dtype) * b).sum()
