"""Describe a model whose code is torch's and dpbam's own, so that two of them can be compared.

Two models with the same description differ in the values of their weights alone. So a step of one
takes the memory of a step of the other. Whatever cannot be described completely (a layer, a hook or
a function of the user's own, a replaced ``forward``) has no description.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules
from torch.utils._pytree import tree_flatten

from dpbam.catalogue import is_built_in
from dpbam.engines.base import PhysicalBatch

_LAYERS = ("torch.nn.modules.", "dpbam.")
_VALUES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.layout)
_LAM = "lam"  # a method's, which may be a schedule: its value at the step counts


class _UnknownError(Exception):
    """Something cannot be described."""


def describe(
    model: nn.Module, loss: Any, method: Any, samples: list[PhysicalBatch]
) -> Hashable | None:
    """Return what memory and speed of a step depend on, or None if that is not known.

    Example:
        >>> def of(model):
        ...     return describe(model, nn.functional.mse_loss, None, [])
        >>> of(nn.Linear(2, 3)) == of(nn.Linear(2, 3)), of(nn.Linear(2, 3)) == of(nn.Linear(3, 2))
        (True, False)
        >>> hooked = nn.Linear(2, 3)
        >>> handle = hooked.register_forward_hook(lambda module, inputs, output: None)
        >>> of(hooked) is None
        True
    """
    describer = _Describer()
    if _modules._global_forward_hooks or _modules._global_forward_pre_hooks:
        return None
    try:
        return (
            describer.of(model), describer.of(loss), describer.method(method),
            *(describer.batch(sample) for sample in samples),
            *(_autocast(device) for device in ("cpu", "cuda")),
        )  # fmt: skip
    except _UnknownError:
        return None


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class _Describer:
    """Numbers tensors and modules in the order in which they are met, so that ties count."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Hashable:
        """Return a description of any value.

        Raises:
            _UnknownError: for what is not torch's or dpbam's own.
        """
        if isinstance(value, _VALUES):
            return type(value), value
        if isinstance(value, Tensor | nn.Module):
            if id(value) in self._seen:
                return "seen", self._seen[id(value)][0]
            self._seen[id(value)] = (len(self._seen), value)
            return self._tensor(value) if isinstance(value, Tensor) else self._module(value)
        if isinstance(value, Mapping):
            return type(value), tuple((self.of(k), self.of(v)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.of, value))
        if isinstance(value, set | frozenset) and all(isinstance(v, str) for v in value):
            return type(value), tuple(sorted(value))
        if isinstance(value, weakref.ref):  # recurrent layers hold their weights twice
            return "reference", self.of(value())
        if isinstance(value, BuiltinFunctionType | FunctionType) and _of_torch(value):
            return value  # the object itself: kept as long as the description is
        raise _UnknownError

    def method(self, method: Any) -> Hashable:
        """Describe a method of dpbam's own without its lambda; None is no method."""
        if method is None:
            return None
        if not is_built_in(type(method)):
            raise _UnknownError
        options = [(k, v) for k, v in sorted(vars(method).items()) if k.lstrip("_") != _LAM]
        return type(method), tuple(
            (k, self.method(v) if is_built_in(type(v)) else self.of(v)) for k, v in options
        )

    def batch(self, batch: PhysicalBatch) -> Hashable:
        """Describe the form of a physical batch, and how its rows make up units."""
        leaves, form = tree_flatten((batch.inputs, batch.targets))
        rows = [None if leaf is None else self._tensor(leaf) for leaf in leaves]
        return batch.units, batch.rows_per_unit, str(form), tuple(rows)

    def _tensor(self, t: Tensor) -> Hashable:
        if type(t) not in (Tensor, nn.Parameter) or t._backward_hooks:
            raise _UnknownError
        return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, type(t)

    def _module(self, module: nn.Module) -> Hashable:
        kind = type(module)
        if not kind.__module__.startswith(_LAYERS) or "forward" in vars(module):
            raise _UnknownError
        return kind, tuple((name, self.of(value)) for name, value in vars(module).items())


def _of_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    owner = getattr(getattr(function, "__self__", None), "__name__", "")  # torch.relu has no module
    return module.partition(".")[0] == "torch" or owner == "_VariableFunctionsClass"
