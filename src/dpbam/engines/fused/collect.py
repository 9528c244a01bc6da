"""From uses to gradients: the uses of each parameter, gathered.

A parameter whose uses are all matrix uses of one kind keeps them factored. Any other mixture of
uses is materialised and added up: always right, and such parameters are small or rare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.fused.fold import per_unit
from dpbam.engines.fused.generic import GenericUse
from dpbam.engines.fused.gradients import Factored, Gradient, Grams, Materialised, Norm, Pair
from dpbam.engines.fused.layers.base import Layer
from dpbam.engines.fused.layers.centred import Centred
from dpbam.engines.fused.layers.embedding import Embedding, as_linear, tied
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.scaled import ScaledGradient
from dpbam.engines.fused.uses import Flow, MatrixUse, Use
from dpbam.params import Params


@dataclass(frozen=True)
class Collected:
    """The gradients of every parameter that the loss depends on.

    Attributes:
        gradients: one or several per parameter (disjoint slices of it).
        of_use: for the n-th matrix use of the pass, the place of its factored gradient, or None.
    """

    gradients: list[Gradient]
    of_use: list[int | None]


@dataclass(frozen=True)
class PlainPass:
    """The plain gradients g_u, their norms and p / |g_u|: what BAM's third term is made of."""

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

    Args:
        uses: the tape's.
        flow: plain, or BAM's with ``plain`` from the pass before.
        plain: see above.
    """
    matrix_uses = [use for use in uses if isinstance(use, MatrixUse)]
    by_name: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        for name in use.names:
            by_name[name].append(use)
    factored = {n: groups for n, found in by_name.items() if (groups := _factorable(found))}
    gradients: list[Gradient] = []
    place: dict[int, int] = {}
    for groups in factored.values():
        for group in groups:
            first = next(i for i, use in enumerate(matrix_uses) if use is group[0])
            gradient = _factored(group, flow, plain, first)
            if gradient is not None:
                place.update({id(use): len(gradients) for use in group})
                gradients.append(gradient)
    rest = [use for use in uses if not set(use.names) <= factored.keys()]
    gradients += _materialised(rest, flow, plain)
    return Collected(gradients, [place.get(id(use)) for use in matrix_uses])


def _factorable(uses: list[Use]) -> list[list[MatrixUse]] | None:
    """Return the uses by weight, if the parameter can stay factored."""
    groups: dict[Any, list[MatrixUse]] = defaultdict(list)
    for use in uses:
        if not isinstance(use, MatrixUse) or len(use.names) != 1:
            return None
        if use.weight.narrow:  # a clipped sum must not be rounded: round unit by unit instead
            return None
        groups[use.weight.key].append(use)
    if not all(_one_kind(group) for group in groups.values()):
        return None
    weights = [group[0].weight for group in groups.values()]
    if len(weights) > 1 and not _disjoint(weights):
        return None
    return list(groups.values())


def _disjoint(weights: list[Any]) -> bool:
    """Whether selections of one parameter never take the same entry twice."""
    if not all(w.selection for w in weights):
        return False
    taken = [w.entries() for w in weights]
    if any(t is None for t in taken):
        return False
    return sum(map(len, taken)) == len(set().union(*taken))


def _one_kind(uses: list[MatrixUse]) -> bool:
    """One layer; or a linear one tied to an embedding, which is linear in one-hot rows."""
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
    place = None if plain is None else plain.collected.of_use[first]
    made = Factored(weight, layer, pairs, flow.limit)
    if plain is None or place is None:
        return ScaledGradient(made) if weight.scaled else made
    before = plain.collected.gradients[place]
    if isinstance(before, ScaledGradient):
        share, along = before.third_term(plain.penalty / 2)
        return ScaledGradient(_add_share(made, before.base, share), along)
    return replace(made, known=_known(made, plain.norms[place], swap=uses[0].swap))


def _pairs(uses: list[MatrixUse], flow: Flow) -> tuple[Layer, list[Pair]]:
    """Return the layer, and the pairs of all uses side by side: (x, b); or (x, ybar), (hbar, b)."""
    layers = {use.layer for use in uses}
    layer = uses[0].layer
    kinds: tuple[list[Pair], list[Pair]] = ([], [])
    for use in uses:
        for kind, pair in zip(kinds, use.pairs(flow), strict=True):
            if pair is not None and len(layers) > 1 and isinstance(use.layer, Embedding):
                pair, layer = as_linear(use.layer, *pair), tied(use.layer)
            if pair is not None:
                kind.append(pair)
    return layer, [_side_by_side(kind) for kind in kinds if kind]


def _side_by_side(pairs: list[Pair]) -> Pair:
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
    if t[0] != t[1]:  # some use has no h
        return {}
    return {
        ("left", left, left): norm.grams["left", 0, 0],
        ("right", right, right): norm.grams["right", 0, 0],
    }


def _add_share(gradient: Factored, plain: Factored, share: Tensor) -> Factored:
    """(x, ybar) -> (x, ybar + share b): the part of the third term that is made of G."""
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
                    f"{use.names[0]} is standardised with a scale, and that in low precision or in "
                    "some of its uses only"
                )
        for name, part in use.materialise(flow).items():
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            total[name] = total[name] + part if name in total else part
    return [Materialised(name, value) for name, value in total.items()]
