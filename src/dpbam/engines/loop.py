"""The loop engine: one unit at a time by ordinary autograd, for every method.

It supports any model that runs on a batch of one record: data-dependent branches, dynamic shapes,
packed sequences, gradient checkpointing, ``autograd.grad`` inside forward, any
``autograd.Function``. It is slow, computes directions by no code of the other engines, and is their
reference in the tests.

Isolation. The model gets one row at a time, on a copy of its modules that no other unit has used;
the copies share the parameters. State that a forward pass could leave is refused, by name: see
:mod:`dpbam.engines.state`. The first unit's loss is computed before all others and after
them, and must be the same bit for bit; otherwise state outside the model carries over. Before the
first record an engine runs a row without one (:mod:`dpbam.engines.synthetic`): what a model fixes
at its first use, where no check sees it, is then not taken from a record.

The direction, with g_i the gradient of unit i's loss by ``torch.autograd``:

========================  ======================================================================
exact BAM                 g_i + p H_i g_i / |g_i| by double backward; a detached use of a
                          parameter is a constant
all other methods         the method's own formula; the gradient at another theta is that of the
                          plain loss with the whole forward pass there, detached uses included
========================  ======================================================================
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpbam.engines.base import (
    Loss,
    PhysicalBatch,
    StatefulModelError,
    UnsupportedModelError,
    call_model,
    check_direction,
    per_row_loss,
)
from dpbam.engines.batching import is_wrapped
from dpbam.engines.draws import KeyedDraws, OnlyKeyedDraws
from dpbam.engines.generators import GlobalGenerators
from dpbam.engines.materialised import MaterialisedDirections
from dpbam.engines.state import bits_equal, fixed_method, snapshot_code, snapshot_copies
from dpbam.engines.synthetic import synthetic_units
from dpbam.methods import Method, Penalised, form_of
from dpbam.params import (
    Params,
    accumulation_dtype,
    add,
    inner,
    map_rows,
    norm,
    unit_vector,
    version_of,
)

_passes, _lock = 0, threading.Lock()


class LoopEngine:
    """Compute directions one unit at a time.

    Args:
        model: any module that runs on a batch of one record.
        loss: (output, targets) -> one value per row; it may use parameters of the model.
        groups: the clipping group of each trainable parameter; None puts all in one.
    """

    name = "loop"

    def __init__(self, model: nn.Module, loss: Loss, groups: Mapping[str, int] | None = None):
        self._model, self._loss = model, loss
        self._groups = groups or {n: 0 for n, p in model.named_parameters() if p.requires_grad}
        self._used = False

    def directions(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> MaterialisedDirections:
        if not self._used:
            # at the first copy Python notes the slots of a class in it: a change by no record
            _copy(self._model, self._loss)
            self._use_first(batch, method, lam, plain=plain)
            self._used = True
        return self._compute(batch, method, lam, plain=plain)

    def _use_first(self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool) -> None:
        """Run a unit without a record, or raise what the model raises on each of them."""
        errors: list[Exception] = []
        for unit in synthetic_units(batch):
            try:
                self._compute(unit, method, lam, plain=plain)
            except (StatefulModelError, torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                errors.append(error)
            else:
                return
        errors[0].add_note(
            "this was a row without a record (numbers between 0 and 1, and whole numbers 0 or 1), "
            "on which a model must run before the loop engine gives it a record"
        )
        raise errors[0]

    def _compute(
        self, batch: PhysicalBatch, method: Method, lam: float, *, plain: bool = False
    ) -> MaterialisedDirections:
        theta = _Theta(self._model)
        surroundings, generators = snapshot_code(self._model, self._loss), GlobalGenerators()
        directions: list[Params] = []
        gradients: list[Params] = []
        losses: list[Tensor] = []
        with (
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            theta.restored(),
            _no_accumulation(),
            fixed_method(method),
        ):
            before = self._loss_of(0, batch, theta)
            for u in range(batch.units):
                with self._unit(u, batch, theta) as unit:
                    directions.append(_direction(unit, method, lam))
                    if plain:
                        gradients.append(_widen(unit.gradient(theta.public)))
                    losses.append(unit.loss_at_theta)
            after = self._loss_of(0, batch, theta)
            generators.check()
            surroundings.check()
            theta.check(method)
        _check_repeatable(before, after)
        each_loss = torch.stack(losses)
        plain_directions = (
            MaterialisedDirections(_stack(gradients), self._groups, each_loss) if plain else None
        )
        return MaterialisedDirections(_stack(directions), self._groups, each_loss, plain_directions)

    def _loss_of(self, u: int, batch: PhysicalBatch, theta: _Theta) -> Tensor:
        with self._unit(u, batch, theta) as unit:
            return unit.loss().detach()

    @contextmanager
    def _unit(self, u: int, batch: PhysicalBatch, theta: _Theta) -> Iterator[_Unit]:
        """Run unit u on a copy of the modules, and check that it leaves no state."""
        model, loss = _copy(self._model, self._loss)
        copies, tensors = snapshot_copies(model, loss), TrackedTensors()
        yield _Unit(model, loss, batch, u, theta, tensors)
        copies.check()
        del model, loss, copies  # frees what the copies hold
        tensors.check()


class _Theta:
    """The trainable parameters by identity, and their values at the start.

    Other values are written into the parameters' own storage, so that every use moves with them,
    in the model and in the loss, tied or detached. A method gets copies, ``public``: what it wrote
    into the values themselves would reach the model, unclipped and without noise.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.values = {n: p.detach().clone() for n, p in self.parameters.items()}
        self.public = {n: t.clone() for n, t in self.values.items()}

    def check(self, method: Method) -> None:
        """Refuse a method that wrote into its theta."""
        for name, value in self.values.items():
            if not bits_equal(self.public[name], value):
                raise StatefulModelError(
                    f"the direction of {method.name} changes {name} of theta in place, where the "
                    "next unit reads it: compute new tensors, such as params.add(theta, shift)"
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the values of the start after the block."""
        try:
            yield
        finally:
            self._write(self.values)

    @contextmanager
    def at(self, values: Params) -> Iterator[None]:
        """Set the parameters to ``values`` in the block; restore them, bit for bit, after it."""
        if all(values[n] is t for n, t in self.public.items()):
            yield
            return
        if any(map(is_wrapped, values.values())):
            raise UnsupportedModelError(
                "the loop engine gives a method gradients that torch.func cannot differentiate: "
                "declare the form of its direction (dpbam.methods.computed_as), or use "
                "engine='functional'"
            )
        with self.restored():
            self._write(values)
            yield

    def _write(self, values: Params) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(values[name])  # no new version: no graph is alive
        torch.clear_autocast_cache()  # it holds casts of the previous values


class _Unit:
    """One unit's loss and gradients, on a copy of the model."""

    def __init__(
        self, model: nn.Module, loss: Loss, batch: PhysicalBatch, unit: int, theta: _Theta,
        tensors: TrackedTensors,
    ) -> None:  # fmt: skip
        self._model, self._loss, self._batch, self._unit = model, loss, batch, unit
        self.theta, self._tensors = theta, tensors
        self.loss_at_theta = torch.tensor(torch.nan)

    def loss(self) -> Tensor:
        """Return the mean of L_r over the unit's rows, each run alone: scalar."""
        r = self._batch.rows_per_unit
        losses = [self._row(i) for i in range(self._unit * r, (self._unit + 1) * r)]
        return self._batch.total(torch.cat(losses))

    def _row(self, i: int) -> Tensor:
        batch = self._batch
        inputs, targets = map_rows(lambda t: t[i : i + 1], (batch.inputs, batch.targets))
        with self._tensors.watching((inputs, targets)), KeyedDraws(batch.row_keys()[i]):
            output = call_model(self._model, inputs)
            return per_row_loss(self._loss, output, targets, 1)

    def gradient(self, values: Params) -> Params:
        """Return the gradient of the unit's loss with the parameters at ``values``."""
        with self.theta.at(values):
            loss = self.loss()
            if all(values[n] is t for n, t in self.theta.public.items()):
                self.loss_at_theta = loss.detach()
            return self._tree(self._autograd(loss))

    def penalise(self, penalty: float) -> Params:
        """Return the gradient of L + penalty |g|: g + penalty H g / |g|, or g where g = 0."""
        loss = self.loss()
        self.loss_at_theta = loss.detach()
        graph = self._tree(self._autograd(loss, create_graph=True))
        g = {n: t.detach() for n, t in graph.items()}
        if not bool(norm(g) > 0):  # NaN too: clipping drops the unit
            return g
        u = unit_vector(g)
        curved = {n: t for n, t in graph.items() if t.requires_grad}
        if not curved:
            return g
        return add(g, self._tree(self._autograd(inner(curved, u))), penalty)

    def _autograd(self, value: Tensor, *, create_graph: bool = False) -> list[Tensor | None]:
        wanted = list(self.theta.parameters.values())
        if not value.requires_grad:
            return [None] * len(wanted)
        return list(_run_backward(value, tuple(wanted), create_graph=create_graph))

    def _tree(self, gradients: list[Tensor | None]) -> Params:
        named = self.theta.parameters.items()
        return {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(named, gradients, strict=True)
        }


def _direction(unit: _Unit, method: Method, lam: float) -> Params:
    form = form_of(method, lam)
    if isinstance(form, Penalised):  # BAM's own formula has a jvp, which this engine has not
        exact = form.penalty > 0
        return _widen(unit.penalise(form.penalty) if exact else unit.gradient(unit.theta.public))
    d = method.direction(unit.gradient, dict(unit.theta.public), lam)
    check_direction(d, unit.theta.values)
    return _widen(d)


def _widen(d: Params) -> Params:
    return {n: t.detach().to(accumulation_dtype(t.dtype)) for n, t in d.items()}


def _stack(units: list[Params]) -> Params:
    """Return the directions of all units: [U, *shape] per parameter."""
    return {name: torch.stack([d[name] for d in units]) for name in units[0]}


def _run_backward(
    value: Tensor, wanted: tuple[Tensor, ...], *, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad``, and refuse random draws.

    That function would hide a checkpointed segment from a mode around it: the mode is disabled
    while it handles a call.
    """
    try:
        with OnlyKeyedDraws():  # type: ignore[no-untyped-call]
            return cast(
                tuple[Tensor | None, ...],
                _engine_run_backward(
                    (value,), (torch.ones_like(value),), create_graph, create_graph, wanted,
                    allow_unreachable=True, accumulate_grad=False,
                ),
            )  # fmt: skip
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedModelError(
            "checkpoint(use_reentrant=True) writes gradients of single records into .grad: pass "
            "use_reentrant=False"
        ) from None


@contextmanager
def _no_accumulation() -> Iterator[None]:
    """Refuse ``backward``, which adds to ``.grad``, in forward and in an ``autograd.Function``.

    The copies of a model share what its code closes over. A tensor there would get the gradient of
    a record, neither clipped nor noised. The refusal holds in all threads, since backward has some
    of its own.
    """
    _count_passes(1)
    try:
        yield
    finally:
        _count_passes(-1)


def _count_passes(change: int) -> None:
    global _passes
    with _lock:
        _passes += change
        torch.autograd._engine_run_backward = _returning if _passes else _engine_run_backward  # type: ignore[attr-defined]


def _returning(*args: Any, **options: Any) -> Any:
    """Run what ``torch.autograd.grad`` runs, and refuse what ``backward`` does."""
    if options.get("accumulate_grad"):
        raise UnsupportedModelError(
            "backward() inside a pass of the model writes gradients of single records into .grad: "
            "use torch.autograd.grad, which returns them"
        )
    return _engine_run_backward(*args, **options)


def _copy(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
    """Return copies of both that share the model's parameters and no other state."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    try:
        return copy.deepcopy((model, loss), memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"the loop engine runs each unit on a copy of the model, and copy.deepcopy fails on it "
            f"({error}): keep objects that cannot be copied out of the model"
        ) from error


def _check_repeatable(before: Tensor, after: Tensor) -> None:
    if torch.equal(before, after) or bool(before.isnan() & after.isnan()):
        return
    raise StatefulModelError(
        f"the loss of one record was {before.item()!r} before the others were computed and "
        f"{after.item()!r} after them: forward must not depend on earlier calls, so keep no state "
        "outside the model, and draw random numbers with torch.nn.Dropout only"
    )


class TrackedTensors(TorchFunctionMode):
    """Track the tensors computed from a record, which must be freed afterwards.

    A result is tracked if an argument is, and so is a tensor that is written to in such a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._record: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def watching(self, record: Any) -> Iterator[None]:
        """Track the tensors of ``record`` through all calls in the block."""
        self._add(record)
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(self._has(t) for t in tensors):
            return func(*args, **(kwargs or {}))
        versions = [version_of(t) for t in tensors]
        result = func(*args, **(kwargs or {}))
        self._add(result)
        for t, version in zip(tensors, versions, strict=True):
            if version_of(t) != version:
                self._add(t)
        return result

    def check(self) -> None:
        """Refuse a model while a tensor of the record is alive, with its shape."""
        if not self._alive():
            return
        gc.collect()  # frees reference cycles
        if alive := self._alive():
            raise StatefulModelError(
                f"the forward pass keeps a tensor of shape {tuple(alive[0].shape)} that was "
                "computed from a record (in a list, a global, a closure or a hook), where the next "
                "record could read it: compute it anew in each forward pass"
            )

    def _alive(self) -> list[Tensor]:
        return [t for ref in self._record.values() if (t := ref()) is not None]

    def _has(self, t: Tensor) -> bool:
        ref = self._record.get(id(t))
        return ref is not None and ref() is t

    def _add(self, tree: Any) -> None:
        for t in tree_leaves(tree):
            if isinstance(t, Tensor) and not isinstance(t, nn.Parameter):
                self._record[id(t)] = weakref.ref(t)
