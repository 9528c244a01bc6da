"""The functional engine: ``torch.func`` over one unit at a time, vectorised with vmap.

Each unit's direction is the method's own formula applied to that unit's own loss. The model never
gets two rows together, so no layer can mix them. Every direction is materialised: memory grows as
units x parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dpbam.catalogue import is_built_in
from dpbam.engines.base import Loss, PhysicalBatch, UnsupportedModelError, check_direction
from dpbam.engines.batching import innermost
from dpbam.engines.decomposed import Decompose
from dpbam.engines.draws import KeyedDraws
from dpbam.engines.isolation import Isolation, Isolator, OnlyTorch, alone, over_rows, row_loss
from dpbam.engines.materialised import MaterialisedDirections
from dpbam.engines.state import fixed_method
from dpbam.methods import Method
from dpbam.params import Params, map_rows, trainable


class FunctionalEngine:
    """Compute directions by vmap over units.

    Args:
        model: any module; parameters that do not require a gradient are constants and cost nothing.
        loss: (output, targets) -> one value per row. It may use the model's parameters.
        groups: the clipping group of each trainable parameter; None puts all in one.
    """

    name = "functional"

    def __init__(self, model: nn.Module, loss: Loss, groups: Mapping[str, int] | None = None):
        self._model, self._loss = model, loss
        self._isolator = Isolator(model, loss)
        self._groups = groups or dict.fromkeys(trainable(model), 0)

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> MaterialisedDirections:
        """Return d_i of every unit i: the method's formula on the unit's own loss."""
        parameters = trainable(self._model)
        theta = {n: p.detach() for n, p in parameters.items()}

        def direction(rows: _Unit, unit_loss: Any) -> tuple[Params, Params, Tensor]:
            at_theta: Params = {}
            losses: list[Tensor] = []  # at theta
            hidden: list[bool] = []  # of calls whose values have no graph of their own

            def gradient(values: Params) -> Params:
                g, value = grad(unit_loss, has_aux=True)(values, rows)
                if not any(innermost(v).requires_grad for v in values.values()):
                    hidden.append(innermost(value).requires_grad)
                # the same tensors, in whatever dict: a method may begin elsewhere than at theta
                if all(values[n] is t for n, t in theta.items()):
                    losses.append(value.detach())
                    if plain and not at_theta:
                        at_theta.update({n: t.clone() for n, t in g.items()})  # d may overwrite g
                return dict(g)

            with nullcontext() if _is_built_in(method) else OnlyTorch():
                d = method.direction(gradient, dict(theta), lam)
            check_direction(d, theta)
            if not hidden or (plain and not at_theta):
                gradient(theta)
            if any(hidden):  # the loss depends on a parameter itself, not on its substitute
                raise UnsupportedModelError(
                    "a parameter is used where torch functions cannot be intercepted"
                )
            unknown = rows[2].new_full((), torch.nan, dtype=torch.float32)
            return dict(d), at_theta, losses[0] if losses else unknown

        def run(watch: Isolation) -> tuple[Params, Params, Tensor]:
            unit_loss = self._unit_loss(batch, parameters, watch)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                results: tuple[Params, Params, Tensor] = over_rows(
                    lambda unit: direction(unit, unit_loss), _by_unit(batch)
                )
            return results

        with nullcontext() if _is_built_in(method) else fixed_method(method):
            d, g, losses = self._isolator.run(run)
        plain_directions = MaterialisedDirections(g, self._groups, losses) if plain else None
        return MaterialisedDirections(d, self._groups, losses, plain_directions)

    def _unit_loss(
        self, batch: PhysicalBatch, parameters: Mapping[str, nn.Parameter], watch: Isolation
    ) -> Callable[[Params, _Unit], tuple[Tensor, Tensor]]:
        """Return theta -> (L_u, L_u): the mean over the unit's rows, each run alone."""

        def one_row(theta: Params, inputs: Any, targets: Any, key: Tensor) -> Tensor:
            around = watch.around(Substitute(parameters, theta), KeyedDraws(key), Decompose())
            return row_loss(self._model, self._loss, (inputs, targets), around)[0]

        def unit_loss(theta: Params, unit: _Unit) -> tuple[Tensor, Tensor]:
            inputs, targets, keys = unit
            if batch.rows_per_unit == 1:
                value = one_row(theta, inputs, targets, keys[0])
                return value, value
            rows = (*alone((inputs, targets)), keys)
            values: Tensor = over_rows(lambda row: one_row(theta, *row), rows)
            total = batch.total(values)
            return total, total

        return unit_loss


class Substitute(TorchFunctionMode):
    """Substitute other values for parameters, wherever a torch function takes them.

    By identity of the parameter, also in submodules registered twice, tied weights and losses.
    Results under ``no_grad`` and of ``.data`` have no derivative in forward mode either.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], values: Params) -> None:
        super().__init__()
        self._values = {id(p): values[n] for n, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(map(self._put, args))
        out = func(*args, **{k: self._put(v) for k, v in (kwargs or {}).items()})
        if torch.is_grad_enabled() and func != _DATA:  # not ``is``: a new object at each access
            return out
        if isinstance(out, Tensor) and any(out is a for a in args):
            raise UnsupportedModelError(
                f"{getattr(func, '__name__', func)} writes in place without a gradient"
            )
        return _without_tangents(out)

    def _put(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._values.get(id(leaf), leaf)
        return type(leaf)(map(self._put, leaf)) if type(leaf) in (list, tuple) else leaf


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def _without_tangents(out: Any) -> Any:
    """Return ``out`` detached: torch's ``no_grad`` only stops backward mode."""
    if isinstance(out, Tensor):
        return out.detach()
    return type(out)(map(_without_tangents, out)) if type(out) in (list, tuple) else out


def _is_built_in(method: Method) -> bool:
    """Whether all code of the direction comes with dpbam."""
    function = getattr(method.direction, "__func__", None)
    inner = getattr(method, "inner", None)
    return is_built_in(function) and (inner is None or _is_built_in(inner))


_Unit = tuple[Any, Any, Tensor]  # inputs, targets and keys of one unit's rows


def _by_unit(batch: PhysicalBatch) -> _Unit:
    """Return [U R, ...] rows as [U, R, ...]."""
    rows = (batch.inputs, batch.targets, batch.row_keys())
    by_unit: _Unit = map_rows(lambda t: t.reshape(-1, batch.rows_per_unit, *t.shape[1:]), rows)
    return by_unit
