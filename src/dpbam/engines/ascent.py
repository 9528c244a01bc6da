"""BAM's ascent step without weights of one's own: every unit at theta + (lambda / |g_u|) g_u.

The paper's BAM (Eq. 12) takes a unit's gradient at weights moved along that unit's own gradient.
The moved weights W + eps_u G_u need not be formed, since G_u = sum_t b_t (x) a_t is known from the
plain pass: on a new input x,

    (W + eps_u G_u) x_s = W x_s + sum_t (eps_u b_t) <a_t, x_s>

a shared layer, a Gram matrix between old and new inputs, and a product. Where T is so large that
G_u was formed for its norm, the layer is a convolution whose groups are the units. Parameters
whose gradients are small are moved as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import vmap

from dpbam.engines.base import CannotServe
from dpbam.engines.layer_math import EmbeddingFamily, Family
from dpbam.engines.maps import centred_gram
from dpbam.engines.sites import Fold, Layout, MatrixSite
from dpbam.engines.sources import Source
from dpbam.engines.stores import Formed, Store
from dpbam.engines.unformed import Unformed
from dpbam.trees import Params


class Ascent:
    """What the second forward pass adds to each use.

    Args:
        stores: the plain gradients g_u.
        steps: [U], eps_u = lambda / |g_u|, 0 where g_u = 0.
        fold: rows to units.
        inputs: layouts of the tape's inputs.
        outputs: and of its outputs.
    """

    def __init__(
        self,
        stores: list[Store],
        steps: Tensor,
        fold: Fold,
        inputs: tuple[Layout, ...],
        outputs: tuple[Layout, ...],
    ) -> None:
        self._steps, self._fold = steps, fold
        self._inputs, self._outputs = inputs, outputs
        self._unformed = {s.source.key: s for s in stores if isinstance(s, Unformed)}
        self._formed = {s.name: s.values for s in stores if isinstance(s, Formed)}

    def matrix(
        self,
        site: MatrixSite,
        x: Tensor,
        shared: Callable[[], Tensor],
        bias: Tensor | None,
    ) -> Tensor:
        """f(D + eps_u G_u, x) + bias; ``shared`` computes f(D, x) + bias."""
        store = self._unformed.get(site.source.key)
        if store is not None and store.form.scaled:  # s(V + eps_u H_u) is not s(V) + eps_u G_u
            raise CannotServe(f"{store.name} is moved through its standardisation's scale")
        folded = self._fold(x, self._inputs[site.x])
        plain = store is not None and store.family == site.family and not site.swap
        if store is not None and plain and store.stays_unformed:
            pairs = [(a, _scaled(b, self._steps)) for a, b in store.pairs]
            more = Ascend.apply(folded, store.family, store.fan, pairs)  # type: ignore[no-untyped-call]
            return self._added(shared(), more, site.y)
        if store is None:
            weights = self._moved(site.source)
            if weights is None:
                return shared()
        else:
            weights = _scaled(store.formed(), self._steps).view(-1, *site.source.tensor.shape)
        if plain and not isinstance(site.family, EmbeddingFamily):
            whole = site.family.apply_each(weights + site.source.tensor.detach(), folded)
            y = self._fold.undo(whole, self._outputs[site.y]).to(x.dtype)
            return y if bias is None else y + bias
        if not site.swap:
            return self._added(shared(), site.family.apply_each(weights, folded), site.y)
        y = shared()
        like = self._fold(y, self._outputs[site.y])
        return self._added(y, site.family.transpose_each(weights, folded, like), site.y)

    def _added(self, y: Tensor, more: Tensor, j: int) -> Tensor:
        return y + self._fold.undo(more, self._outputs[j]).to(y.dtype)

    def _moved(self, source: Source) -> Tensor | None:
        """[U, *D]: eps_u J_s g_u for a source that is linear, from formed gradients."""
        if not source.linear:
            raise CannotServe(f"{source.names[0]} is moved through a non-linear function")
        if not all(n in self._formed for n in source.names):
            return None
        moved = {n: _scaled(self._formed[n], self._steps) for n in source.names}
        return vmap(source.evaluate)(moved)

    def spread(self, source: Source, shape: tuple[int, ...], j: int, ndim: int) -> Tensor | None:
        """eps_u J_s g_u, shaped to broadcast against y: D itself broadcasts as ``shape``."""
        moved = self._moved(source)
        if moved is None:
            return None
        layout = self._outputs[j]
        rows = self._fold.to_rows(moved)
        axes = [1] * (ndim - len(shape)) + list(shape)
        axes.pop(layout.axis)
        placed = rows.reshape(rows.shape[0], 1, *axes)
        placed = placed.expand(-1, layout.many, *axes)
        return layout.place(placed)

    def rows(self, theta: Params) -> Params:
        """theta + eps_u g_u of every row: [N, *shape]."""
        moved = {}
        for name, value in theta.items():
            step = _scaled(self._formed[name], self._steps) if name in self._formed else 0 * value
            if name not in self._formed:
                step = step.expand(self._steps.shape[0], *value.shape)
            moved[name] = value + self._fold.to_rows(step).to(value.dtype)
        return moved


class Ascend(torch.autograd.Function):
    """sum_t b_t <a_t, x_s>: [U, q, ...] as b, a function of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, family: Family, fan: int | None, pairs: Any) -> Tensor:
        """The function itself."""
        ctx.given = family, fan, pairs, x.shape
        total = None
        for a, b in pairs:
            rows = family.right(b)
            part = centred_gram(family, x, a, fan).to(rows.dtype) @ rows
            total = part if total is None else total + part
        assert total is not None
        return family.unright(total, pairs[0][1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its derivative."""
        family, fan, pairs, _ = ctx.given
        total = None
        for a, b in pairs:
            weights = family.right(grad) @ family.right(b).transpose(1, 2)  # <g_s, b_t>
            part = family.gram_back(weights, a)
            if fan is not None:
                pulled = (weights @ family.mean(a).unsqueeze(2)).squeeze(2)
                part = part - family.mean_back(fan * pulled, a)
            total = part if total is None else total + part
        return total, None, None, None


def _scaled(t: Tensor, factors: Tensor) -> Tensor:
    return t * factors.to(t.dtype).view(-1, *(1,) * (t.ndim - 1))
