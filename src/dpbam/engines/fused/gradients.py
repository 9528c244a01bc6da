"""Per-unit gradients of one parameter, materialised or factored into pairs.

The pairs (a, b) of a :class:`~dpbam.engines.fused.bilinear.Layer` give G_u = sum over pairs and
positions of b (x) a. Norms, sums and inner products do not need G_u:

    |G_u|^2          the ghost norm                                    :meth:`Factored.norm`
    sum_u c_u G_u    the layer's ordinary weight gradient, b scaled    :meth:`Factored.weighted_sum`
    <G_u, V>         sum_jt <b_jt, f(V, a_j)_t>                        :meth:`Factored.inner`

Gradients are immutable. A :class:`Norm` also holds what was computed on the way and can be reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dpbam.engines.fused.bilinear import (
    LONGEST,
    SHORTEST,
    Layer,
    Pair,
    Purpose,
    lengths,
    short_lengths,
    widest,
)
from dpbam.engines.fused.fold import per_unit
from dpbam.engines.fused.ghost_norm import (
    Factors,
    GhostNorm,
    Grams,
    MaterialisedNorm,
    blocks,
    ghost_norm,
    materialise,
    squared_lengths,
)
from dpbam.engines.fused.weights import Weight
from dpbam.params import Params

_SMALL = 2**11  # entries of a factored gradient that is materialised to be joined with others


@dataclass(frozen=True)
class Norm:
    """|d_u|^2, and what was computed on the way.

    Attributes:
        square: [U].
        materialised: [U, *D], where the norm needed it.
        grams: the Gram matrices, where the norm was differentiated.
        by_gram: all units were computed by Gram matrices.
        lengths: |a| and |b| of one outer product, whose norm is their product: [U] each.
        recomputed: (indices [k], gradients [k, *theta]) of units that were materialised because
            their parts cancel (:func:`recompute_cancelling`).
        inner: of a scaled gradient whose norm is differentiated, the factored part, its norm, and
            what is added to that.
    """

    square: Tensor
    materialised: Tensor | None = None
    grams: Grams = field(default_factory=dict)
    by_gram: bool = False
    lengths: tuple[Tensor, Tensor] | None = None
    recomputed: tuple[Tensor, Tensor] | None = None
    inner: tuple[Factored, Norm, Tensor] | None = None

    def detach(self) -> Norm:
        """Return the same without the graph."""
        return replace(self, square=self.square.detach(), inner=None)


class Gradient(Protocol):
    """The per-unit gradients of one parameter."""

    @property
    def name(self) -> str:
        """The parameter's name."""

    @property
    def flat(self) -> Tensor | None:
        """[U, entries] of a materialised gradient; None of a factored one."""

    def norm(self, *, differentiable: bool = False) -> Norm:
        """Return |d_u|^2, not repaired (:func:`settle`); ``differentiable``: in the pairs."""

    def doubt(self, norm: Norm, *, differentiable: bool) -> Doubt | None:
        """Return what shows whether parts of a unit cancel in the norm; None: they cannot."""

    def repair(self, norm: Norm, *, differentiable: bool) -> Norm:
        """Return the norm with the units computed another way whose parts cancel, or overflow."""

    def square_by_parameter(self, norm: Norm) -> dict[str, Tensor]:
        """Return |d_u|^2 of each parameter: [U] each."""

    def weighted_sum(self, factors: Factors, norm: Norm | None) -> Params:
        """Return sum_u c_u d_u."""

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return <d_u, vector>: [U]."""


class FactoredGradient(Gradient, Protocol):
    """One that stays factored."""

    def detach(self) -> FactoredGradient:
        """Return the same without the graph."""

    def by_unit(self) -> Params:
        """Return d_u, materialised: [U, *shape] per parameter."""

    def as_small(self) -> Materialised | None:
        """Return d_u, materialised, where its norm would need that and it is small; else None."""

    def as_pairs(self) -> Factored:
        """Return the pairs of d_u, for the ascent step.

        Raises:
            UnsupportedModelError: if d_u is not the pairs' sum.
        """

    def follow(
        self, second: Factored, norm: Norm, penalty: Tensor, *, swap: bool
    ) -> FactoredGradient:
        """Return BAM's gradient: ``second``, from the pairs of both passes, and the third term.

        Args:
            second: the gradient of the two uses.
            norm: this gradient's, of the plain pass.
            penalty: p / |g_u|: [U].
            swap: x and y are exchanged in the layer.
        """


@dataclass(frozen=True)
class Materialised:
    """[U, *shape]: small parameters, and those with uses of several kinds."""

    name: str
    values: Tensor

    def detach(self) -> Materialised:
        return Materialised(self.name, self.values.detach())

    @property
    def flat(self) -> Tensor:
        return self.values.reshape(self.values.shape[0], -1)

    @property
    def size(self) -> int:
        """The entries of a unit's gradient."""
        return self.values.shape[1:].numel()

    def norm(self, *, differentiable: bool = False) -> Norm:
        return Norm(self.flat.square().sum(1))

    def square_by_parameter(self, norm: Norm) -> dict[str, Tensor]:
        return {self.name: norm.square}

    def doubt(self, norm: Norm, *, differentiable: bool) -> None:
        return None

    def repair(self, norm: Norm, *, differentiable: bool) -> Norm:
        return norm

    def weighted_sum(self, factors: Factors, norm: Norm | None) -> Params:
        return {self.name: factors.contract(self.values)}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        return self.flat @ vector[self.name].to(self.values).flatten()

    def scale_by(self, factors: Tensor) -> Params:
        """Return c_u d_u: [U, *shape]."""
        return {self.name: self.values * per_unit(factors, self.values)}


@dataclass(frozen=True)
class Joined:
    """Materialised gradients of small parameters side by side: fewer, larger operations."""

    members: Sequence[Materialised]
    flat: Tensor  # [U, entries of all]

    @classmethod
    def of(cls, members: Sequence[Materialised]) -> Joined:
        return cls(members, torch.cat([member.flat for member in members], 1))

    @property
    def name(self) -> str:
        return self.members[0].name  # all are of one clipping group

    def norm(self, *, differentiable: bool = False) -> Norm:
        return Norm(squared_lengths(self.flat))

    def square_by_parameter(self, norm: Norm) -> dict[str, Tensor]:
        return {member.name: member.norm().square for member in self.members}

    def doubt(self, norm: Norm, *, differentiable: bool) -> None:
        return None

    def repair(self, norm: Norm, *, differentiable: bool) -> Norm:
        return norm

    def weighted_sum(self, factors: Factors, norm: Norm | None) -> Params:
        sums = torch.split_with_sizes(factors.contract(self.flat), self._sizes)
        pairs = zip(self.members, sums, strict=True)
        return {member.name: s.view(member.values.shape[1:]) for member, s in pairs}

    def scale_by(self, factors: Tensor) -> Params:
        """Return c_u d_u of each member: [U, *shape]."""
        products = (self.flat * per_unit(factors, self.flat)).split_with_sizes(self._sizes, 1)
        pairs = zip(self.members, products, strict=True)
        return {member.name: t.reshape(member.values.shape) for member, t in pairs}

    @property
    def _sizes(self) -> list[int]:
        return [member.size for member in self.members]

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([member.inner(vector) for member in self.members]).sum(0)


@dataclass(frozen=True)
class Factored:
    """The pairs of one matrix D: a parameter, a selection of one, or a centred one.

    Attributes:
        weight: D.
        layer: the layer's maths; centred where D is.
        pairs: (a, b) in the layer's form.
        limit: bytes that a norm may take for Gram matrices or materialised gradients.
        purpose: what the norm is followed by.
        known: Gram matrices that were computed before.
    """

    weight: Weight
    layer: Layer
    pairs: Sequence[Pair]
    limit: int
    purpose: Purpose = "sum"
    known: Grams = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.weight.names[0]

    @property
    def flat(self) -> None:
        return None

    def detach(self) -> Factored:
        return replace(self, pairs=[(a.detach(), b.detach()) for a, b in self.pairs])

    def square_by_parameter(self, norm: Norm) -> dict[str, Tensor]:
        return {self.name: norm.square}

    def by_unit(self) -> Params:
        return self.weight.pull_each(self.materialise())

    def as_small(self) -> Materialised | None:
        # of many small layers, side by side: their norms and sums are few operations in place of
        # ten per layer. The ascent step looks for a layer's norm by its place.
        small = self.weight.func is None and self.weight.tensor.numel() <= _SMALL
        if not small or self.purpose != "sum" or self._by_gram or self._bytes()[1] > self.limit:
            return None
        return Materialised(self.name, self.materialise())

    def as_pairs(self) -> Factored:
        return self

    def follow(self, second: Factored, norm: Norm, penalty: Tensor, *, swap: bool) -> Factored:
        """Return ``second`` with the Gram matrices of x and of b, which ``norm`` computed.

        There is no third term, since the layer is linear in the weight. The pairs of ``second`` are
        (x, ybar) and (hbar, b); with ``swap``, (ybar, x) and (b, hbar).
        """
        positions = {second.layer.positions(b) for _, b in second.pairs}
        if not norm.grams or len(second.pairs) != 2 or len(positions) != 1:  # a use without h
            return second
        left, right = (1, 0) if swap else (0, 1)
        known = {
            ("left", left, left): norm.grams["left", 0, 0],
            ("right", right, right): norm.grams["right", 0, 0],
        }
        return replace(second, known=known)

    def norm(self, *, differentiable: bool = False) -> Norm:
        """Return |G_u|^2 of D's gradient, by the cheaper of Gram matrices and materialising G_u."""
        if differentiable:
            return self._differentiable_norm(self.prefers_gram("derivative"))
        if self._by_gram:
            if len(self.pairs) == 1 and self.layer.is_outer_product(self.pairs[0][1]):
                a, b = self.pairs[0]
                left, right = self.layer.short_size(a), short_lengths(b)
                return Norm((left * right).square(), by_gram=True, lengths=(left, right))
            return Norm(self._in_slices(self._bytes()[0], self._ghost), by_gram=True)
        needed = self._bytes()[1]
        if needed <= self.limit:
            g = self.materialise()
            return Norm(squared_lengths(g), g)
        return Norm(self._in_slices(needed, self._materialised_norm))

    def doubt(self, norm: Norm, *, differentiable: bool) -> Doubt | None:
        if norm.materialised is not None or (differentiable and not norm.grams):
            return None
        if norm.lengths is not None:
            return Doubt([norm.lengths], 1.0, norm.square, cancels=False)
        with torch.no_grad():
            lengths = [(self.layer.short_size(a), short_lengths(b)) for a, b in self.pairs]
        return Doubt(lengths, self.layer.overlap, norm.square.detach())

    def repair(self, norm: Norm, *, differentiable: bool) -> Norm:
        if not differentiable:
            return recompute_cancelling(norm, self.sizes(), self.of_units)
        lost = ill_conditioned(self.detach().sizes(), norm.square.detach())
        if not len(lost):
            return norm
        flat = [t[lost] for pair in self.pairs for t in pair]
        redone = MaterialisedNorm.apply(self.layer, *flat)  # type: ignore[no-untyped-call]
        return replace(norm, square=norm.square.index_put((lost,), redone))

    @cached_property
    def _by_gram(self) -> bool:
        return self.prefers_gram(self.purpose)

    def prefers_gram(self, purpose: Purpose) -> bool:
        """Whether Gram matrices are cheaper, by the shapes of one unit alone.

        The two ways round differently. If the number of units decided, a record that makes a
        physical batch one unit larger would change the direction of every other: in half precision
        by more than C in all. Norms that exceed the memory limit are computed in slices.
        """
        if not self.layer.has_gram:
            return False
        t = self.layer.positions(self.pairs[0][1])
        return self.layer.prefers_gram(t, len(self.pairs), purpose)

    def materialise(self) -> Tensor:
        """Return G_u: [U, *D]."""
        return materialise(self.layer, self.pairs)

    def weighted_sum(self, factors: Factors, norm: Norm | None) -> Params:
        """Return J_s^T sum_u c_u G_u."""
        if norm is not None and norm.materialised is not None:
            total = factors.contract(norm.materialised)
            return self.weight.pull(total.view(self.weight.tensor.shape))
        return sum_with_recomputed(self.contract, self.name, factors, norm)

    def contract(self, factors: Factors) -> Params:
        """Return J_s^T sum_u c_u G_u by the layer's ordinary weight gradient."""

        def contract(a: Tensor, b: Tensor) -> Tensor:
            a, b = factors.select(a), factors.select(b)
            return self.layer.contract(a, b * per_unit(factors.values, b))

        if factors.values.shape[0]:
            total = reduce(torch.add, (contract(a, b) for a, b in self.pairs))
        else:
            total = self.pairs[0][1].new_zeros(self.layer.shape)
        shape = self.weight.tensor.shape
        return self.weight.pull(total if total.shape == shape else total.view(shape))

    def sizes(self) -> Tensor:
        """Return |A| |B| >= sum_t |a_t| |b_t| >= |G_u|, far above |G_u| if parts cancel: [U].

        Infinite where the squares of a or of b underflow.
        """
        number = torch.finfo(self.pairs[0][1].dtype)
        least, parts = (number.tiny / number.eps) ** 0.5, []
        for a, b in self.pairs:
            left, right = self.layer.size(a), lengths(b)
            product, shorter = left * right, torch.minimum(left, right)
            parts.append(product.masked_fill((shorter < least) & (product > 0), torch.inf))
        return torch.stack(parts).sum(0)

    def of_units(self, units: Tensor) -> Tensor:
        """Return the gradients of these units, materialised: [k, *theta]."""
        pairs = [(a[units], b[units]) for a, b in self.pairs]
        return self.weight.pull_each(materialise(self.layer, pairs))[self.name]

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return <G_u, J_s v>: [U]."""
        return self.inner_with(self.weight.push(vector))

    def inner_with(self, matrix: Tensor) -> Tensor:
        """Return <G_u, matrix>, by a forward pass of the layer with the matrix as weight: [U]."""
        total = self.pairs[0][1].new_zeros(self.pairs[0][1].shape[0])
        for a, b in self.pairs:
            total = total + (self.layer.apply(matrix.to(b.dtype), a) * b).flatten(1).sum(1)
        return total

    def _bytes(self) -> tuple[int, int]:
        """Return the bytes of the Gram matrices, and of the materialised gradients."""
        b = self.pairs[0][1]
        entries = self.layer.gram_entries(self.layer.positions(b))
        each = b.shape[0] * b.element_size()
        return each * entries, each * self.weight.tensor.numel()

    def _ghost(self, pairs: Sequence[Pair]) -> Tensor:
        known = self.known if pairs is self.pairs else {}
        return ghost_norm(self.layer, pairs, known)[0]

    def _materialised_norm(self, pairs: Sequence[Pair]) -> Tensor:
        return squared_lengths(materialise(self.layer, pairs))

    def _in_slices(self, needed: int, norm: Callable[[Sequence[Pair]], Tensor]) -> Tensor:
        """Return norm(pairs), by some units at a time where it exceeds the limit."""
        count = -(-needed // self.limit)
        if count <= 1:
            return norm(self.pairs)
        units = torch.arange(self.pairs[0][1].shape[0]).chunk(count)
        return torch.cat([norm([(a[i], b[i]) for a, b in self.pairs]) for i in units])

    def _differentiable_norm(self, by_gram: bool) -> Norm:
        flat = [t for pair in self.pairs for t in pair]
        if not by_gram:
            return Norm(MaterialisedNorm.apply(self.layer, *flat))  # type: ignore[no-untyped-call]
        square, *matrices = GhostNorm.apply(self.layer, *flat)  # type: ignore[no-untyped-call]
        return Norm(square, grams=dict(zip(blocks(self.pairs), matrices, strict=True)))


# --- units whose parts cancel


class Doubt(NamedTuple):
    """What shows whether a norm is ill-conditioned, in the dtype of the pairs.

    Attributes:
        lengths: of a, without the layer's overlap, and of b, for each pair: [U] each.
        overlap: the layer's.
        square: |G_u|^2: [U].
        cancels: whether parts of G_u can cancel; one outer product has no parts.
        bound: from the sizes of G_u, float64 [U], to those of the gradient; None: the same.
    """

    lengths: list[tuple[Tensor, Tensor]]
    overlap: float
    square: Tensor
    cancels: bool = True
    bound: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Measured:
    """The norms of gradients as first computed, and on the device whether they are sound.

    Attributes:
        gradients: what was measured.
        norms: of each gradient, not repaired.
        flags: bool, each whether a part of what is behind the norms is sound.
        owners: of each flag, the index of the gradient to be repaired where it is False; None of
            gradients that nothing can repair, whose squares are to be finite.
        differentiable: whether the norms are to be differentiated.
    """

    gradients: Sequence[Gradient]
    norms: list[Norm]
    flags: Tensor
    owners: Sequence[int | None]
    differentiable: bool

    def settle(self, sound: Sequence[bool]) -> tuple[list[Norm], bool]:
        """Return the norms, repaired where ``sound``, the flags as read, is False; and all flags.

        If all are True, all numbers behind the norms are ordinary: finite, and neither so small nor
        so large that squares under- or overflow; then no unit has to be left out of a sum to keep
        the sum finite.
        """
        if all(sound):
            return self.norms, True
        norms = list(self.norms)
        doubted = {owner for owner, ok in zip(self.owners, sound, strict=True) if not ok}
        for i in (owner for owner in doubted if owner is not None):
            norms[i] = self.gradients[i].repair(norms[i], differentiable=self.differentiable)
        return norms, False


def measure(gradients: Sequence[Gradient], *, differentiable: bool = False) -> Measured:
    """Compute the norm of each gradient, without waiting for the device.

    Whether parts of a unit cancel is seen on the device for all gradients together, and read once
    (:func:`read_flags`): a read per layer would make a GPU wait as often. The few gradients in
    doubt are then repaired one by one, each by a decision in float64 (:func:`ill_conditioned`),
    which is the same for all units that are not in doubt.
    """
    norms = _norms(gradients, differentiable=differentiable)
    ranges: dict[torch.dtype, list[_Range]] = {}
    cancelling: dict[torch.dtype, dict[int, Doubt]] = {}
    for i, (gradient, norm) in enumerate(zip(gradients, norms, strict=True)):
        doubt, square = gradient.doubt(norm, differentiable=differentiable), norm.square
        if doubt is None:
            ranges.setdefault(square.dtype, []).append(_Range(None, square.detach(), _FINITE))
        elif doubt.cancels:
            cancelling.setdefault(square.dtype, {})[i] = doubt
        else:
            left, right = doubt.lengths[0]
            limits = (left, _LENGTH), (right, _LENGTH), (square, _SQUARE)
            ranges.setdefault(square.dtype, []).extend(_Range(i, t, kind) for t, kind in limits)
    flags = [_in_range(rows) for rows in ranges.values()]
    flags += [_sound(list(doubts.values())) for doubts in cancelling.values()]
    owners = [row.owner for rows in ranges.values() for row in rows]
    owners += [i for doubts in cancelling.values() for i in doubts]
    joint = flags[0] if len(flags) == 1 else torch.cat(flags)
    return Measured(gradients, norms, joint, owners, differentiable)


def read_flags(*measured: Measured) -> list[list[bool]]:
    """Read the flags of several passes from the device at once."""
    flags = [m.flags for m in measured]
    numbers: list[bool] = (flags[0] if len(flags) == 1 else torch.cat(flags)).tolist()
    ends = [0, *accumulate(len(m.flags) for m in measured)]
    return [numbers[a:b] for a, b in pairwise(ends)]


def settle(
    gradients: Sequence[Gradient], *, differentiable: bool = False
) -> tuple[list[Norm], bool]:
    """Return the norm of each gradient, and whether all numbers behind them are ordinary."""
    if not gradients:
        return [], True
    measured = measure(gradients, differentiable=differentiable)
    (sound,) = read_flags(measured)
    return measured.settle(sound)


def _norms(gradients: Sequence[Gradient], *, differentiable: bool) -> list[Norm]:
    """Return the norm of each gradient; small ones that are to be differentiated together."""
    flat = {i: t for i, g in enumerate(gradients) if (t := g.flat) is not None}
    if not differentiable or len({t.dtype for t in flat.values()}) != 1:
        return [g.norm(differentiable=differentiable) for g in gradients]
    sizes = [t.shape[1] for t in flat.values()]
    squares = torch.cat(list(flat.values()), 1).square().split_with_sizes(sizes, 1)
    joint = {i: Norm(t.sum(1)) for i, t in zip(flat, squares, strict=True)}
    return [joint.get(i) or g.norm(differentiable=True) for i, g in enumerate(gradients)]


def _sound(doubts: Sequence[Doubt]) -> Tensor:
    """Return whether all lengths of a gradient are ordinary and no unit's parts cancel: [L]."""
    square = torch.stack([doubt.square for doubt in doubts])  # [L, U]
    short = torch.stack([t for doubt in doubts for pair in doubt.lengths for t in pair])  # [2 P, U]
    counts = tuple(len(doubt.lengths) for doubt in doubts)  # of pairs
    overlaps = tuple(d.overlap for d in doubts for _ in d.lengths)
    owner, overlap = _constants(counts, overlaps, widest(short), short.device)
    low, high = torch.aminmax(short.view(len(overlaps), -1), dim=1)  # NaN if one is
    ordinary = (low > SHORTEST) & (high < LONGEST)  # [P]
    left, right = short.to(widest(short)).view(len(overlaps), 2, -1).unbind(1)
    sizes = left * overlap * right  # [P, U], to be added up by gradient
    if len(overlaps) > len(doubts):
        empty = sizes.new_zeros(square.shape)
        sizes = empty.index_add(0, owner, sizes)
        ordinary = empty.new_zeros(len(doubts)).index_add(0, owner, (~ordinary).to(sizes)) == 0
    if any(doubt.bound is not None for doubt in doubts):
        rows = zip(doubts, sizes.unbind(), strict=True)
        sizes = torch.stack([s if d.bound is None else d.bound(s) for d, s in rows])
    sound: Tensor = ordinary & _well_conditioned(sizes, square).all(1)
    return sound


_FINITE, _LENGTH, _SQUARE = "finite", "length", "square"


class _Range(NamedTuple):
    """Numbers of the units, [U], that are to be in a range."""

    owner: int | None  # the gradient to be repaired where one is not
    values: Tensor
    kind: str


def _in_range(rows: Sequence[_Range]) -> Tensor:
    """Return whether all units are within the range of each row; NaN is not: [rows].

    A square is to be finite; and that of an outer product right, so that neither it nor the squares
    of its factors under- or overflow.
    """
    low, high = torch.aminmax(torch.stack([row.values for row in rows]), dim=1)  # NaN if one is
    least, most = _limits(tuple(row.kind for row in rows), low.dtype, low.device)
    within: Tensor = (low > least).logical_and_(high < most)
    return within


@lru_cache(maxsize=64)
def _limits(
    kinds: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what the numbers of each kind must exceed, and stay below: [rows] each."""
    ranges = {
        _FINITE: (-torch.inf, torch.inf), _LENGTH: (SHORTEST, LONGEST),
        _SQUARE: (torch.finfo(dtype).tiny, torch.inf),
    }  # fmt: skip
    least, most = zip(*(ranges[kind] for kind in kinds), strict=True)
    return (
        torch.tensor(least, dtype=dtype, device=device),
        torch.tensor(most, dtype=dtype, device=device),
    )


@lru_cache(maxsize=64)
def _constants(
    counts: tuple[int, ...], overlaps: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the gradient of each pair, [P], and the overlaps, [P, 1], on the device."""
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    return (
        torch.tensor(owner, device=device),
        torch.tensor(overlaps, dtype=dtype, device=device)[:, None],
    )


def _well_conditioned(sizes: Tensor, square: Tensor) -> Tensor:
    """Whether |G_u|^2 > 3 sqrt(eps) sizes^2, and is finite."""
    least = 3 * torch.finfo(square.dtype).eps ** 0.5 * sizes.square()
    well: Tensor = (square > least) & (square < torch.inf)  # least >= 0, and NaN is neither
    return well


def recompute_cancelling(norm: Norm, sizes: Tensor, of_units: Callable[[Tensor], Tensor]) -> Norm:
    """Return the norm with those units materialised whose parts cancel, or overflow.

    |G_u|^2 as a sum of products has an error of some eps sizes^2, and a weighted sum of parts one
    of some eps sizes. A unit whose parts cancel could therefore exceed the clipping norm, or hide
    the others. Such a unit is materialised: its norm and its part of the sum use the same numbers.
    The others are left as they are, by the same way: a record must not change how they round.
    ``sizes`` [U] bounds |d_u| if nothing cancelled; ``of_units`` materialises gradients.
    """
    lost = ill_conditioned(sizes, norm.square)
    if not len(lost):
        return norm
    values = of_units(lost)
    redone = values.reshape(len(lost), -1).square().sum(1)
    square = norm.square.index_put((lost,), redone.to(norm.square.dtype))
    return Norm(square, by_gram=norm.by_gram, recomputed=(lost, values))


def ill_conditioned(sizes: Tensor, square: Tensor) -> Tensor:
    """Return the units with |G_u|^2 <= 3 sqrt(eps) sizes^2, each judged by itself: [k].

    For the others the relative error of the norm is about sqrt(eps): 3e-4 in float32, within
    :data:`dpbam.privacy.clipping.ROUNDING`. ``sizes`` is in float64, where nothing of float32
    under- or overflows, so that 0 means that the gradient is zero.
    """
    well = _well_conditioned(sizes, square) | (sizes == 0)
    lost: Tensor = (~well).nonzero()[:, 0]
    return lost


def sum_with_recomputed(
    contract: Callable[[Factors], Params], name: str, factors: Factors, norm: Norm | None
) -> Params:
    """Return the weighted sum: by ``contract`` for most units, plus those recomputed."""
    if norm is None or norm.recomputed is None:
        return contract(factors)
    units, values = norm.recomputed
    of_all = factors.values.new_zeros(len(norm.square))
    of_all[factors.units] = factors.values
    total = contract(Factors.of(of_all.index_fill(0, units, 0.0)))
    return {**total, name: total[name] + Factors.of(of_all[units]).contract(values)}
