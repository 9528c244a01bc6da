"""Arithmetic on a gradient kept as one tensor a parameter, and on nested batches.

``Params`` is the canonical form of anything shaped like theta: a dict from parameter name to
tensor. Sums over its entries are the paper's inner products and norms on R^d.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.errors import ArgumentError, ArgumentTypeError

Params = dict[str, Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms and sums: float32 or better, since a float16 norm underflows to 0."""
    return torch.promote_types(dtype, torch.float32)


def doubled(tree: Mapping[str, Tensor]) -> Params:
    """The same numbers in float64; as they are on MPS, which has no float64.

    Example:
        >>> doubled({"w": torch.zeros(1)})
        {'w': tensor([0.], dtype=torch.float64)}
    """
    return {n: t if t.device.type == "mps" else t.double() for n, t in tree.items()}


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm over all entries, in float32 or better: scalar."""
    return sum_of_squares(tree).sqrt()


def sum_of_squares(tree: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over all entries, in float32 or better: scalar."""
    return torch.stack(
        [g.to(accumulation_dtype(g.dtype)).square().sum() for g in tree.values()]
    ).sum()


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product <a, b> over all entries, in float32 or better: scalar."""
    wide = {name: accumulation_dtype(x.dtype) for name, x in a.items()}
    return torch.stack([(a[n].to(wide[n]) * b[n].to(wide[n])).sum() for n in a]).sum()


def unit_vector(tree: Mapping[str, Tensor]) -> Params:
    """g / norm(g); zero where g is zero, never NaN.

    Example:
        >>> unit_vector({"w": torch.tensor([3.0, 4.0])})
        {'w': tensor([0.6000, 0.8000])}
        >>> unit_vector({"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    length = norm(tree)
    positive = length > 0
    scale = torch.where(positive, 1.0 / torch.where(positive, length, 1.0), 0.0)
    wide = {name: g.to(accumulation_dtype(g.dtype)) for name, g in tree.items()}
    return {name: (g * scale).to(tree[name].dtype) for name, g in wide.items()}  # 1e6: inf in fp16


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Params:
    """a + scale * b."""
    return {name: x + scale * b[name] for name, x in a.items()}


@contextmanager
def shifted(parameters: Mapping[str, nn.Parameter], shift: Params | None) -> Iterator[None]:
    """theta + shift inside; afterwards theta again, bit for bit (copied back, not subtracted)."""
    if shift is None:
        yield
        return
    saved = {n: p.detach().clone() for n, p in parameters.items()}
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(shift[name].to(parameter.dtype))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


def digest(tree: Mapping[str, Tensor]) -> str:
    """A hash of names and values: tells a replay of a release from another one.

    Example:
        >>> digest({"w": torch.zeros(2)}) == digest({"w": torch.ones(2)})
        False
    """
    state = hashlib.blake2b(digest_size=16)
    for name, g in tree.items():
        state.update(name.encode())
        state.update(g.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def rows(batch: Any) -> int:
    """The common leading size of every tensor in a nested batch.

    Example:
        >>> rows({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
        3
    """
    leaves = [x for x in tree_leaves(batch) if x is not None]  # an argument left out
    if not leaves or not all(isinstance(x, Tensor) and x.ndim for x in leaves):
        raise ArgumentTypeError(
            "a batch must be a tensor, or a tuple or dict of tensors, each with a first axis "
            f"that counts the samples; got {_describe(batch)}"
        )
    sizes = {x.shape[0] for x in leaves}
    if len(sizes) != 1:
        raise ArgumentError(
            f"all tensors of a batch must have the same first axis, got sizes {sorted(sizes)}"
        )
    return int(sizes.pop())


def map_rows(f: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply ``f`` to every tensor of a nested batch."""
    return tree_map(lambda leaf: f(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def select_rows(batch: Any, index: Tensor) -> Any:
    """The rows ``index`` of every tensor of a nested batch."""
    return map_rows(lambda t: t[index.to(t.device)], batch)


def _describe(batch: Any) -> str:
    leaves = tree_leaves(batch)
    kinds = sorted({type(x).__name__ for x in leaves}) or ["nothing"]
    return f"{type(batch).__name__} of {', '.join(kinds)}"
