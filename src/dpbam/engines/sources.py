"""What a layer's weight is made of: a trainable parameter, or a function of parameters alone.

A layer seldom meets its parameter bare: attention slices one matrix in three, a standardised
convolution centres its weight, a class token is repeated over the batch. A :class:`Source` is such
a value D = s(theta) with the way it was computed, so that a gradient in D can be pulled back to
theta (J_s^T G) and a direction in theta pushed forward to D (J_s v).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_map

from dpbam.trees import Params

# s only moves entries about: entries of D are distinct entries of theta, so |J_s^T G| = |G|
_SELECTIONS = {
    "t", "transpose", "permute", "movedim", "swapaxes", "swapdims", "view", "reshape", "flatten",
    "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind", "narrow", "select",
    "contiguous", "to", "float", "double", "half", "bfloat16", "view_as", "reshape_as", "mT", "T",
    "clone", "split_with_sizes", "tensor_split", "ravel", "alias",
}  # fmt: skip


@dataclass(eq=False)
class Source:
    """D = s(theta).

    Attributes:
        tensor: D, attached to theta's autograd graph.
        names: the parameters it is made of.
        func: the torch function that made it from other sources; None for a parameter itself.
        args: its arguments, sources in place of tensors.
        kwargs: likewise.
        pick: which of its outputs.
    """

    tensor: Tensor
    names: tuple[str, ...]
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    pick: int | None = None

    def evaluate(self, theta: Mapping[str, Tensor]) -> Tensor:
        """s(theta), for any theta."""
        if self.func is None:
            return theta[self.names[0]]

        def value(leaf: Any) -> Any:
            return leaf.evaluate(theta) if isinstance(leaf, Source) else leaf

        out = self.func(*tree_map(value, self.args), **tree_map(value, self.kwargs))
        result: Tensor = out if self.pick is None else out[self.pick]
        return result

    @property
    def key(self) -> Any:
        """Equal for two sources that are the same function of the same parameters."""
        if self.func is None:
            return self.names

        def part(leaf: Any) -> Any:
            if isinstance(leaf, Source):
                return leaf.key
            return id(leaf) if isinstance(leaf, Tensor) else repr(leaf)

        inner = [part(a) for a in _flat((self.args, self.kwargs))]
        return (self.func, self.pick, *inner)

    @property
    def selection(self) -> bool:
        """Whether s only moves entries about."""
        if self.func is None:
            return True
        inside = [a for a in _flat((self.args, self.kwargs)) if isinstance(a, Source)]
        if len(inside) != 1 or not inside[0].selection:
            return False
        name = getattr(self.func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(self.func, "__self__", None), "__name__", "")
        if name == "__getitem__":
            return _plain_index(self.args[1])
        return name in _SELECTIONS

    @property
    def linear(self) -> bool:
        """Whether s is known to be linear; what is not known to be counts as not."""
        if self.selection:
            return True
        name = getattr(self.func, "__name__", "")
        inside = [a for a in _flat((self.args, self.kwargs)) if isinstance(a, Source)]
        known = name in _SELECTIONS | {"embedding", "index_select", "__getitem__", "expand"}
        return known and len(inside) == 1 and inside[0].linear

    def pull(self, gradient: Tensor) -> Params:
        """J_s^T G for one gradient: [*D] -> theta's shapes."""
        if self.func is None:
            return {self.names[0]: gradient}
        pulled: Params = self._vjp()(gradient)[0]
        return pulled

    def pull_each(self, gradients: Tensor) -> Params:
        """J_s^T G_u for every unit: [U, *D] -> [U, *theta]."""
        if self.func is None:
            return {self.names[0]: gradients}
        pulled: Params = vmap(self._vjp())(gradients)[0]
        return pulled

    def push(self, vector: Mapping[str, Tensor]) -> Tensor:
        """J_s v for a linear s: theta's shapes -> [*D]."""
        return self.evaluate({n: vector[n].to(t) for n, t in self._theta.items()})

    def _vjp(self) -> Callable[[Tensor], Any]:
        pull: Callable[[Tensor], Any] = vjp(self.evaluate, self._theta)[1]
        return lambda gradient: pull(gradient.to(self.tensor.dtype))

    @property
    def _theta(self) -> Params:
        return {s.names[0]: s.tensor.detach() for s in self._leaves()}

    def _leaves(self) -> Iterator[Source]:
        if self.func is None:
            yield self
        for a in _flat((self.args, self.kwargs)):
            if isinstance(a, Source):
                yield from a._leaves()


def disjoint(sources: list[Source], sizes: Mapping[str, torch.Size]) -> bool:
    """Whether selections of the same parameters never take the same entry twice.

    Each selection is applied to the numbers of the entries.
    """
    entries, start = {}, 0
    for name, size in sizes.items():
        entries[name] = torch.arange(start, start + size.numel(), dtype=torch.float64).view(size)
        start += size.numel()
    taken = torch.cat([s.evaluate(entries).flatten() for s in sources])
    return len(set(taken.tolist())) == taken.numel()


def _plain_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(p, int | slice | type(None) | type(Ellipsis)) for p in parts)


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _flat(item)
    else:
        yield tree
