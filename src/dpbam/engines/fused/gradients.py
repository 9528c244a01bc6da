"""Per-unit gradients of one parameter, held materialised or as the factors they are made of.

The pairs (a, b) of a :class:`~dpbam.engines.fused.layers.base.Layer` give G_u = sum over pairs and
positions of b (x) a. Norms, sums and inner products need not materialise it:

    |G_u|^2          sum_jk sum_tt' <a_jt, a_kt'> <b_jt, b_kt'>        :func:`ghost_norm`
    sum_u c_u G_u    the layer's ordinary weight gradient, b scaled    :meth:`Factored.weighted_sum`
    <G_u, V>         sum_jt <b_jt, f(V, a_j)_t>                        :meth:`Factored.inner`

Gradients are immutable. What a norm computed on the way is in the :class:`Norm` that it returns,
and is handed to whoever can use it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.fused.fold import per_unit
from dpbam.engines.fused.layers.base import Layer, lengths
from dpbam.engines.fused.weights import Weight
from dpbam.params import Params

Pair = tuple[Tensor, Tensor]
_CACHED = 2**20  # numbers, 4 MiB
Grams = dict[tuple[str, int, int], Tensor]  # ("left" or "right", j, k): of a_j and a_k, or b


@dataclass(frozen=True)
class Norm:
    """|d_u|^2, and what was computed on the way.

    Attributes:
        square: [U].
        materialised: [U, *D], where the norm needed it.
        grams: the Gram matrices, where the norm was differentiated.
        by_gram: the Gram matrices served every unit.
        apart: (places [k], gradients [k, *theta]) of units that are held by themselves, because
            their parts cancel (:func:`set_apart`).
    """

    square: Tensor
    materialised: Tensor | None = None
    grams: Grams = field(default_factory=dict)
    by_gram: bool = False
    apart: tuple[Tensor, Tensor] | None = None


class Gradient(Protocol):
    """The per-unit gradients of one parameter."""

    @property
    def name(self) -> str:
        """The parameter's name."""

    def detached(self) -> Gradient:
        """Without the graph."""

    def norm(self, *, differentiable: bool = False) -> Norm:
        """|d_u|^2; ``differentiable``: in the pairs."""

    def weighted_sum(self, factors: Tensor, norm: Norm | None) -> Params:
        """sum_u factors[u] d_u; a factor of 0 removes the unit, even one that is NaN."""

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """[U]: <d_u, vector>."""


@dataclass(frozen=True)
class Materialised:
    """[U, *shape]: small parameters, and those used in several ways."""

    name: str
    values: Tensor

    def detached(self) -> Materialised:
        """Without the graph."""
        return Materialised(self.name, self.values.detach())

    def norm(self, *, differentiable: bool = False) -> Norm:
        """|d_u|^2."""
        return Norm(self.values.reshape(self.values.shape[0], -1).square().sum(1))

    def weighted_sum(self, factors: Tensor, norm: Norm | None) -> Params:
        """Factors times values."""
        return {self.name: weighted(self.values, factors)}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Values times vector."""
        v = vector[self.name].to(self.values)
        return self.values.reshape(self.values.shape[0], -1) @ v.flatten()


@dataclass(frozen=True)
class Factored:
    """The pairs of one matrix D: a parameter, a selection of one, or a centred one.

    Attributes:
        weight: D.
        layer: the layer's maths; centred where D is.
        pairs: (a, b) in the layer's form.
        limit: bytes that a norm may take for Gram matrices or materialised gradients.
        known: Gram matrices that were computed before.
    """

    weight: Weight
    layer: Layer
    pairs: Sequence[Pair]
    limit: int = 2**28
    known: Grams = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.weight.names[0]

    def detached(self) -> Factored:
        """Without the graph."""
        return replace(self, pairs=[(a.detach(), b.detach()) for a, b in self.pairs])

    def norm(self, *, differentiable: bool = False) -> Norm:
        """|G_u|^2; units whose parts cancel are set apart."""
        norm = self.raw_norm(differentiable=differentiable)
        exact = differentiable or norm.materialised is not None
        return norm if exact else set_apart(self, norm)

    def raw_norm(self, *, differentiable: bool = False) -> Norm:
        """|G_u|^2 of D's gradient, by the cheaper of materialising G_u and not."""
        by_gram = self.prefers_gram(twice=differentiable)
        if differentiable:
            return self._differentiable_norm(by_gram)
        if by_gram:
            return Norm(self._in_parts(self._bytes()[0], self._ghost), by_gram=True)
        return self._materialised_norm()

    def prefers_gram(self, *, twice: bool = False) -> bool:
        """Whether Gram matrices are the cheaper way, within the memory limit."""
        if not self.layer.has_gram:
            return False
        t = self.layer.positions(self.pairs[0][1])
        better = self.layer.prefers_gram(t, len(self.pairs), twice=twice)
        gram, materialised = self._bytes()
        if (gram if better else materialised) <= self.limit:
            return better
        return gram <= materialised

    def materialise(self) -> Tensor:
        """[U, *D]: G_u."""
        return materialise(self.layer, self.pairs)

    def weighted_sum(self, factors: Tensor, norm: Norm | None) -> Params:
        """J_s^T sum_u c_u G_u."""
        if norm is not None and norm.materialised is not None:
            total = weighted(norm.materialised, factors)
            return self.weight.pull(total.view(self.weight.tensor.shape))
        return with_those_apart(self.contracted, self.name, factors, norm)

    def contracted(self, factors: Tensor) -> Params:
        """Return J_s^T sum_u c_u G_u by the layer's ordinary weight gradient."""
        return self.weight.pull(self._contracted(factors).view(self.weight.tensor.shape))

    def sizes(self) -> Tensor:
        """[U]: |A| |B| >= sum_t |a_t| |b_t| >= |G_u|; far above |G_u|, the parts cancel.

        Infinite where the squares of a or of b underflow.
        """
        number = torch.finfo(self.pairs[0][1].dtype)
        least, parts = (number.tiny / number.eps) ** 0.5, []
        for a, b in self.pairs:
            left, right = self.layer.size(a), lengths(b)
            product, shorter = left * right, torch.minimum(left, right)
            parts.append(product.masked_fill((shorter < least) & (product > 0), torch.inf))
        return torch.stack(parts).sum(0)

    def some(self, places: Tensor) -> Tensor:
        """[k, *theta]: the gradients of some units, materialised."""
        pairs = [(a[places], b[places]) for a, b in self.pairs]
        return self.weight.pull_each(materialise(self.layer, pairs))[self.name]

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """<G_u, J_s v>: one forward pass of the layer with v in the weight's place."""
        return self.inner_with(self.weight.push(vector))

    def inner_with(self, matrix: Tensor) -> Tensor:
        """[U]: <G_u, matrix>."""
        total = self.pairs[0][1].new_zeros(self.pairs[0][1].shape[0])
        for a, b in self.pairs:
            total = total + (self.layer.apply(matrix.to(b.dtype), a) * b).flatten(1).sum(1)
        return total

    def _contracted(self, factors: Tensor) -> Tensor:
        kept = factors != 0
        whole = bool(kept.all())
        total = None
        for a, b in self.pairs:
            a, b, c = (a, b, factors) if whole else (a[kept], b[kept], factors[kept])
            if a.shape[0]:
                part = self.layer.contract(a, b * per_unit(c, b))
                total = part if total is None else total + part
        return self.pairs[0][1].new_zeros(self.layer.shape) if total is None else total

    def _bytes(self) -> tuple[int, int]:
        """Return what the Gram matrices take, and the materialised gradients."""
        b = self.pairs[0][1]
        entries = self.layer.gram_entries(self.layer.positions(b))
        each = b.shape[0] * b.element_size()
        return each * entries, each * self.weight.tensor.numel()

    def _ghost(self, pairs: Sequence[Pair], whole: bool) -> Tensor:
        return ghost_norm(self.layer, pairs, self.known if whole else {})[0]

    def _materialised_norm(self) -> Norm:
        needed = self._bytes()[1]
        if needed <= self.limit:
            g = self.materialise()
            return Norm(frobenius(g, g), g)

        def part(pairs: Sequence[Pair], whole: bool) -> Tensor:
            g = materialise(self.layer, pairs)
            return frobenius(g, g)

        return Norm(self._in_parts(needed, part))

    def _in_parts(self, needed: int, norm: Callable[[Sequence[Pair], bool], Tensor]) -> Tensor:
        """Return norm(pairs, whole); over the limit, some units at a time."""
        count = -(-needed // self.limit)
        if count <= 1:
            return norm(self.pairs, True)
        units = torch.arange(self.pairs[0][1].shape[0]).chunk(count)
        return torch.cat([norm([(a[i], b[i]) for a, b in self.pairs], False) for i in units])

    def _differentiable_norm(self, by_gram: bool) -> Norm:
        flat = [t for pair in self.pairs for t in pair]
        if not by_gram:
            return Norm(MaterialisedNorm.apply(self.layer, *flat))  # type: ignore[no-untyped-call]
        square, *matrices = GhostNorm.apply(self.layer, *flat)  # type: ignore[no-untyped-call]
        lost = ill_conditioned(self.detached().sizes(), square.detach())
        if len(lost):
            some = [t[lost] for t in flat]
            redone = MaterialisedNorm.apply(self.layer, *some)  # type: ignore[no-untyped-call]
            square = square.index_put((lost,), redone)
        return Norm(square, grams=dict(zip(_blocks(self.pairs), matrices, strict=True)))


# --- units whose parts cancel


class Factors(Protocol):
    """What :func:`set_apart` asks of a factored gradient."""

    def sizes(self) -> Tensor:
        """[U]: what |d_u| would be if nothing cancelled."""

    def some(self, places: Tensor) -> Tensor:
        """[k, *theta]: the gradients of some units."""


def set_apart(gradient: Factors, norm: Norm) -> Norm:
    """Return the norm with those units materialised whose parts cancel, or overflow.

    |G_u|^2 as a sum of products is off by some eps sizes^2, and a weighted sum of parts by some eps
    sizes: a unit whose parts cancel could pass the clip unseen, or drown the others. Such a unit is
    materialised, and its norm and its share of the sum are of the same numbers.
    """
    lost = ill_conditioned(gradient.sizes(), norm.square)
    if not len(lost):
        return norm
    values = gradient.some(lost)
    redone = values.reshape(len(lost), -1).square().sum(1)
    square = norm.square.index_put((lost,), redone.to(norm.square.dtype))
    return Norm(square, apart=(lost, values))


def ill_conditioned(sizes: Tensor, square: Tensor) -> Tensor:
    """[k]: the units with |G_u|^2 <= 3 sqrt(eps) sizes^2. The rule looks at one unit alone.

    For the others the norm is right to about sqrt(eps): 3e-4 in float32, within what
    :data:`dpbam.privacy.clipping.ROUNDING` allows. ``sizes`` is in float64, where nothing of
    float32 under- or overflows, so that a unit is passed over only if its gradient is zero.
    """
    least = 3 * torch.finfo(square.dtype).eps ** 0.5 * sizes.square()
    well = (square > least) & square.isfinite()
    lost: Tensor = (~(well | (sizes == 0))).nonzero()[:, 0]
    return lost


def with_those_apart(
    contracted: Callable[[Tensor], Params], name: str, factors: Tensor, norm: Norm | None
) -> Params:
    """Return the weighted sum: ``contracted`` for most units, those set apart by themselves."""
    if norm is None or norm.apart is None:
        return contracted(factors)
    places, values = norm.apart
    total = contracted(factors.index_fill(0, places, 0.0))
    return {**total, name: total[name] + weighted(values, factors[places])}


# --- the formulas


def materialise(layer: Layer, pairs: Sequence[Pair]) -> Tensor:
    """[U, *D]: G_u = sum over the pairs."""
    total = None
    for a, b in pairs:
        part = layer.materialise(a, b)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _blocks(pairs: Sequence[Pair]) -> list[tuple[str, int, int]]:
    count = len(pairs)
    return [(s, j, k) for j in range(count) for k in range(j, count) for s in ("left", "right")]


def grams_of(layer: Layer, pairs: Sequence[Pair], known: Grams) -> Grams:
    """Return the Gram matrices of a and of b between all pairs j <= k: [U, T, T] each."""
    rows = [layer.rows(b) for _, b in pairs]
    found: Grams = {}
    for side, j, k in _blocks(pairs):
        matrix = known.get((side, j, k))
        if matrix is None and side == "left":
            matrix = layer.gram(pairs[j][0], pairs[k][0]).to(rows[0].dtype)
        found[side, j, k] = rows[j] @ rows[k].transpose(1, 2) if matrix is None else matrix
    return found


def ghost_norm(layer: Layer, pairs: Sequence[Pair], known: Grams) -> tuple[Tensor, Grams]:
    """Return |G_u|^2 = sum_jk sum_tt' K_jk,tt' S_jk,tt', and the Gram matrices K and S."""
    grams = grams_of(layer, pairs, known)
    total = None
    for side, j, k in grams:
        if side == "left":
            part = frobenius(grams["left", j, k], grams["right", j, k]) * (1 if j == k else 2)
            total = part if total is None else total + part
    assert total is not None
    return total, grams


def frobenius(left: Tensor, right: Tensor) -> Tensor:
    """Return <left_u, right_u> for each unit: [U].

    As sums of products, which are both faster and more accurate than products of matrices with one
    row; some units at a time, so that the products stay in the processor's cache.
    """
    count = -(-left.numel() // _CACHED) or 1
    parts = zip(left.flatten(1).chunk(count), right.flatten(1).chunk(count), strict=True)
    return torch.cat([torch.linalg.vecdot(a, b) for a, b in parts])


def weighted(values: Tensor, factors: Tensor) -> Tensor:
    """Return sum_u factors[u] values[u], leaving out units whose factor is 0."""
    kept = factors != 0
    if not bool(kept.all()):
        values, factors = values[kept], factors[kept]
    total: Tensor = torch.tensordot(factors.to(values.dtype), values, dims=1)
    return total


class GhostNorm(torch.autograd.Function):
    """:func:`ghost_norm` with its derivative written out; also returns the Gram matrices.

    Gradients: in b_j, 2 sum_k K_jk b_k; in a_j, that of 2 sum_k <S_jk, gram(a_j, a_k)>.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, *flat: Tensor) -> tuple[Tensor, ...]:
        square, grams = ghost_norm(layer, _paired(flat), {})
        matrices = tuple(grams.values())
        ctx.save_for_backward(*flat, *matrices)
        ctx.given = layer, tuple(grams), len(flat)
        ctx.mark_non_differentiable(*matrices)
        return (square, *matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *grams_unused: Any) -> Any:
        layer, keys, count = ctx.given
        pairs = _paired(ctx.saved_tensors[:count])
        grams = dict(zip(keys, ctx.saved_tensors[count:], strict=True))
        out: list[Any] = [None]
        for j, (_, b) in enumerate(pairs):
            in_a = in_b = None
            for k, (c, d) in enumerate(pairs):
                left, right = (_block(grams, side, j, k) for side in ("left", "right"))
                if ctx.needs_input_grad[1 + 2 * j]:
                    in_a = _plus(in_a, layer.gram_back(right, c))
                if ctx.needs_input_grad[2 + 2 * j]:
                    in_b = _plus(in_b, left @ (layer.rows(d) * (2 * grad).view(-1, 1, 1)))
            out.append(None if in_a is None else in_a * per_unit(2 * grad, in_a))
            out.append(None if in_b is None else layer.from_rows(in_b, b))
        return tuple(out)


class MaterialisedNorm(torch.autograd.Function):
    """|G_u|^2 by materialising G_u. Gradients: f(2 G_u, a) in b, its transpose in a."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, *flat: Tensor) -> Tensor:
        g = materialise(layer, _paired(flat))
        ctx.save_for_backward(*flat, g)
        ctx.layer = layer
        return frobenius(g, g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        *flat, g = ctx.saved_tensors
        weights = g * per_unit(2 * grad, g)
        out: list[Any] = [None]
        for j, (a, b) in enumerate(_paired(flat)):
            needed = ctx.needs_input_grad[1 + 2 * j : 3 + 2 * j]
            out.append(ctx.layer.transpose_each(weights, b, a) if needed[0] else None)
            out.append(ctx.layer.apply_each(weights, a) if needed[1] else None)
        return tuple(out)


def _paired(flat: Sequence[Tensor]) -> list[Pair]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _block(grams: Grams, side: str, j: int, k: int) -> Tensor:
    return grams[side, j, k] if j <= k else grams[side, k, j].transpose(1, 2)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
