"""The reference engine: ``torch.func`` over one unit at a time, vectorised with vmap.

Short and obviously right: each unit's direction is the method's own formula applied to that
unit's own loss, and the model never sees two units together, so no layer can mix them. It forms
every direction: memory grows as units x parameters. The fused engine must agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpbam.engines.base import Loss, PhysicalBatch, call_model, per_row_loss
from dpbam.engines.dropout import KeyedDropout
from dpbam.methods import Method
from dpbam.trees import Params, accumulation_dtype, map_rows, select_rows


class FunctionalEngine:
    """Directions by vmap over units.

    Args:
        model: any module; only parameters that require a gradient are trained, the others are
            constants and cost nothing.
        loss: (output, targets) -> one value a row.
        groups: the clipping group of each trainable parameter; None puts all in one.
    """

    name = "functional"

    def __init__(self, model: nn.Module, loss: Loss, groups: Mapping[str, int] | None = None):
        self._model, self._loss = model, loss
        self._groups = groups or {n: 0 for n, p in model.named_parameters() if p.requires_grad}

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> FunctionalDirections:
        """d_i for every unit i: the method's formula on the unit's own loss."""
        parameters = dict(self._model.named_parameters())
        theta = {n: p.detach() for n, p in parameters.items() if p.requires_grad}
        constants: dict[str, Tensor] = dict(self._model.named_buffers())
        constants.update({n: p.detach() for n, p in parameters.items() if not p.requires_grad})

        def unit_loss(theta: Params, rows: _Unit) -> Tensor:
            inputs, targets, weights, keys = rows
            with KeyedDropout(keys):
                output = call_model(self._bound({**constants, **theta}), inputs)
            values = per_row_loss(self._loss, output, targets, weights.shape[0])
            return (values * weights.to(values.dtype)).sum()  # mean over views and records

        def direction(rows: _Unit) -> tuple[Params, Params]:
            seen: list[Params] = []  # the plain gradient, where the method computes it anyway

            def gradient(theta: Params) -> Params:
                g: Params = grad(unit_loss)(theta, rows)
                seen.append(g)
                return g

            d = method.direction(gradient, theta, lam)
            return d, (seen[0] if plain else {})

        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels know neither vmap nor forward mode
            d, g = vmap(direction, randomness="error")(_by_unit(batch))
        below = FunctionalDirections(g, self._groups) if plain else None
        return FunctionalDirections(d, self._groups, below)

    def _bound(self, state: dict[str, Tensor]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self._model, state, args, kwargs)

        return call


class FunctionalDirections:
    """Directions held as one tensor [U, *shape] a parameter."""

    def __init__(
        self,
        directions: Params,
        groups: Mapping[str, int],
        plain: FunctionalDirections | None = None,
    ) -> None:
        self._d = {n: d.to(accumulation_dtype(d.dtype)) for n, d in directions.items()}
        self._groups, self._plain = groups, plain

    @property
    def plain(self) -> FunctionalDirections | None:
        """The plain gradients of the same pass, if asked for."""
        return self._plain

    def norms(self) -> Tensor:
        """|d_i| by group: [G, U]."""
        count = max(self._groups.values()) + 1
        squares: list[list[Tensor]] = [[] for _ in range(count)]
        for name, d in self._d.items():
            squares[self._groups[name]].append(_rows(d).square().sum(1))
        return torch.stack([torch.stack(s).sum(0) for s in squares]).sqrt()

    def parameter_norms(self) -> dict[str, Tensor]:
        """The norm of d_i's entries by parameter: [U] each."""
        return {name: _rows(d).square().sum(1).sqrt() for name, d in self._d.items()}

    def weighted_sum(self, factors: Tensor) -> Params:
        """sum_i factors[g, i] d_i; a factor of 0 removes even a NaN."""
        return {name: _contract(factors[self._groups[name]], d) for name, d in self._d.items()}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """<d_i, vector>: [U]."""
        parts = [_rows(d) @ vector[n].to(d).flatten() for n, d in self._d.items()]
        return torch.stack(parts).sum(0)


_Unit = tuple[Any, Any, Tensor, Tensor]  # inputs, targets, weights, keys of one unit's rows


def _rows(d: Tensor) -> Tensor:
    """[U, *shape] -> [U, size], for a parameter that is one number too."""
    return d.reshape(d.shape[0], -1)


def _contract(factors: Tensor, d: Tensor) -> Tensor:
    kept = factors != 0
    if not bool(kept.all()):
        d = torch.where(kept.view(-1, *(1 for _ in d.shape[1:])), d, 0.0)  # 0 * NaN would be NaN
    return (factors.to(d.dtype) @ _rows(d)).reshape(d.shape[1:])


def _by_unit(batch: PhysicalBatch) -> _Unit:
    """[N, ...] rows -> [U, R, ...]: units with fewer rows are padded with weight 0.

    The padding repeats a row of the same unit, so that nothing of one unit can reach another.
    """
    regular = batch.rows_per_unit
    rows = (batch.inputs, batch.targets, batch.weights, batch.keys)
    if regular is not None:
        folded: _Unit = map_rows(lambda t: t.reshape(batch.units, regular, *t.shape[1:]), rows)
        return folded
    counts = torch.bincount(batch.unit, minlength=batch.units)  # [U]
    starts = counts.cumsum(0) - counts
    slots = torch.arange(int(counts.max()), device=counts.device)  # [R]
    real = slots[None, :] < counts[:, None]  # [U, R]
    index = starts[:, None] + torch.where(real, slots[None, :], 0)
    inputs, targets, weights, keys = select_rows(rows, index)
    return inputs, targets, weights * real, keys
