"""Run a model on one row at a time, inside ``vmap``, and check that it keeps nothing of the row.

Within a pass rows cannot mix: the model gets one row, and torch's batching rules do the rest. Other
channels between rows are closed here:

=============================  ==================================================================
channel                        check
=============================  ==================================================================
a tensor kept by the model     every tensor of the rows must be freed after the pass
                               (:func:`check_nothing_kept`)
a buffer or attribute          must be unchanged, in the loss too (:class:`ModelState`); writes
                               through ``.data`` are seen in small tensors on the processor
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
import weakref
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules import module as _modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpbam.engines.attention_masks import explicit_masks
from dpbam.engines.base import (
    Loss,
    StatefulModelError,
    UnsupportedModelError,
    call_model,
    check_losses,
)
from dpbam.engines.batching import depth, is_wrapped, run_rows
from dpbam.engines.generators import GENERATORS, GlobalGenerators, generator_state
from dpbam.params import map_rows, modules_of

_PRINTING = {Tensor.__repr__, Tensor.__format__}
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_HOOKS = {
    Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook,
}  # fmt: skip
_NO_HOOKS = "vmap cannot run hooks on saved tensors (gradient checkpointing)"
_VMAP_WORDS = ("vmap", "functorch", "atching rule", "transform", "saved tensor")
_FREEZING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_SPECIAL = _PRINTING | _GRADIENTS | _HOOKS | _FREEZING
_ORDINARY = {type(torch.relu), type(Tensor.relu), type(F.relu)}  # not operators
_COMPILED = "; if it calls a function under torch.compile, which keeps tensors, compile nothing"
_Result = TypeVar("_Result")
_PLAIN = (bool, int, float, str, bytes, type(None))
_UNTRACKED = {*_PLAIN}
_HOOK_TABLES = {n for n, held in vars(nn.Module()).items() if type(held) is OrderedDict}


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
    leaves, spec = tree_flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def row(tensors: list[Tensor]) -> Any:
        one = list(leaves)
        for i, tensor in zip(indices, tensors, strict=True):
            one[i] = tensor
        return function(tree_unflatten(one, spec))

    return run_rows(row, [leaves[i] for i in indices])


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
    tensors = {kind for kind in set(map(type, new)) if issubclass(kind, Tensor)}
    if not any(map(is_wrapped, [thing for thing in new if type(thing) in tensors])):
        return
    del new
    gc.collect()  # frees reference cycles
    kept = [t for t in gc.get_objects() if _is_of_a_row(t)]
    if kept:
        raise StatefulModelError(
            f"the model keeps a tensor of shape {tuple(kept[0].shape)} that was computed from the "
            "samples (in an attribute, a list, a global, a closure or a hook), where another step "
            "could read it: compute it anew in each forward pass"
            + (_COMPILED if "torch._dynamo" in sys.modules else "")
        )


def _is_of_a_row(thing: Any) -> bool:
    return issubclass(type(thing), Tensor) and is_wrapped(thing)


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


class ModelState:
    """The buffers, parameters and attributes of modules, which a forward pass must not change.

    Those of the loss count, too, where it is a module: a number of passes follows the batch's size.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        named = modules_of(model)
        if isinstance(loss, nn.Module):
            named += [(f"loss.{name}".rstrip("."), m) for name, m in modules_of(loss)]
        seen: dict[int, Any] = {}
        self._before = [(name, m, _Contents(m, seen)) for name, m in named]

    def check(self) -> None:
        """Refuse a model with an attribute that has changed, by name."""
        for path, module, before in self._before:
            key = before.changed(module)
            if key is not None:
                where = f"{path}.{key}" if path else key
                raise StatefulModelError(
                    f"the forward pass changes {where} of {type(module).__name__}, which "
                    "outlives it, so that samples of one step could reach another, and the "
                    "published model, without noise: compute it anew in each forward pass, or "
                    "update it outside forward"
                )


_MISSING = object()
_REGISTERED = ("_parameters", "_buffers", "_modules")


_STANDARD = _HOOK_TABLES | {*_REGISTERED}  # the first are not looked into, the second elsewhere


class _Contents:
    """What one module holds: its attributes, and the state of those that can change in place."""

    def __init__(self, module: nn.Module, seen: dict[int, Any]) -> None:
        self._held = [dict(live) for live in _live(module)]
        self._tensors: list[tuple[str, Tensor, Any]] = []
        self._mutable: list[tuple[str, Any, Any]] = []
        for name, value in chain.from_iterable(held.items() for held in self._held):
            if name in _STANDARD or type(value) in _UNTRACKED:
                continue
            if isinstance(value, Tensor):
                if is_wrapped(value):
                    raise StatefulModelError(
                        f"{name} of {type(module).__name__} is a tensor of an earlier pass"
                    )
                if not value.is_inference():
                    self._tensors.append((name, value, _state(value)))
            elif not (isinstance(value, nn.Module) or _is_fixed(value)):
                self._mutable += [(name, part, _state(part)) for part in _mutable(value, seen)]

    def changed(self, module: nn.Module) -> str | None:
        """Return the name of an attribute that is not as before, or None."""
        for before, now in zip(self._held, _live(module), strict=True):
            if before.keys() == now.keys() and all(map(is_, before.values(), now.values())):
                continue
            for key in before.keys() | now.keys():
                then, value = before.get(key, _MISSING), now.get(key, _MISSING)
                if not _same(_shallow(then), _shallow(value)):
                    return key
        for key, tensor, then in self._tensors:
            if not _same(_state(tensor), then):
                return key
        for key, value, then in self._mutable:
            if not _same(_state(value), then):
                return key
        return None


def _live(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module), *(getattr(module, registered) for registered in _REGISTERED)]


_SEQUENCES = (list, tuple, set, frozenset, deque)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}
_NAMESPACES = (SimpleNamespace, Namespace)  # of the standard library, and made to hold anything
_SMALL = 4096  # entries of a tensor whose values are compared


def _is_fixed(value: Any) -> bool:
    return type(value) is tuple and _UNTRACKED.issuperset(map(type, value))


def _mutable(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield what can change in place: containers, tensors and objects, also inside one another.

    Classes, modules and objects of Python's and torch's own classes are not looked into. ``seen``
    holds what was yielded before.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if type(value) in _UNTRACKED or isinstance(value, nn.Module | type) or id(value) in seen:
            continue
        parts = _parts(value)
        if parts is None and not isinstance(value, (Tensor, np.ndarray, *GENERATORS)):
            continue
        seen[id(value)] = value
        if type(value) is not tuple:
            yield value
        waiting += parts or ()


def _parts(value: Any) -> list[Any] | None:
    """Return what a container or an object holds, or None if it is neither."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, _SEQUENCES):
        return list(value)
    if type(value).__module__.partition(".")[0] in _FOREIGN and type(value) not in _NAMESPACES:
        return None
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) else None


def _shallow(value: Any) -> Any:
    """Return a copy of a container or of an object's attributes, so that changes are detected."""
    kind = type(value)
    if kind in _UNTRACKED or isinstance(value, Tensor | nn.Module | type):
        return value
    if isinstance(value, dict):
        return (kind, *value.items())
    if isinstance(value, _SEQUENCES):
        return (kind, *value)
    return value if _parts(value) is None else (value, *vars(value).items())


def _state(value: Any) -> Any:
    """Return what changes when a container, an object, a tensor or an array does."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else (value._version, _bits(value))
    if isinstance(value, GENERATORS):
        return generator_state(value)
    return value.tobytes() if isinstance(value, np.ndarray) else _shallow(value)


def _bits(value: Tensor) -> bytes | None:
    """Return the values of a small tensor, which ``.data`` and numpy change without a new version.

    Those of parameters and of other devices are not read: it would take as long as a small layer.
    """
    if isinstance(value, nn.Parameter) or value.device.type != "cpu" or value.numel() > _SMALL:
        return None
    if value.layout is not torch.strided or value.is_quantized:
        return None
    return value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and a == b


def _hidden_code(model: nn.Module, loss: Loss) -> str | None:
    """Return what in the model cannot be intercepted, or would be ignored, or None."""
    if isinstance(loss, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return "the loss is TorchScript, whose operations cannot be intercepted"
    if _modules._global_backward_hooks or _modules._global_backward_pre_hooks:
        return "a backward hook is registered for all modules, and would be ignored"
    for path, module in modules_of(model):
        if module._backward_hooks or module._backward_pre_hooks:
            return f"module {path!r} has a backward hook, which would be ignored"
        if isinstance(module, torch.jit.ScriptModule):
            return f"module {path!r} is TorchScript, whose operations cannot be intercepted"
        for name, p in module._parameters.items():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                where = f"{path}.{name}" if path else name
                return f"parameter {where} has a gradient hook, which would be ignored"
    return None


_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # they may still hold what they kept


def isolated(model: nn.Module, loss: Loss, run: Callable[[Isolation], _Result]) -> _Result:
    """Return ``run(watch)``, the vmapped passes of one physical batch, if they isolate rows.

    Raises:
        UnsupportedModelError: for operations that cannot be intercepted, or that vmap cannot run.
        StatefulModelError: for a model that keeps state between passes, now or before.
    """
    if model in _REFUSED:
        raise StatefulModelError(
            "this model kept state of its samples in an earlier pass, and may still hold it: "
            "fix its forward pass and create a new model"
        )
    if reason := _hidden_code(model, loss):
        raise UnsupportedModelError(reason)
    state, collecting = ModelState(model, loss), gc.isenabled()
    generators = GlobalGenerators()
    gc.disable()
    since = _collections()
    try:
        with disable_saved_tensors_hooks(_NO_HOOKS), explicit_masks(model):
            result = run(Isolation())
    except BaseException as error:  # the next engine must not read what this pass left
        _forget_frames(error)
        _check(model, state, since)
        generators.check()
        raise _explained(error) from None
    else:
        _check(model, state, since)
        generators.check()
        return result
    finally:
        if collecting:
            gc.enable()


def _explained(error: BaseException) -> BaseException:
    """Return vmap's own errors as refusals, and other errors unchanged."""
    if not isinstance(error, RuntimeError) or not any(w in str(error) for w in _VMAP_WORDS):
        return error
    first = str(error).strip().splitlines()[0]
    return UnsupportedModelError(f"torch.func.vmap cannot run the model: {first}")


def _check(model: nn.Module, state: ModelState, since: int) -> None:
    torch.clear_autocast_cache()  # it holds casts of the weights that vmap saw
    try:
        state.check()
        check_nothing_kept(since)
    except StatefulModelError:
        _REFUSED.add(model)
        raise


def _forget_frames(error: BaseException) -> None:
    """Drop the frames of an error's traceback, which hold tensors; keep their text as a note."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)))
    inner: BaseException | None = error
    while inner is not None:
        inner.__traceback__ = None
        inner = inner.__context__
