"""Run a model on one row at a time, inside ``vmap``, and check that it keeps nothing of the row.

Within a pass rows cannot mix: the model gets one row, and torch's batching rules do the rest. Other
channels between rows are closed here:

=============================  ==================================================================
channel                        check
=============================  ==================================================================
a tensor kept by the model     every tensor of the rows must be freed after the pass
                               (:func:`check_nothing_kept`)
a buffer or attribute          must be unchanged, in the loss too (:mod:`dpbam.engines.state`);
                               writes through ``.data``, by :meth:`dpbam.scratch.SumMemory.fixed`
code with its own batching     custom functions and operators that are not torch's are refused
rule, nested transforms
hooks on gradients             refused: the engines would ignore them
printing a tensor              prints the shape only
random draws                   keyed by the row (:mod:`dpbam.engines.draws`)
generators of random numbers   the global ones of Python, NumPy and torch, and those that modules
                               hold, must not move (:mod:`dpbam.engines.generators`)
=============================  ==================================================================

Not detected: Python numbers, numpy arrays, iterators, generators of random numbers other than the
global ones and tensors without rows that a model keeps outside its modules (under vmap a tensor's
values cannot become either; they can count passes), TorchScript functions that a model calls
without holding them as modules, and code that circumvents the checks on purpose
(``torch.func.debug_unwrap``, a ``TorchDispatchMode``, ``gc.freeze``).
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import compress
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules import module as _modules
from torch.overrides import TorchFunctionMode

from dpbam.engines.attention_masks import explicit_masks
from dpbam.engines.base import (
    Loss,
    StatefulModelError,
    UnsupportedModelError,
    call_model,
    check_losses,
)
from dpbam.engines.batching import depth, innermost, is_wrapped, run_rows
from dpbam.engines.generators import GlobalGenerators
from dpbam.engines.state import Snapshot, snapshot_modules
from dpbam.params import map_rows, modules_of, tensors_in

_PRINTING = {Tensor.__repr__, Tensor.__format__}
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_HOOKS = {
    Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook,
}  # fmt: skip
_NO_HOOKS = "vmap cannot run hooks on saved tensors (gradient checkpointing)"
_VMAP_WORDS = ("vmap", "functorch", "atching rule", "transform", "saved tensor")
_FREEZING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_HAS_GRAPH = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SPECIAL = _PRINTING | _GRADIENTS | _HOOKS | _FREEZING
_ORDINARY = {type(torch.relu), type(Tensor.relu), type(F.relu)}  # not operators
_COMPILED = "; if it calls a function under torch.compile, which keeps tensors, compile nothing"
_Result = TypeVar("_Result")
_REFUSED = "_dpbam_refused"  # attribute of a model that may still hold what it kept


def row_loss(model: nn.Module, loss: Loss, row: tuple[Any, Any], watch: Isolation) -> Tensor:
    """Return the loss of one row, [1]: the model and the loss get a batch of one, under ``watch``.

    ``row`` has inputs and targets with a batch axis of length one (:func:`alone`).
    """
    inputs, targets = row
    with watch:
        values = loss(call_model(model, inputs), targets)
    return check_losses(values, 1)


def alone(batch: Any) -> Any:
    """Return [N, ...] tensors as [N, 1, ...]: under vmap each row is a batch of one."""
    return map_rows(lambda t: t.detach().unsqueeze(1), batch)


def over_rows(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``function`` of each row of a tree of [N, ...] tensors, by vmap; None stays None.

    Random draws are refused: those of the model are keyed before they reach torch.
    """

    def row(tensors: list[Tensor]) -> Any:
        of_row = iter(tensors)
        return function(map_rows(lambda _: next(of_row), tree))

    return run_rows(row, tensors_in(tree))


class Selective(AbstractContextManager[Any], Protocol):
    """A mode that changes some functions only."""

    def intercepts(self, func: Any) -> bool: ...


class Isolation(TorchFunctionMode):
    """Refuse calls for which isolation cannot be shown, as the only mode around the model.

    Enter :meth:`around` in every row function of one vmapped pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._last: TorchFunctionMode | None = None
        self._selective: tuple[Selective, ...] = ()

    def around(self, last: TorchFunctionMode, *selective: Selective) -> Isolation:
        """Return this mode with others behind it, as if they were nested, ``last`` the outermost.

        A function that no selective mode intercepts goes to ``last`` directly: each nested mode
        would take some microseconds per call.
        """
        self._last, self._selective = last, selective
        return self

    def __enter__(self) -> Isolation:
        self._depth = depth()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        # the modes behind it hold the tensors of the pass: freed before norms are computed
        self._last, self._selective = None, ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reason = None
        if type(func) not in _ORDINARY or func in _SPECIAL:
            if func in _PRINTING:
                return f"<tensor of one row, shape {tuple(args[0].shape)}>"
            if func == _HAS_GRAPH:  # as without vmap, which hides it: code may depend on it
                return bool(func(*args) or innermost(args[0]).requires_grad)
            reason = _reason_against(func)
        if reason is None and depth() != self._depth:
            reason = "the model applies a torch.func transform of its own"
        if reason is not None:
            raise UnsupportedModelError(reason)
        assert self._last is not None
        for mode in self._selective:
            if mode.intercepts(func):
                break
        else:
            return self._last.__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with self._last, ExitStack() as nested:
            for mode in self._selective:
                nested.enter_context(mode)
            return func(*args, **(kwargs or {}))


def _collections() -> int:
    """Return how often the garbage collector has run."""
    return sum(generation["collections"] for generation in gc.get_stats())


def check_nothing_kept(since: int) -> None:
    """Refuse a model if a tensor of the rows outlives the pass, wherever it is kept.

    The garbage collector is off during a pass, so new tensors are in the youngest generation,
    unless it was run explicitly: ``since`` is :func:`_collections` before the pass.
    """
    new = gc.get_objects(generation=0 if since == _collections() else None)
    kinds = list(map(type, new))
    tensors = {kind for kind in set(kinds) if issubclass(kind, Tensor)}
    if not any(map(is_wrapped, compress(new, map(tensors.__contains__, kinds)))):
        return
    del new
    gc.collect()  # frees reference cycles
    alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and is_wrapped(t)]
    if alive:
        raise StatefulModelError(
            f"the model keeps a tensor of shape {tuple(alive[0].shape)} that was computed from the "
            "samples (in an attribute, a list, a global, a closure or a hook), where another step "
            "could read it: compute it anew in each forward pass"
            + (_COMPILED if "torch._dynamo" in sys.modules else "")
        )


class OnlyTorch(TorchFunctionMode):
    """Refuse functions with a batching rule of their own, in a method's direction.

    The model has :class:`Isolation` around it; a direction may use transforms and gradients.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reason = None if type(func) in _ORDINARY or func in _SPECIAL else _reason_against(func)
        if reason is not None:
            raise UnsupportedModelError(reason.replace("the model", "the method", 1))
        return func(*args, **(kwargs or {}))


def _reason_against(func: Any) -> str | None:
    """Return why a call of ``func`` is refused, or None."""
    if isinstance(func, HigherOrderOperator):
        return (
            f"the model calls {func._name}, whose batching rule is not torch's own (a custom "
            "autograd function, or a higher-order operator)"
        )
    if isinstance(func, OpOverload | OpOverloadPacket):
        name = str(func._qualified_op_name if isinstance(func, OpOverloadPacket) else func._name)
        if not name.startswith(("aten::", "prims::")):
            return f"the model calls the operator {name}, whose batching rule is not torch's own"
    if func in _GRADIENTS:
        return "the model computes gradients inside its forward pass"
    if func in _FREEZING:
        return "the model freezes or unfreezes tensors inside its forward pass"
    if func in _HOOKS:
        return "the model registers a hook on a gradient, which would be ignored"
    return None


def _find_hidden_code(modules: list[tuple[str, nn.Module]], loss: Loss) -> str | None:
    """Return what in the model cannot be intercepted, or would be ignored, or None."""
    if isinstance(loss, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return "the loss is TorchScript, whose operations cannot be intercepted"
    if _modules._global_backward_hooks or _modules._global_backward_pre_hooks:
        return "a backward hook is registered for all modules, and would be ignored"
    for path, module in modules:
        if module._backward_hooks or module._backward_pre_hooks:
            return f"module {path!r} has a backward hook, which would be ignored"
        if isinstance(module, torch.jit.ScriptModule):
            return f"module {path!r} is TorchScript, whose operations cannot be intercepted"
        for name, p in module._parameters.items():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                where = f"{path}.{name}" if path else name
                return f"parameter {where} has a gradient hook, which would be ignored"
    return None


class Isolator:
    """Runs the vmapped passes of one model and loss, and checks that they isolate rows."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._state: Snapshot | None = None  # of the step before, to be refreshed

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_state": None}  # it knows objects by their place in memory

    def run(self, passes: Callable[[Isolation], _Result]) -> _Result:
        """Return ``passes(watch)``, those of one physical batch, if they isolate rows.

        Raises:
            UnsupportedModelError: for operations that cannot be intercepted, or that vmap cannot
                run.
            StatefulModelError: for a model that keeps state between passes, now or before.
        """
        model = self._model
        if vars(model).get(_REFUSED):  # a copy of the model has it, too
            raise StatefulModelError(
                "this model kept state of its samples in an earlier pass, and may still hold it: "
                "fix its forward pass and create a new model"
            )
        # what the training loop has changed since the last step is not the pass's doing
        state, self._state = self._state, None
        if state is not None and not state.refresh():
            state = None
        modules = modules_of(model) if state is None else state.modules
        for _, module in modules:
            # as its forward does, which would be a change by it
            if isinstance(module, nn.RNNBase) and module._weights_have_changed():  # type: ignore[no-untyped-call]
                module._init_flat_weights()
                state = None
        if reason := _find_hidden_code(modules, self._loss):
            raise UnsupportedModelError(reason)
        state = state or snapshot_modules(model, self._loss)
        generators, collecting = GlobalGenerators(), gc.isenabled()
        gc.disable()
        since = _collections()
        try:
            with disable_saved_tensors_hooks(_NO_HOOKS), explicit_masks(model):
                result = passes(Isolation())
        except BaseException as error:  # the next engine must not read what this pass left
            _forget_frames(error)
            _check(model, state, since)
            generators.check()
            raise _explain(error) from None
        else:
            _check(model, state, since)
            generators.check()
            self._state = state
            return result
        finally:
            if collecting:
                gc.enable()


def _explain(error: BaseException) -> BaseException:
    """Return vmap's own errors as refusals, and other errors unchanged."""
    if not isinstance(error, RuntimeError) or not any(w in str(error) for w in _VMAP_WORDS):
        return error
    first = str(error).strip().splitlines()[0]
    return UnsupportedModelError(f"torch.func.vmap cannot run the model: {first}")


def _check(model: nn.Module, state: Snapshot, since: int) -> None:
    torch.clear_autocast_cache()  # it holds casts of the weights that vmap saw
    try:
        state.check()
        check_nothing_kept(since)
    except StatefulModelError:
        vars(model)[_REFUSED] = True
        raise


def _forget_frames(error: BaseException) -> None:
    """Drop the frames of an error's traceback, which hold tensors; keep their text as a note."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)))
    inner: BaseException | None = error
    while inner is not None:
        inner.__traceback__ = None
        inner = inner.__context__
