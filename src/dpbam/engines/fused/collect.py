"""From uses to gradients: collect the uses of each parameter.

A parameter whose uses are all matrix uses of one kind stays factored. For any other mixture of uses
the gradients are materialised and summed: always right, and such parameters are small or rare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.bilinear import Layer, Pair
from dpbam.engines.fused.fold import per_unit
from dpbam.engines.fused.generic import GenericUse
from dpbam.engines.fused.ghost_norm import Grams
from dpbam.engines.fused.gradients import Factored, Gradient, Materialised, Norm
from dpbam.engines.fused.layers.embedding import Embedding
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.standardised import Centred, ScaledGradient
from dpbam.engines.fused.uses import Flow, MatrixUse, Use
from dpbam.engines.fused.weights import Weight
from dpbam.params import Params, accumulation_dtype


@dataclass(frozen=True)
class Collected:
    """The gradients of every parameter that the loss depends on.

    Attributes:
        gradients: one or several per parameter (disjoint slices of it).
        of_use: for the n-th matrix use of the pass, the index of its factored gradient, or None.
    """

    gradients: list[Gradient]
    of_use: list[int | None]


@dataclass(frozen=True)
class PlainPass:
    """The plain gradients g_u, their norms and p / |g_u|: the parts of BAM's third term."""

    collected: Collected
    norms: list[Norm]
    penalty: Tensor

    def direction(self, names: tuple[str, ...]) -> Params:
        """Return (p / |g_u|) g_u for materialised parameters."""
        gradients = self.collected.gradients
        values = {g.name: g.values for g in gradients if isinstance(g, Materialised)}
        return {n: values[n] * per_unit(self.penalty, values[n]) for n in names}


def collect(uses: Sequence[Use], flow: Flow, plain: PlainPass | None = None) -> Collected:
    """Return the gradients of every parameter that the loss depends on.

    ``flow`` is plain, or BAM's with ``plain`` from the pass before.
    """
    matrix_uses = [use for use in uses if isinstance(use, MatrixUse)]
    place = {id(use): i for i, use in enumerate(matrix_uses)}
    by_name: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        for name in use.names:
            by_name[name].append(use)
    factored = {n: groups for n, found in by_name.items() if (groups := _factorable(found))}
    gradients: list[Gradient] = []
    index: dict[int, int] = {}
    for groups in factored.values():
        for group in groups:
            gradient = _factored(group, flow, plain, place[id(group[0])])
            if gradient is not None:
                index.update({id(use): len(gradients) for use in group})
                gradients.append(gradient)
    rest = [use for use in uses if not set(use.names) <= factored.keys()]
    gradients += _materialised(rest, flow, plain)
    return Collected(gradients, [index.get(id(use)) for use in matrix_uses])


def _factorable(uses: list[Use]) -> list[list[MatrixUse]] | None:
    """Return the uses by weight, if the parameter can stay factored."""
    groups: dict[Any, list[MatrixUse]] = defaultdict(list)
    for use in uses:
        if not isinstance(use, MatrixUse) or len(use.names) != 1:
            return None
        if use.weight.narrow:  # each unit's gradient is rounded, never their clipped sum
            return None
        groups[use.weight.key].append(use)
    if not all(_one_kind(group) for group in groups.values()):
        return None
    weights = [group[0].weight for group in groups.values()]
    if len(weights) > 1 and not _disjoint(weights):
        return None
    return list(groups.values())


def _disjoint(weights: list[Weight]) -> bool:
    """Whether selections of one parameter contain each entry at most once."""
    if not all(w.selection for w in weights):
        return False
    taken = [entry for w in weights for entry in w.entries()]
    return len(taken) == len(set(taken))


def _one_kind(uses: list[MatrixUse]) -> bool:
    """Whether there is one layer; or a linear one tied to an embedding, linear in one-hot rows."""
    layers = {use.layer for use in uses}
    mixed = all(isinstance(layer, Linear | Embedding) for layer in layers)
    return len(layers) == 1 or (mixed and uses[0].weight.func is None)


def _factored(
    uses: list[MatrixUse], flow: Flow, plain: PlainPass | None, first: int
) -> Gradient | None:
    layer, pairs = _pairs(uses, flow)
    if not pairs:
        return None
    weight = uses[0].weight
    if weight.centred:
        layer = cast(Layer, Centred(layer))
    index = None if plain is None else plain.collected.of_use[first]
    made = Factored(weight, layer, pairs, flow.limit, flow.purpose)
    if plain is None or index is None:
        return ScaledGradient(made) if weight.scaled else made
    before = plain.collected.gradients[index]
    if isinstance(before, ScaledGradient):
        share, along = before.third_term(plain.penalty / 2)
        return ScaledGradient(_add_share(made, before.base, share), along)
    return replace(made, known=_known(made, plain.norms[index], swap=uses[0].swap))


def _pairs(uses: list[MatrixUse], flow: Flow) -> tuple[Layer, list[Pair]]:
    """Return the layer, and the pairs of all uses joined: (x, b); or (x, ybar), (hbar, b)."""
    tied = len({use.layer for use in uses}) > 1
    layer = uses[0].layer
    kinds: tuple[list[Pair], list[Pair]] = ([], [])
    for use in uses:
        for kind, pair in zip(kinds, use.pairs(flow), strict=True):
            if pair is not None and tied and isinstance(use.layer, Embedding):
                layer, pair = use.layer.as_linear(*pair)
            if pair is not None:
                kind.append(pair)
    return layer, [_joined(kind) for kind in kinds if kind]


def _joined(pairs: list[Pair]) -> Pair:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 1)


def _known(gradient: Factored, norm: Norm, *, swap: bool) -> Grams:
    """Return the Gram matrices of x and of b, which the plain gradients' norm computed.

    The pairs are (x, ybar) and (hbar, b); with ``swap``, (ybar, x) and (b, hbar).
    """
    if not norm.grams or len(gradient.pairs) != 2:
        return {}
    left, right = (1, 0) if swap else (0, 1)
    t = [gradient.layer.positions(b) for _, b in gradient.pairs]
    if t[0] != t[1]:  # a use without h
        return {}
    return {
        ("left", left, left): norm.grams["left", 0, 0],
        ("right", right, right): norm.grams["right", 0, 0],
    }


def _add_share(gradient: Factored, plain: Factored, share: Tensor) -> Factored:
    """Return (x, ybar + share b) for (x, ybar): the part of the third term along G."""
    (x, ybar), *others = gradient.pairs
    b = plain.pairs[0][1]
    more = ybar + gradient.layer.channels(share, b) * b
    return replace(gradient, pairs=[(x, more), *others])


def _materialised(uses: list[Use], flow: Flow, plain: PlainPass | None) -> list[Gradient]:
    total: Params = {}
    for use in uses:
        if plain is not None:
            if isinstance(use, GenericUse):
                use = replace(use, direction=plain.direction(use.names))
            if isinstance(use, MatrixUse) and use.weight.scaled:
                raise UnsupportedModelError(
                    f"{use.names[0]} is standardised with a scale, and used in low precision or in "
                    "other ways too"
                )
        for name, part in use.materialise(flow).items():
            part = part.to(accumulation_dtype(part.dtype))
            total[name] = total[name] + part if name in total else part
    return [Materialised(name, value) for name, value in total.items()]
