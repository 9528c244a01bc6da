"""The weight of a layer: a trainable parameter, or a function of parameters alone.

Attention slices one matrix in three, a standardised convolution centres its weight. A
:class:`Weight` is such a value D = s(theta) together with s, so that a gradient in D can be pulled
back to theta (J_s^T G) and a direction in theta pushed forward to D (J_s v).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from dpbam.nn.standardise import standardised
from dpbam.params import Keywords, Params

# s only selects or permutes: entries of D are distinct entries of theta, so |J_s^T G| = |G|
_SELECTIONS = {
    "t", "transpose", "permute", "movedim", "swapaxes", "swapdims", "view", "reshape", "flatten",
    "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind", "narrow", "select",
    "contiguous", "to", "float", "double", "half", "bfloat16", "view_as", "reshape_as", "mT", "T",
    "clone", "split_with_sizes", "tensor_split", "ravel", "alias",
}  # fmt: skip
_LINEAR = _SELECTIONS | {"embedding", "index_select", "__getitem__", "expand", "expand_as"}


@dataclass(eq=False)
class Weight:
    """D = s(theta).

    Attributes:
        tensor: D.
        names: the parameters that it depends on.
        func: the torch function that computed it from other weights; None for a parameter itself.
        args: its arguments, weights in place of tensors.
        kwargs: likewise.
        pick: the index of the output, of several.
        constant: computed under ``no_grad``, or detached: without a gradient.
        version: of the tensor, which must not be written to.
    """

    tensor: Tensor
    names: tuple[str, ...]
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Keywords = field(default_factory=dict)
    pick: int | None = None
    constant: bool = False
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.tensor._version

    def evaluate(self, theta: Mapping[str, Tensor]) -> Tensor:
        """Return s(theta), for any theta."""
        if self.func is None:
            return theta[self.names[0]]

        def value(leaf: Any) -> Any:
            return leaf.evaluate(theta) if isinstance(leaf, Weight) else leaf

        out = self.func(*tree_map(value, self.args), **tree_map(value, self.kwargs))
        result: Tensor = out if self.pick is None else out[self.pick]
        return result.detach() if self.constant else result

    @property
    def key(self) -> Any:
        """A value equal for two weights of one pass that are the same function of parameters."""
        if self.func is None:
            return self.names

        def part(leaf: Any) -> Any:
            if isinstance(leaf, Weight):
                return leaf.key
            return id(leaf) if isinstance(leaf, Tensor) else repr(leaf)

        return (self.func, self.pick, *map(part, tree_leaves((self.args, self.kwargs))))

    @property
    def selection(self) -> bool:
        """Whether s only selects or permutes entries."""
        if self.func is None:
            return True
        inside = self._inside()
        if self.constant or len(inside) != 1 or not inside[0].selection:
            return False
        if self._function == "__getitem__":
            return _plain_index(self.args[1])
        return self._function in _SELECTIONS

    @property
    def linear(self) -> bool:
        """Whether s is known to be linear."""
        if self.selection:
            return True
        inside = self._inside()
        known = not self.constant and self._function in _LINEAR
        return known and len(inside) == 1 and inside[0].linear

    @property
    def centred(self) -> bool:
        """Whether D is a standardised parameter: centred, and perhaps scaled."""
        return self.func is standardised and self.args[0].func is None

    @property
    def scaled(self) -> bool:
        """Whether D is standardised with a scale: then it is not linear in theta."""
        return self.centred and bool(self.args[1])

    @property
    def narrow(self) -> bool:
        """Whether s is computed in less than float32, so that J_s^T rounds gradients."""
        if self.func is None:
            return False
        low = self.tensor.dtype in (torch.float16, torch.bfloat16)
        return low or any(inside.narrow for inside in self._inside())

    def pull(self, gradient: Tensor) -> Params:
        """Return J_s^T G for one gradient [*D], in theta's shapes."""
        if self.func is None:
            return {self.names[0]: gradient}
        theta = self._theta  # by autograd: torch.func.vjp would import torch's compiler
        with torch.enable_grad():
            out = self.evaluate({name: t.requires_grad_() for name, t in theta.items()})
        if not (out.requires_grad or torch.is_inference_mode_enabled()):  # a constant
            return {name: torch.zeros_like(t) for name, t in theta.items()}
        pulled = torch.autograd.grad(
            out, list(theta.values()), gradient.to(out.dtype), materialize_grads=True
        )
        return dict(zip(theta, pulled, strict=True))

    def pull_each(self, gradients: Tensor) -> Params:
        """Return J_s^T G_u for every unit: [U, *D] -> [U, *theta]."""
        if self.func is None:
            return {self.names[0]: gradients}
        pull = vjp(self.evaluate, self._theta)[1]
        pulled: Params = vmap(lambda gradient: pull(gradient.to(self.tensor.dtype)))(gradients)[0]
        return pulled

    def push(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return J_s v for a linear s: theta's shapes -> [*D]."""
        return self.evaluate({n: vector[n].to(t) for n, t in self._theta.items()})

    def entries(self) -> list[float]:
        """Return the flat indices of theta's entries that a selection contains."""
        leaf = next(self._leaves())
        indices = torch.arange(leaf.tensor.numel(), dtype=torch.float64)
        return self.evaluate({leaf.names[0]: indices.view(leaf.tensor.shape)}).flatten().tolist()

    @property
    def _function(self) -> str:
        name = getattr(self.func, "__name__", "")
        if name == "__get__":  # a property, such as Tensor.T
            name = getattr(getattr(self.func, "__self__", None), "__name__", "")
        return name

    def _inside(self) -> list[Weight]:
        return [a for a in tree_leaves((self.args, self.kwargs)) if isinstance(a, Weight)]

    @property
    def _theta(self) -> Params:
        return {w.names[0]: w.tensor.detach() for w in self._leaves()}

    def _leaves(self) -> Iterator[Weight]:
        if self.func is None:
            yield self
        for inside in self._inside():
            yield from inside._leaves()


def _plain_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(p, int | slice | type(None) | type(Ellipsis)) for p in parts)
