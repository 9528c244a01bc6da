"""How an engine shows a model its rows: one at a time, inside ``vmap``, with nothing kept.

Within a pass rows cannot mix: the model sees one row, and torch's batching rules do the rest. What
is left is closed here:

=============================  ==================================================================
a way for rows to meet         how it is closed
=============================  ==================================================================
a tensor kept by the model     every tensor of the rows must be gone after the pass
                               (:func:`check_nothing_kept`)
a buffer or attribute          must be what it was before (:class:`ModelState`)
code with its own batching     custom functions and operators that are not torch's are refused
rule, nested transforms
hooks on gradients             refused: the engines would ignore them
printing a tensor              shows the shape alone
random draws                   keyed by the row (:mod:`dpbam.engines.draws`)
=============================  ==================================================================

Not seen: what a model keeps as Python numbers or in numpy arrays outside its modules (under vmap a
tensor's values cannot become either), TorchScript functions that a model calls without holding them
as modules, and code that reaches behind vmap on purpose (``torch.func.debug_unwrap``, a
``TorchDispatchMode``).
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import vmap
from torch.nn.modules import module as _modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpbam.engines.attention_masks import explicit_masks
from dpbam.engines.base import (
    Loss,
    StatefulModelError,
    UnsupportedModelError,
    call_model,
    per_row_loss,
)
from dpbam.engines.batching import depth, is_wrapped

_PRINTING = {Tensor.__repr__, Tensor.__format__}
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_HOOKS = {
    Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook,
}  # fmt: skip
_NO_HOOKS = "vmap cannot run hooks on saved tensors (gradient checkpointing)"
_VMAP_WORDS = (
    "vmap",
    "functorch",
    "atching rule",
    "transform",
    "saved tensor",
)
_FREEZING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_Result = TypeVar("_Result")
_PLAIN = (bool, int, float, str, bytes, type(None))


def row_loss(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    """Return the loss of one row, a scalar: the model and the loss see a batch of one.

    Args:
        model: the model.
        loss: (output, targets) -> one value per row.
        inputs: one row, without the batch axis.
        targets: likewise.
    """
    inputs, targets = tree_map(_batch_of_one, (inputs, targets))
    value: Tensor = per_row_loss(loss, call_model(model, inputs), targets, 1)[0]
    return value


def over_rows(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``function`` of each row of a tree of [N, ...] tensors, by vmap; None stays None.

    Random draws are refused: those of the model have been keyed before they come to torch.
    """
    leaves, spec = tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def row(*parts: Tensor) -> Any:
        one = list(leaves)
        for i, part in zip(places, parts, strict=True):
            one[i] = part
        return function(tree_unflatten(one, spec))

    return vmap(row, randomness="error")(*(leaves[i] for i in places))


def _batch_of_one(leaf: Any) -> Any:
    return leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf


class Isolation(TorchFunctionMode):
    """Watches what a model does with one row, as the innermost mode around it.

    Enter it in every row function of one vmapped pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def __enter__(self) -> Isolation:
        self._depth = depth()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _PRINTING:
            return f"<tensor of one row, shape {tuple(args[0].shape)}>"
        reason = _unserved(func)
        if reason is None and depth() != self._depth:
            reason = "the model applies a torch.func transform of its own"
        if reason is not None:
            raise UnsupportedModelError(reason)
        return func(*args, **(kwargs or {}))


def check_nothing_kept() -> None:
    """Refuse if a tensor of the rows outlives the pass, wherever it is kept.

    While a pass runs, the garbage collector is off, so what it made is in the youngest generation.

    Raises:
        StatefulModelError: the next pass could read it, row by row.
    """
    if not any(map(_is_of_a_row, gc.get_objects(generation=0))):
        return
    gc.collect()  # what is left in reference cycles goes
    kept = [t for t in gc.get_objects() if _is_of_a_row(t)]
    if kept:
        raise StatefulModelError(
            f"the model keeps a tensor of shape {tuple(kept[0].shape)} that was computed from the "
            "samples (in an attribute, a list, a global, a closure or a hook): what one step "
            "keeps, another could use; compute it anew in each forward pass"
        )


def _is_of_a_row(thing: Any) -> bool:
    return issubclass(type(thing), Tensor) and is_wrapped(thing)


def _unserved(func: Any) -> str | None:
    """Return why isolation cannot be shown for a call of ``func``, or None."""
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
    """What a forward pass must leave as it was: buffers, parameters and module attributes.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> state = ModelState(model)
        >>> model.calls = 1
        >>> state.check()
        Traceback (most recent call last):
        dpbam.engines.base.StatefulModelError: the forward pass changes calls of Linear, ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(name, m, _contents(m)) for name, m in model.named_modules()]

    def check(self) -> None:
        """Compare with the model as it is now.

        Raises:
            StatefulModelError: with the name of what was changed.
        """
        for path, module, before in self._before:
            now = _contents(module)
            for key in before.keys() | now.keys():
                if not _same(before.get(key, _MISSING), now.get(key, _MISSING)):
                    where = f"{path}.{key}" if path else key
                    raise StatefulModelError(
                        f"the forward pass changes {where} of {type(module).__name__}, which "
                        "outlives it: the samples of one step could reach another, and the "
                        "published model, without noise; compute it anew in each forward pass, or "
                        "update it outside forward"
                    )


_MISSING = object()
_REGISTERED = ("_parameters", "_buffers", "_modules")


def _contents(module: nn.Module) -> dict[str, Any]:
    """Return attributes by name; tensors with their versions."""
    held = {k: v for k, v in vars(module).items() if k not in _REGISTERED}
    for registered in _REGISTERED:
        held.update(getattr(module, registered))
    for name, value in held.items():
        if isinstance(value, Tensor) and is_wrapped(value):
            raise StatefulModelError(f"{name} of {type(module).__name__} is of an earlier pass")
    return {k: (v, v._version) if isinstance(v, Tensor) else _shallow(v) for k, v in held.items()}


def _shallow(value: Any) -> Any:
    """Return a copy of a plain container, so that a change of it is seen."""
    if type(value) in (list, tuple, set):
        return (type(value), *value)
    return (dict, *value.items()) if type(value) is dict else value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and a == b


def refuse_hidden_code(model: nn.Module, loss: Loss) -> None:
    """Refuse TorchScript, and hooks that a backward pass of torch would call and we do not.

    Raises:
        UnsupportedModelError: with the name of the module or parameter.
    """
    if isinstance(loss, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise UnsupportedModelError("the loss is TorchScript, whose steps are hidden")
    if _modules._global_backward_hooks or _modules._global_backward_pre_hooks:
        raise UnsupportedModelError(
            "a backward hook is registered for all modules, and would be ignored"
        )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise UnsupportedModelError(
                f"module {path!r} has a backward hook, which would be ignored"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"module {path!r} is a TorchScript module, whose steps are hidden"
            )
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise UnsupportedModelError(
                f"parameter {name} has a gradient hook, which would be ignored"
            )


_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # what they kept may still be there


def isolated(model: nn.Module, loss: Loss, run: Callable[[Isolation], _Result]) -> _Result:
    """Return ``run(watch)``, the vmapped passes of one physical batch; refuse what could join rows.

    Raises:
        UnsupportedModelError: for what the vmapped engines cannot see through.
        StatefulModelError: for a model that keeps something of its rows, or that did before.
    """
    if model in _REFUSED:
        raise StatefulModelError(
            "this model kept something of its samples in an earlier pass, and may still hold it: "
            "repair its forward pass and make a new model"
        )
    refuse_hidden_code(model, loss)
    state, collecting = ModelState(model), gc.isenabled()
    gc.disable()
    try:
        with disable_saved_tensors_hooks(_NO_HOOKS), explicit_masks(model):
            result = run(Isolation())
    except BaseException as error:  # the next engine must not meet what this pass left behind
        _forget_frames(error)
        _check(model, state)
        raise _explained(error) from None
    else:
        _check(model, state)
        return result
    finally:
        if collecting:
            gc.enable()


def _explained(error: BaseException) -> BaseException:
    """Return vmap's own errors as refusals, and others as they are."""
    if not isinstance(error, RuntimeError) or not any(w in str(error) for w in _VMAP_WORDS):
        return error
    first = str(error).strip().splitlines()[0]
    return UnsupportedModelError(f"torch.func.vmap cannot run the model: {first}")


def _check(model: nn.Module, state: ModelState) -> None:
    try:
        state.check()
        check_nothing_kept()
    except StatefulModelError:
        _REFUSED.add(model)
        raise


def _forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error has passed, which hold tensors; keep their text."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)))
    inner: BaseException | None = error
    while inner is not None:
        inner.__traceback__ = None
        inner = inner.__context__
