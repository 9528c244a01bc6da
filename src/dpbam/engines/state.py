"""What a pass must not change: snapshots of objects, compared with them afterwards.

A :class:`Snapshot` walks over everything that it can reach, and holds each object that can change
in place together with what it contained. A change anywhere is then a change of an object that it
holds: the comparison needs no second walk. Two walks differ in depth:

===========================  ======================================================================
:func:`snapshot_modules`     attributes and buffers of modules, and containers, objects, arrays and
                             generators inside them; of the loss too, where it is a module
:func:`snapshot_code`        that, and class attributes, hooks, closures and defaults of functions,
                             and the globals that functions name
:func:`fixed_method`         attributes of a method, its classes' attributes and closures
===========================  ======================================================================

A number kept elsewhere (a file, a C extension, an object of the standard library) is not detected.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, zip_longest
from operator import is_, methodcaller
from types import (
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpbam.engines.base import Loss, StatefulModelError
from dpbam.engines.batching import is_wrapped
from dpbam.engines.generators import GENERATORS, generator_state
from dpbam.methods import Method
from dpbam.own_code import refuse
from dpbam.params import bits_of, modules_of

_VALUES = (bool, int, float, complex, str, bytes, type(None))
_SKIPPED = frozenset(_VALUES)  # by type: they cannot change in place
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (OrderedDict, dict)  # the order is the class's own
_BUILT_IN = {dict, *_SEQUENCES}  # without attributes of their own
# trusted to keep nothing; tqdm's own thread writes to its monitor at any time
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "tqdm"}
_NAMESPACES = (SimpleNamespace, Namespace)  # of the standard library, and made to hold anything
_CODE = (FunctionType, MethodType, staticmethod, classmethod, property, type)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_HOOK_TABLES = {n for n, t in vars(nn.Module()).items() if isinstance(t, dict)} - {*_REGISTERED}
_MOST_LEVELS = 8  # of objects inside one another, where code is followed
_SMALL = 4096  # entries of a tensor whose values are compared at every step
_MISSING = object()
_values_of = methodcaller("values")

#: Which tensors are compared by their values, not only by torch's count of in-place changes, which
#: writes through ``.data`` and NumPy leave as it is.
Compared = Literal["small", "buffers", "all"]
_Parts = list[tuple[Any, Any]]  # what an object contains, by key
Describe = Callable[[Any], str]  # the name of what is changed, from the key inside an object


class Snapshot:
    """The objects that a pass must not change.

    Args:
        whose: what would have changed them, for the message.
        code: follow classes, functions, and the globals that these name.
        compared: the tensors that are compared by their values: ``"small"`` ones on the processor
            but for parameters (others would take as long as a small layer), ``"buffers"``: all but
            parameters, or ``"all"``.
    """

    def __init__(
        self,
        whose: str = "the forward pass",
        *,
        code: bool = False,
        compared: Compared = "small",
    ) -> None:
        self._whose, self._code, self._compared = whose, code, compared
        # each an object, what it contained, and the name of what is under a key of it
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any], Describe]] = []
        self._containers: list[tuple[Any, _Parts, Describe]] = []
        self._leaves: list[tuple[Any, Describe]] = []  # tensors, arrays and generators
        self._values: list[Any] = []  # of the leaves
        self._counted: list[tuple[Tensor, Describe]] = []  # compared by torch's count alone
        self._counts: list[int] = []
        self._flat: _FlatTables | None = None  # of all tables, once they are complete
        self._seen: dict[int, Any] = {}  # holds the objects, so that no id is used again
        self.modules: list[tuple[str, nn.Module]] = []  # of the model, with their paths

    def check(self) -> None:
        """Refuse what was added, removed, replaced or written to, by name."""
        if not self._same_tables():
            for table, before, describe in self._tables:
                now = [(key, table.get(key, _MISSING)) for key in {**before, **table}]
                self._compare([(key, before.get(key, _MISSING)) for key, _ in now], now, describe)
        for container, parts, describe in self._containers:
            if parts or not _is_empty(container):
                self._compare(parts, _parts(container, self._code) or [], describe)
        for (leaf, describe), before_pass in zip(self._leaves, self._values, strict=True):
            if not _same_content(before_pass, self._read(leaf)):
                raise self._refusal(describe(None))
        counts = [t._version for t, _ in self._counted]
        if counts != self._counts:
            pairs = zip(counts, self._counts, strict=True)
            changed = next(i for i, (now, before_pass) in enumerate(pairs) if now != before_pass)
            raise self._refusal(self._counted[changed][1](None))

    def refresh(self) -> bool:
        """Take the snapshot anew, in a fraction of the time of a walk.

        Returns:
            False if an object was added, removed or replaced since: then a new walk is needed.
        """
        if not self._same_tables():
            return False
        for container, parts, _ in self._containers:
            if not parts and _is_empty(container):
                continue
            now = _parts(container, self._code) or []
            if len(now) != len(parts) or not all(map(_is_same_part, parts, now)):
                return False
        self._values = [self._read(leaf) for leaf, _ in self._leaves]
        self._counts = [t._version for t, _ in self._counted]
        return True

    def _same_tables(self) -> bool:
        """Whether all tables hold the same objects under the same keys, in the same order.

        By identity, and without Python code per entry: a small model has two hundred of them.
        """
        if self._flat is None:
            self._flat = _FlatTables.of(self._tables)
        return self._flat.same()

    def _compare(self, before: _Parts, now: _Parts, describe: Describe) -> None:
        """Refuse parts that are not the same, in the same order: the order of a dict is state."""
        absent = (_MISSING, _MISSING)
        for (key, value), (key_now, value_now) in zip_longest(before, now, fillvalue=absent):
            if not (_same(key, key_now) and _same(value, value_now)):
                raise self._refusal(describe(key_now if key is _MISSING else key))

    def _refusal(self, name: str) -> StatefulModelError:
        return StatefulModelError(
            f"{self._whose} changes {name}, which outlives it, so that one record could reach "
            "others and the published model, without noise: compute it anew in each forward pass, "
            "or update it outside forward"
        )

    def add_modules(self, model: nn.Module, loss: Loss) -> None:
        """Hold the modules of the model, and the loss."""
        self.modules = modules_of(model)
        owners = {module: ("module", path) for path, module in self.modules}
        if isinstance(loss, nn.Module):
            for path, module in modules_of(loss):
                owners.setdefault(module, ("the loss's module", path))
        self._seen |= {id(module): module for module in owners}
        for module, owner in owners.items():
            self._add_module(module, *owner)
        if not isinstance(loss, nn.Module):
            self._add(loss, str, "the loss", 0)

    def _add_module(self, module: nn.Module, kind: str, path: str) -> None:
        for table, entries in _tables_of(module).items():
            describe = partial(_describe_entry, table, kind, path, module)
            self._tables.append((entries, dict(entries), describe))
            for name, value in list(entries.items()):
                # tables are held themselves, and hooks are code
                skipped = name in _REGISTERED or (name in _HOOK_TABLES and not self._code)
                if type(value) not in _SKIPPED and not skipped:
                    self._add(value, describe, name, 1)

    def add_code(self, model: nn.Module, loss: Loss) -> None:
        """Hold the classes of the modules and of the loss, and hooks of parameters."""
        for name, p in model.named_parameters():
            self._add(p._backward_hooks, "a hook of parameter {!r}".format, name, 1)
        for module in model.modules():
            self._add_classes(module)
        self._add_classes(loss)

    def add_method(self, method: Method) -> None:
        """Hold a method, and its classes."""
        self._add(method, str, "the method", 0)
        self._add_classes(method)

    def _add_classes(self, instance: object) -> None:
        for cls in type(instance).__mro__:
            if not (_is_foreign(cls) or id(cls) in self._seen):
                describe = partial("class attribute {}.{}".format, cls.__name__)
                self._seen[id(cls)] = cls
                self._containers.append((cls, _attributes_of_class(cls), describe))
                for key, value in _attributes_of_class(cls):
                    self._add(value, describe, key, 1)

    def _add(self, value: Any, describe: Describe, key: Any, level: int) -> None:
        """Hold an object that can change in place, and all that it contains."""
        waiting = [(value, describe, key, level)]
        while waiting:
            value, describe, key, level = waiting.pop()
            if type(value) in _SKIPPED or id(value) in self._seen:
                continue
            if type(value) is tuple and _SKIPPED.issuperset(map(type, value)):
                continue
            if isinstance(value, (Tensor, np.ndarray, *GENERATORS)):
                if isinstance(value, Tensor) and is_wrapped(value):
                    raise StatefulModelError(f"{describe(key)} is a tensor of an earlier pass")
                self._seen[id(value)] = value
                name = partial(_describe_leaf, describe, key)
                by_count = self._compared != "all"
                if by_count and isinstance(value, nn.Parameter) and not value.is_inference():
                    self._counted.append((value, name))
                    self._counts.append(value._version)
                else:
                    self._leaves.append((value, name))
                    self._values.append(self._read(value))
                # a tensor, and so a parameter, takes attributes as any object does
                if isinstance(attributes := getattr(value, "__dict__", None), dict):
                    inside = partial(_describe_inside, describe, key, level)
                    self._tables.append((attributes, dict(attributes), inside))
                    waiting += [(child, inside, k, level + 1) for k, child in attributes.items()]
                continue
            parts = _parts(value, self._code)
            if parts is None:
                continue
            self._seen[id(value)] = value
            inside = partial(_describe_inside, describe, key, level)
            if type(value) is not tuple:  # a tuple cannot change
                self._containers.append((value, parts, inside))
            if not (self._code and level > _MOST_LEVELS):
                waiting += [(child, inside, k, level + 1) for k, child in reversed(parts)]

    def _read(self, value: Any) -> Any:
        """Return what changes when a tensor, an array or a generator does."""
        if isinstance(value, np.ndarray):
            return value.tobytes()
        if not isinstance(value, Tensor):
            return generator_state(value)
        version = None if value.is_inference() else value._version
        parameter = isinstance(value, nn.Parameter)
        if self._compared == "all" or (self._compared == "buffers" and not parameter):
            return version, value.detach().clone()
        if self._compared == "buffers" or parameter or version is None:
            return version, None
        if value.device.type != "cpu" or value.numel() > _SMALL:
            return version, None
        if value.layout is not torch.strided or value.is_quantized:
            return version, None
        return version, bits_of(value.detach()).numpy().tobytes()


class _FlatTables(NamedTuple):
    """What dicts contained, one after another, so that all are compared in two passes."""

    tables: list[dict[Any, Any]]
    sizes: list[int]
    filled: list[dict[Any, Any]]  # those that are not empty
    keys: list[Any]
    values: list[Any]

    @classmethod
    def of(cls, recorded: list[tuple[dict[Any, Any], dict[Any, Any], Describe]]) -> _FlatTables:
        return cls(
            [table for table, _, _ in recorded],
            [len(before) for _, before, _ in recorded],
            [table for table, before, _ in recorded if before],
            [key for _, before, _ in recorded for key in before],
            [value for _, before, _ in recorded for value in before.values()],
        )

    def same(self) -> bool:
        """Whether the dicts contain the same objects under the same keys, in the same order."""
        if list(map(len, self.tables)) != self.sizes:
            return False
        values = chain.from_iterable(map(_values_of, self.filled))
        keys = chain.from_iterable(self.filled)
        return all(map(is_, keys, self.keys)) and all(map(is_, values, self.values))


def snapshot_modules(model: nn.Module, loss: Loss) -> Snapshot:
    """Return what a vmapped pass must not change."""
    snapshot = Snapshot()
    snapshot.add_modules(model, loss)
    return snapshot


def snapshot_copies(model: nn.Module, loss: Loss) -> Snapshot:
    """Return what one unit must not change of the copies that it runs on; parameters are shared."""
    snapshot = Snapshot(code=True, compared="buffers")
    snapshot.add_modules(model, loss)
    return snapshot


def snapshot_code(model: nn.Module, loss: Loss) -> Snapshot:
    """Return what the units must not change of the model itself and of the code around it."""
    snapshot = Snapshot(code=True, compared="all")
    snapshot.add_modules(model, loss)
    snapshot.add_code(model, loss)
    return snapshot


@contextmanager
def fixed_method(method: Method) -> Iterator[None]:
    """Refuse a method, or code of its direction, that the units of the block change; for good.

    Raises:
        StatefulModelError: also where the block fails for another reason, after which another
            engine would run the method with what it has kept.
    """
    snapshot = snapshot_method(method)
    try:
        yield
    finally:
        try:
            snapshot.check()
        except StatefulModelError:
            refuse(method)
            raise


def snapshot_method(method: Method) -> Snapshot:
    """Return what the units must not change of a method, and of the code of its direction."""
    snapshot = Snapshot("the method's direction", code=True, compared="all")
    snapshot.add_method(method)
    return snapshot


# --- names


def _describe_entry(table: str, kind: str, path: str, module: nn.Module, key: Any) -> str:
    return f"{table} {key!r} of {kind} {path!r} ({type(module).__name__})"


def _describe_inside(describe: Describe, outer: Any, level: int, key: Any) -> str:
    name, inner = describe(outer), key if isinstance(key, str) else repr(key)
    return f"{inner} of {name}" if level == 0 else f"{name}[{inner}]"


def _describe_leaf(describe: Describe, outer: Any, key: None) -> str:
    return describe(outer)


# --- what objects contain


def _tables_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the dicts of a module: its attributes, and what is registered."""
    return {
        "attribute": vars(module), "parameter": module._parameters, "buffer": module._buffers,
        "submodule": module._modules,
    }  # fmt: skip


def _parts(value: Any, code: bool) -> _Parts | None:
    """Return what a container or an object contains by name, or None if it is neither.

    An object of a class derived from a container has both items and attributes. Objects of
    Python's, NumPy's and torch's own classes are not looked into.
    """
    items = _items_of(value)
    if items is not None:
        return items if type(value) in _BUILT_IN else items + (_attributes_of(value) or [])
    if isinstance(value, _CODE):
        return _parts_of_code(value) if code else None
    if _is_foreign(type(value)) and not isinstance(value, (*_NAMESPACES, nn.Module)):
        return None
    return _attributes_of(value)


def _items_of(value: Any) -> _Parts | None:
    """Return what a container stores, or None if it is none.

    A class derived from a container may compute other items when it is asked, as the registries of
    transformers do, which import hundreds of modules. What it stores is in its base and in its
    attributes, and is read without its code.
    """
    base: Any
    for base in _MAPPINGS:
        if isinstance(value, base):
            return list(base.items(value))
    for base in _SEQUENCES:
        if isinstance(value, base):
            return list(enumerate(base.__iter__(value)))
    if isinstance(value, Mapping) and _is_foreign(type(value)):
        return list(value.items())
    return None


def _attributes_of(value: Any) -> _Parts | None:
    """Return the attributes of an object, those in slots too; None: it cannot have any."""
    attributes = getattr(value, "__dict__", None)
    slots = _slots_of(type(value))  # type: ignore[arg-type]  # mypy does not take classes as hashable
    if not isinstance(attributes, dict) and not slots:
        return None
    parts = list(attributes.items()) if isinstance(attributes, dict) else []
    return parts + [(name, getattr(value, name, _MISSING)) for name in slots]


@lru_cache(maxsize=4096)
def _slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of a class's slots, as Python mangles them, those of its bases too."""
    bases = [base for base in cls.__mro__ if not _is_foreign(base)]
    return tuple(
        name for base in bases for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType)
    )  # fmt: skip


def _parts_of_code(value: Any) -> _Parts:
    if isinstance(value, FunctionType):
        return list(_parts_of_function(value))
    if isinstance(value, MethodType):
        return [("object", value.__self__), ("function", value.__func__)]
    if isinstance(value, staticmethod | classmethod):
        return [("function", value.__func__)]
    if isinstance(value, property):
        return [("function", value.fget)]
    return [] if _is_foreign(value) else _attributes_of_class(value)


def _attributes_of_class(cls: type) -> _Parts:
    """Return the attributes of a class, without the names that ``copy`` keeps in it."""
    return [(name, value) for name, value in vars(cls).items() if name != "__slotnames__"]


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield attributes, defaults, closure variables, and the globals that it names."""
    if _is_foreign(function):
        return
    yield "default arguments", function.__defaults__
    yield "keyword-only default arguments", function.__kwdefaults__
    yield from (("attribute " + name, value) for name, value in list(vars(function).items()))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":  # of super(): the class that the function was found in
            continue
        try:
            yield "closure variable " + name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = _names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not _belongs_to_libraries(value.__name__):
            read = [(f"{name}.{key}", vars(value)[key]) for key in names if key in vars(value)]
        else:
            read = [(name, value)]
        yield from (("global " + key, each) for key, each in read if _can_change(function, each))


def _names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that code reads or writes, of the functions inside it too."""
    inner = [names for c in code.co_consts if isinstance(c, CodeType) for names in _names_in(c)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _can_change(function: FunctionType, value: Any) -> bool:
    """Whether a global of a function may hold state: a value, a container, an object, a namespace.

    Of functions only those of the same module are followed.
    """
    if isinstance(value, FunctionType):
        return value.__module__ == function.__module__
    if isinstance(value, (Tensor, np.ndarray, *_VALUES, *_SEQUENCES, dict)):
        return True
    if isinstance(value, (*_NAMESPACES, *GENERATORS)):
        return True
    return not isinstance(value, ModuleType) and not _is_foreign(
        value if isinstance(value, type) else type(value)
    )


def _is_foreign(definition: Any) -> bool:
    """Whether a class or function belongs to a library that is trusted to keep nothing."""
    return _belongs_to_libraries(definition.__module__ or "")


def _belongs_to_libraries(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


# --- comparison


def _is_empty(container: Any) -> bool:
    """Whether a container of a built-in class has no entry, as most of a module's."""
    return type(container) in _BUILT_IN and not container


def _is_same_part(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    return before[1] is now[1] and _same(before[0], now[0])


def _same(before: Any, now: Any, depth: int = 0) -> bool:
    """Whether one value is the other, or a plain value or a container equal to it."""
    if before is now:
        return True
    if isinstance(before, _VALUES):
        equal = before == now or (before != before and now != now)
        return type(before) is type(now) and bool(equal)
    if isinstance(before, MethodType):
        return bool(before == now)  # new at each access
    if type(before) is not type(now) or not isinstance(before, (dict, *_SEQUENCES)):
        return False
    pairs = list(zip(_parts(before, False) or (), _parts(now, False) or (), strict=False))
    if len(before) != len(now) or depth > _MOST_LEVELS:
        return False
    return all(a == c and _same(b, d, depth + 1) for (a, b), (c, d) in pairs)


def _same_content(before: Any, now: Any) -> bool:
    """Whether a tensor, an array or a generator was not written to, not even through ``.data``."""
    if not isinstance(before, tuple):
        return bool(before == now)
    (version, values), (version_now, values_now) = before, now
    if version != version_now or not isinstance(values, Tensor):
        return bool(version == version_now and values == values_now)
    return bits_equal(values, values_now)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
