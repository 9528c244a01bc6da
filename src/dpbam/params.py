"""Arithmetic on dicts of parameters, and on nested batches.

``Params`` is the canonical form of anything shaped like theta: a dict from parameter name to
tensor. Sums over its entries are the paper's inner products and norms on R^d.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.errors import ArgumentError, ArgumentTypeError

Params = dict[str, Tensor]
Keywords = dict[str, Any]  # keyword arguments of an operator, as torch hands them over
HALF = (torch.float16, torch.bfloat16)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return trained_and_constant(model)[0]


def trained_and_constant(
    model: nn.Module, loss: object = None
) -> tuple[dict[str, nn.Parameter], list[Tensor]]:
    """Return the parameters that require a gradient, by name, and what else computes the losses.

    The latter are frozen parameters and buffers, and all of a loss that is a module.
    """
    trained: dict[str, nn.Parameter] = {}
    constant: list[Tensor] = []
    seen: set[int] = set()  # a tied parameter has its first name; by id, as a tensor's hash is slow
    for path, module in modules_of(model):
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if parameter.requires_grad:
                trained[f"{path}.{key}" if path else key] = parameter
            else:
                constant += _memory_of(parameter)
        if module._buffers:
            constant += _buffers_of(module)
    if isinstance(loss, nn.Module):
        for _, module in modules_of(loss):
            of_loss = [p for p in module._parameters.values() if p is not None]
            constant += [t for p in of_loss if id(p) not in seen for t in _memory_of(p)]
            constant += _buffers_of(module)
    return trained, constant


def _buffers_of(module: nn.Module) -> list[Tensor]:
    buffers = [t for t in module._buffers.values() if t is not None]
    return [numbers for t in buffers for numbers in _memory_of(t)]


def _memory_of(t: Tensor) -> list[Tensor]:
    """Return the tensors that hold a constant's numbers; none of a quantised or a meta tensor."""
    if t.is_meta or t.is_quantized:
        return []
    if t.layout is torch.strided:
        return [t]
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    return []


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with their paths, as ``model.named_modules()`` in a tenth of the time."""
    paths: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in paths:
            continue
        paths[module] = path
        if module._modules:
            prefix = f"{path}." if path else ""
            children = [(prefix + k, m) for k, m in module._modules.items() if m is not None]
            waiting += reversed(children)
    return [(path, module) for module, path in paths.items()]


def count_trainable(model: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(p.numel() for p in trainable(model).values())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next(model.parameters()).device


@cache
def accumulation_dtype(dtype: torch.dtype, least: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype of norms and sums: float32 or better, since a float16 norm underflows."""
    return torch.promote_types(dtype, least)


def copied(tree: Mapping[str, Tensor]) -> Params:
    """Copy what other code gets, so that it cannot change what the oracle uses."""
    return elementwise(torch.clone, tree)


def zeros(tree: Mapping[str, Tensor]) -> Params:
    """Return zeros of the same shapes, in float32 or better: a sum with nothing in it yet."""
    return {n: torch.zeros_like(t, dtype=accumulation_dtype(t.dtype)) for n, t in tree.items()}


def sum_of_none(tree: Mapping[str, Tensor]) -> Params:
    """Return zeros in float64 (on MPS as :func:`zeros`), as views of one vector per device."""
    kinds: dict[Any, Params] = {}
    for name, t in tree.items():
        least = torch.float32 if t.device.type == "mps" else torch.float64
        kinds.setdefault((t.device, accumulation_dtype(t.dtype, least)), {})[name] = t
    totals: Params = {}
    for (device, dtype), entries in kinds.items():
        size = sum(t.numel() for t in entries.values())
        totals |= separated(torch.zeros(size, dtype=dtype, device=device), entries)
    return {name: totals[name] for name in tree}


def doubled(tree: Mapping[str, Tensor]) -> Params:
    """Convert to float64; unchanged on MPS, which has no float64."""
    return {n: t if t.device.type == "mps" else t.double() for n, t in tree.items()}


def joined(tree: Mapping[str, Tensor]) -> Tensor:
    """Return all entries one after another, as one vector; a view where they are that already.

    Example:
        >>> joined({"w": torch.ones(1, 2), "b": torch.zeros(1)})
        tensor([1., 1., 0.])
    """
    parts = list(tree.values())
    first, start = parts[0], parts[0].data_ptr()
    end = start
    for t in parts:
        if not (t.data_ptr() == end and t.dtype == first.dtype and t.is_contiguous()):
            return torch.cat([t.reshape(-1) for t in parts])
        end += t.nbytes
    # what lies between two places of one storage is in that storage
    if first.untyped_storage().data_ptr() != parts[-1].untyped_storage().data_ptr():
        return torch.cat([t.reshape(-1) for t in parts])
    return first.as_strided(((end - start) // first.itemsize,), (1,), first.storage_offset())


def separated(vector: Tensor, shapes: Mapping[str, Tensor]) -> Params:
    """Return views of the vector, shaped as ``shapes``: the inverse of :func:`joined`."""
    parts = vector.split_with_sizes([t.numel() for t in shapes.values()])
    return {name: t.view(shapes[name].shape) for name, t in zip(shapes, parts, strict=True)}


def elementwise(
    function: Callable[..., Tensor], tree: Mapping[str, Tensor], *others: Mapping[str, Tensor]
) -> Params:
    """Return ``function`` of the entries; outside a CPU, of all of one device and dtype at once.

    One operation in place of one per parameter, and the results are views of one vector per kind.
    On a CPU an operation per entry takes less time than joining the entries.

    Example:
        >>> elementwise(torch.add, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])})
        {'w': tensor([2., 3.])}
    """
    if on_processor(tree.values()):
        return {name: function(t, *(each[name] for each in others)) for name, t in tree.items()}
    kinds = _kinds(tree)
    results: Params = {}
    for names in kinds:
        trees = [{name: each[name] for name in names} for each in (tree, *others)]
        results |= separated(function(*map(joined, trees)), trees[0])
    return {name: results[name] for name in tree}


def _kinds(tree: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of entries of one device and dtype together."""
    kinds: dict[Any, list[str]] = {}
    for name, t in tree.items():
        kinds.setdefault((t.device, t.dtype), []).append(name)
    return list(kinds.values())


def cast(tree: Mapping[str, Tensor], dtypes_of: Mapping[str, Tensor]) -> Params:
    """Return the entries in the dtypes of ``dtypes_of``, in one operation per dtype."""
    results: Params = {}
    for dtype in {t.dtype for t in dtypes_of.values()}:
        alike = {name: tree[name] for name, t in dtypes_of.items() if t.dtype == dtype}
        results |= elementwise(partial(_copy_as, dtype=dtype), alike)
    return {name: results[name] for name in dtypes_of}


def _copy_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of values in a dtype, in new memory."""
    if _takes_large_pages(values.numel() * dtype.itemsize, values.device):
        return new_memory(values.shape, dtype, values.device).copy_(values)
    return values.to(dtype, copy=True)


def new_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that is not written to yet.

    On a processor, large ones are NumPy's, which asks the system for large pages, where torch does
    not: to write 9.5 million float32 numbers takes 5 ms in place of 17.
    """
    size = math.prod(shape) * dtype.itemsize
    if _takes_large_pages(size, device):
        return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(*shape)
    return torch.empty(shape, dtype=dtype, device=device)


def _takes_large_pages(size: int, device: torch.device) -> bool:
    return size >= _LARGE_PAGES and device.type == "cpu"


_LARGE_PAGES = 2**22  # bytes: below, memory is taken from what was freed before
_MIXED = (torch.float64, torch.float32)  # of a sum, and of what is added to it


def on_processor(tensors: Iterable[Tensor]) -> bool:
    """Whether all are in the processor's memory, where small operations are as good as large."""
    return all(t.device.type == "cpu" for t in tensors)


def add_into(total: Params, parts: Mapping[str, Tensor], *, first: bool = False) -> None:
    """Add parts, in their dtype or a narrower one, to the entries of ``total``, in place.

    By one operation: on a processor without a copy, elsewhere on one vector, since torch's own
    operation on lists would run one kernel per parameter where dtypes differ.

    Args:
        total: by name.
        parts: of some of the names.
        first: whether ``total`` is zero: then the parts are copied, on a processor in a fifth of
            the time of torch's addition to another dtype.
    """
    targets = {name: total[name] for name in parts}
    if on_processor(targets.values()):
        if first:
            torch._foreach_copy_(list(targets.values()), list(parts.values()))
            return
        # torch converts a whole part before it adds it; NumPy does both in the cache, in 0.4 of the
        # time, with the same result
        mixed = [n for n, t in targets.items() if (t.dtype, parts[n].dtype) == _MIXED]
        for name in mixed:
            entries = targets.pop(name).numpy()
            np.add(entries, parts[name].detach().numpy(), out=entries)
        if targets:
            torch._foreach_add_(list(targets.values()), [parts[n] for n in targets])
        return
    for names in _kinds(targets):
        vector = joined({name: targets[name] for name in names})
        if vector.data_ptr() == targets[names[0]].data_ptr():  # a view
            vector += joined({name: parts[name] for name in names})
        else:
            for name in names:
                targets[name] += parts[name]


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Return the Euclidean norm over all entries, in float32 or better: scalar."""
    squares = [g.to(accumulation_dtype(g.dtype)).square().sum() for g in tree.values()]
    return torch.stack(squares).sum().sqrt()


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return <a, b> over all entries, in float32 or better: scalar."""
    dtypes = {name: accumulation_dtype(x.dtype) for name, x in a.items()}
    return torch.stack([(a[n].to(dtypes[n]) * b[n].to(dtypes[n])).sum() for n in a]).sum()


def unit_vector(tree: Mapping[str, Tensor]) -> Params:
    """Return g / norm(g); zero where g is zero, never NaN.

    Example:
        >>> unit_vector({"w": torch.tensor([3.0, 4.0])})
        {'w': tensor([0.6000, 0.8000])}
        >>> unit_vector({"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    length = norm(tree)
    positive = length > 0
    scale = torch.where(positive, 1.0 / torch.where(positive, length, 1.0), 0.0)
    widened = {name: g.to(accumulation_dtype(g.dtype)) for name, g in tree.items()}
    # in the dtype of the entries last: a norm of 1e6 is infinite in float16
    return {name: (g * scale).to(tree[name].dtype) for name, g in widened.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Params:
    """Return a + scale * b."""
    return {name: x + scale * b[name] for name, x in a.items()}


@contextmanager
def restored(parameters: Mapping[str, nn.Parameter], saved: Params | None = None) -> Iterator[None]:
    """Restore the parameters bit for bit after the block.

    Args:
        parameters: by name.
        saved: gets copies of them during the block. If Ctrl-C comes right before they are restored,
            it still has them, and the caller can :func:`overwrite` the parameters.
    """
    saved = {} if saved is None else saved
    saved.update({n: p.detach().clone() for n, p in parameters.items()})
    try:
        yield
    finally:
        overwrite(parameters, saved)
        saved.clear()


def overwrite(parameters: Mapping[str, nn.Parameter], values: Params) -> None:
    """Write ``values`` into the parameters of these names: all of them, even if Ctrl-C comes."""
    try:
        _copy_into(parameters, values)
    except BaseException:  # interrupted: write all of them again, then raise
        _copy_into(parameters, values)
        raise


def _copy_into(parameters: Mapping[str, nn.Parameter], values: Params) -> None:
    for name, value in values.items():
        parameters[name].detach().copy_(value)  # not under no_grad, which Ctrl-C could leave on


@contextmanager
def shifted(
    parameters: Mapping[str, nn.Parameter], shift: Params | None, saved: Params | None = None
) -> Iterator[None]:
    """Hold theta + shift inside the block, and theta again afterwards; None shifts nothing.

    ``saved`` is as in :func:`restored`.
    """
    if shift is None:
        yield
        return
    with restored(parameters, saved):
        for name, parameter in parameters.items():
            parameter.detach().add_(shift[name].to(parameter.dtype))
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block; afterwards every module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def bits_of(t: Tensor) -> Tensor:
    """Return a view of a tensor's memory as whole numbers; of a complex one, of both parts."""
    if t.is_conj():  # the same memory, not conjugated
        t = t.conj()
    if t.is_neg():
        t = t._neg_view()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(_INTEGERS[t.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tree: Mapping[str, Tensor]) -> str:
    """Hash names and values, to distinguish the replay of a release from another release."""
    state = hashlib.blake2b(digest_size=16)
    tree = {name: t.to_dense() for name, t in tree.items()}  # itself, if it is not sparse
    values: dict[str, Any] = {}
    for names in _kinds(tree):  # one transfer for all of a kind
        vector = joined({name: tree[name].detach() for name in names}).cpu()
        octets = vector.view(torch.uint8).numpy()  # NumPy has no bfloat16
        ends = list(accumulate(tree[name].nbytes for name in names))
        values |= {n: octets[b - tree[n].nbytes : b] for n, b in zip(names, ends, strict=True)}
    for name in tree:
        state.update(name.encode())
        state.update(values[name].data)
    return state.hexdigest()


class WeakTensors:
    """The tensors of nested batches, by weak references.

    It keeps no tensor alive, and a pickled copy refers to none.
    """

    def __init__(self, *batches: object) -> None:
        self._references = [weakref.ref(t) for t in tensors_in(batches) if t.numel()]

    def alive(self) -> list[Tensor]:
        """Return the tensors that still exist."""
        tensors = [reference() for reference in self._references]
        return [tensor for tensor in tensors if tensor is not None]

    def __getstate__(self) -> dict[str, object]:
        return {"_references": []}


def version_of(tensor: Tensor) -> int:
    """Return torch's count of in-place changes; 0 where it counts none."""
    return 0 if tensor.is_inference() else tensor._version


def joint_digest(*digests: str) -> str:
    """Hash several digests, in this order."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def rows(batch: Any) -> int:
    """Return the common leading size of every tensor in a nested batch."""
    if isinstance(batch, Tensor) and batch.ndim:
        return batch.shape[0]
    leaves = [x for x in tree_leaves(batch) if x is not None]  # None: an argument left out
    if not leaves or not all(isinstance(x, Tensor) and x.ndim for x in leaves):
        kinds = sorted({type(x).__name__ for x in tree_leaves(batch)}) or ["nothing"]
        raise ArgumentTypeError(
            "a batch must be a tensor, or a tuple or dict of tensors, each with a first axis "
            f"that counts the samples; got {type(batch).__name__} of {', '.join(kinds)}"
        )
    sizes = {x.shape[0] for x in leaves}
    if len(sizes) != 1:
        raise ArgumentError(
            f"all tensors of a batch must have the same first axis, got sizes {sorted(sizes)}"
        )
    return int(sizes.pop())


def map_rows(f: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply ``f`` to every tensor of a nested batch."""
    if isinstance(batch, Tensor):
        return f(batch)
    if batch is None:
        return None
    if type(batch) is tuple:  # the usual cases, in a tenth of the time
        return tuple([map_rows(f, each) for each in batch])
    return tree_map(lambda leaf: f(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a nested batch, in the order of :func:`map_rows`.

    Example:
        >>> tensors_in((torch.ones(1), {"ids": torch.zeros(1), "mask": None}))
        [tensor([1.]), tensor([0.])]
    """
    tensors: list[Tensor] = []

    def add(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    map_rows(add, batch)
    return tensors


def select_rows(batch: Any, index: Tensor) -> Any:
    """Return the rows ``index`` of every tensor of a nested batch."""
    return map_rows(lambda t: t[index.to(t.device)], batch)
