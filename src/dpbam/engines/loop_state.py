"""State that a forward pass leaves, found and refused by name, for the loop engine.

=====================  =============================================================================
:class:`Modules`       attributes and buffers of the modules that ran, and containers inside them
:class:`Surroundings`  the original model, class attributes, closures of hooks, of methods and of
                       losses, and globals that these name
:class:`MethodState`   attributes of the method, its classes' attributes and closures
:class:`Kept`          tensors computed from a record that are still alive, wherever they are kept
=====================  =============================================================================

A Python number kept elsewhere (a file, a C extension, an object of the standard library) is not
detected.
"""

from __future__ import annotations

import gc
import sys
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpbam.engines.base import Loss, StatefulModelError
from dpbam.engines.generators import GENERATORS, generator_state
from dpbam.methods import Method

_VALUES = bool | int | float | complex | str | bytes | None
_CONTAINERS: Any = list | tuple | set | frozenset | deque
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}
_NAMESPACES = (SimpleNamespace, Namespace)  # of the standard library, and made to hold anything
_MOST_LEVELS = 8


class _Watched:
    """A snapshot of named state, to compare with later."""

    whose = "the forward pass"

    def __init__(self, read: Callable[[], dict[str, Any]], *, parameters: bool) -> None:
        self._read = read
        self._same = {n: _comparison(v, parameters) for n, v in read().items()}

    def check(self) -> None:
        """Refuse state that was added, removed, replaced or written to, by name."""
        now = self._read()
        for name in {**self._same, **now}:
            if name not in self._same or name not in now or not self._same[name](now[name]):
                raise StatefulModelError(
                    f"{self.whose} changed {name}, so that one record could reach the next and "
                    "the released model: compute it from the inputs, or keep it in eval mode only"
                )


class Modules(_Watched):
    """The state of a copy of the model, and of the loss if that is a module."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(lambda: _Walk().modules(model, loss).found, parameters=False)


class Surroundings(_Watched):
    """The state of the model itself and of the code around it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        def read() -> dict[str, Any]:
            return _Walk().modules(model, loss).code(model, loss).found

        super().__init__(read, parameters=True)


class MethodState(_Watched):
    """The state of a method, and of the code of its direction."""

    whose = "the method's direction"

    def __init__(self, method: Method) -> None:
        def read() -> dict[str, Any]:
            return _Walk().method(method).found

        super().__init__(read, parameters=True)


class _Walk:
    """Collect values by name: tensors and plain values, and the size of containers."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}  # holds the objects, so that no id is reused

    def modules(self, model: nn.Module, loss: Loss) -> _Walk:
        named = {"module": model.named_modules()}
        if isinstance(loss, nn.Module):
            named["the loss's module"] = loss.named_modules()
        owners = {
            module: f"{kind} {path!r} ({type(module).__name__})"
            for kind, modules in reversed(named.items())
            for path, module in modules
        }
        self._seen |= {id(module): module for module in owners}
        for module, owner in owners.items():
            self._module(owner, module)
        if not isinstance(loss, nn.Module):
            self._value("the loss", loss, 0)
        return self

    def code(self, model: nn.Module, loss: Loss) -> _Walk:
        classes = {c for module in model.modules() for c in type(module).__mro__}
        for name, p in model.named_parameters():
            self._value(f"a hook of parameter {name!r}", p._backward_hooks, 1)
        for cls in {*classes, *type(loss).__mro__}:
            if not _foreign(cls):
                for name, value in list(vars(cls).items()):
                    self._value(f"class attribute {cls.__name__}.{name}", value, 1)
        return self

    def method(self, method: Method) -> _Walk:
        self._value("the method", method, 0)
        for cls in type(method).__mro__:
            if not _foreign(cls):
                for name, value in list(vars(cls).items()):
                    self._value(f"class attribute {cls.__name__}.{name}", value, 1)
        return self

    def _module(self, owner: str, module: nn.Module) -> None:
        for name, value in list(vars(module).items()):
            if name == "_buffers":
                for key, buffer in value.items():
                    self._value(f"buffer {key!r} of {owner}", buffer, 1)
            else:
                self._value(f"attribute {name!r} of {owner}", value, 1)

    def _value(self, name: str, value: Any, level: int) -> None:
        if isinstance(value, Tensor | np.ndarray | _VALUES):
            self.found[name] = value
            return
        if isinstance(value, GENERATORS):
            self.found[name] = generator_state(value)
            return
        self.found[name] = _size(value)
        if id(value) in self._seen or level > _MOST_LEVELS:
            return
        self._seen[id(value)] = value
        for key, part in _parts(value):
            self._value(f"{key} of {name}" if level == 0 else f"{name}[{key}]", part, level + 1)


class _Size(NamedTuple):
    """A container's kind and length, or another object's identity."""

    kind: Any
    length: int


def _size(value: Any) -> _Size:
    if isinstance(value, Mapping | _CONTAINERS):
        return _Size(type(value), len(value))
    return _Size(value, 0)


def _comparison(value: Any, parameters: bool) -> Callable[[Any], bool]:
    """Return the test whether a later value is the same."""
    if isinstance(value, _Size):
        return partial(_same_size, value)
    if isinstance(value, Tensor):
        copied = parameters or not isinstance(value, nn.Parameter)
        copy = value.detach().clone() if copied else None
        return partial(_same_tensor, value, _version(value), copy)
    if isinstance(value, np.ndarray):
        content = value.tobytes()
        return lambda now: now is value and now.tobytes() == content
    return partial(_same_value, value)


def _same_size(before: _Size, now: Any) -> bool:
    if not isinstance(now, _Size) or before.length != now.length:
        return False
    a, b = before.kind, now.kind
    methods = isinstance(a, MethodType) and isinstance(b, MethodType)  # new at each access
    return a is b or (methods and a.__self__ is b.__self__ and a.__func__ is b.__func__)


def _same_tensor(before: Tensor, version: int | None, copy: Tensor | None, now: Any) -> bool:
    """Whether it is the same object, not written to, not even through ``.data``."""
    if now is not before or _version(now) != version:
        return False
    return copy is None or bits_equal(copy, now.detach())


def _same_value(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    return bool(before == now) or (before != before and now != now)


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object or a class holds, by name, except modules and foreign objects."""
    if isinstance(value, Mapping):
        yield from ((repr(key), part) for key, part in list(value.items()))
    elif isinstance(value, _CONTAINERS):
        yield from ((str(key), part) for key, part in enumerate(list(value)))
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        yield from (("object", value.__self__), ("function", value.__func__))
    elif isinstance(value, staticmethod | classmethod):
        yield "function", value.__func__
    elif isinstance(value, property):
        yield "function", value.fget
    elif isinstance(value, type):
        yield from (() if _foreign(value) else list(vars(value).items()))
    elif isinstance(value, (*_NAMESPACES, nn.Module)) or not _foreign(type(value)):
        yield from ((key, part) for key, part in list(getattr(value, "__dict__", {}).items()))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield attributes, defaults, closure variables, and the globals that it names."""
    if _foreign(function):
        return
    yield "default arguments", function.__defaults__
    yield "keyword-only default arguments", function.__kwdefaults__
    yield from (("attribute " + name, part) for name, part in list(vars(function).items()))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":  # of super(): the class that the function was found in
            continue
        try:
            yield "closure variable " + name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = function.__code__.co_names
    for name in names:
        part = function.__globals__.get(name)
        if isinstance(part, ModuleType) and not _belongs_to_libraries(part.__name__):
            read = [(f"{name}.{key}", vars(part)[key]) for key in names if key in vars(part)]
        else:
            read = [(name, part)]
        yield from (("global " + key, value) for key, value in read if _can_change(function, value))


def _can_change(function: FunctionType, value: Any) -> bool:
    """Whether a global of a function may hold state: a value, a container, an object, a namespace.

    Of functions only those of the same module are followed.
    """
    if isinstance(value, FunctionType):
        return value.__module__ == function.__module__
    if isinstance(value, Tensor | np.ndarray | _VALUES | _CONTAINERS | dict):
        return True
    if isinstance(value, _NAMESPACES):
        return True
    if isinstance(value, GENERATORS):
        return True
    return not isinstance(value, ModuleType) and not _foreign(
        value if isinstance(value, type) else type(value)
    )


def _foreign(definition: Any) -> bool:
    """Whether a class or function belongs to Python, torch or numpy: trusted to keep nothing."""
    return _belongs_to_libraries(definition.__module__ or "")


def _belongs_to_libraries(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


class Kept(TorchFunctionMode):
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
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(self._has(t) for t in given):
            return func(*args, **(kwargs or {}))
        versions = [_version(t) for t in given]
        result = func(*args, **(kwargs or {}))
        self._add(result)
        for t, version in zip(given, versions, strict=True):
            if _version(t) != version:
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
