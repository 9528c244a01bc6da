"""From uses to gradients: collect the uses of each parameter.

A parameter whose uses are all matrix uses of one kind stays factored. For any other mixture of uses
the gradients are materialised and summed: always right, and such parameters are small or rare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dpbam.engines.fused.bilinear import Layer, Pair
from dpbam.engines.fused.fold import per_unit
from dpbam.engines.fused.gradients import Factored, FactoredGradient, Gradient, Materialised, Norm
from dpbam.engines.fused.standardised import Centred, ScaledGradient
from dpbam.engines.fused.uses import Flow, MatrixUse, Use
from dpbam.engines.fused.weights import Weight
from dpbam.params import Params, accumulation_dtype


@dataclass(frozen=True)
class Collected:
    """The gradients of every parameter that the loss depends on.

    Attributes:
        factored: one or several per parameter (disjoint slices of it).
        materialised: one per parameter.
        of_use: the index of its factored gradient, by the place of a use on the tape.
    """

    factored: list[FactoredGradient]
    materialised: list[Materialised]
    of_use: dict[int, int]

    @property
    def gradients(self) -> list[Gradient]:
        """All of them, the factored ones first."""
        return [*self.factored, *self.materialised]

    def detach(self) -> Collected:
        """Return the same without the graph."""
        return Collected(
            [g.detach() for g in self.factored],
            [g.detach() for g in self.materialised],
            self.of_use,
        )


@dataclass(frozen=True)
class PlainPass:
    """The plain gradients g_u, their norms and p / |g_u|: the parts of BAM's third term."""

    collected: Collected
    norms: list[Norm]
    penalty: Tensor

    def third_term(self, names: tuple[str, ...]) -> Params:
        """Return (p / |g_u|) g_u for materialised parameters."""
        values = {g.name: g.values for g in self.collected.materialised}
        return {n: values[n] * per_unit(self.penalty, values[n]) for n in names}


def collect(uses: Sequence[Use], flow: Flow, plain: PlainPass | None = None) -> Collected:
    """Return the gradients of every parameter that the loss depends on.

    ``flow`` is plain, or BAM's with ``plain`` from the pass before.
    """
    by_name: dict[str, list[tuple[int, Use]]] = defaultdict(list)
    for place, use in enumerate(uses):
        for name in use.names:
            by_name[name].append((place, use))
    factored: list[FactoredGradient] = []
    of_use: dict[int, int] = {}
    factored_names: set[str] = set()
    for name, placed in by_name.items():
        groups = _group_by_weight(placed)
        if groups is None:
            continue
        factored_names.add(name)
        for group in groups:
            gradient = _factor(group, flow, plain)
            if gradient is not None:
                of_use.update(dict.fromkeys(group, len(factored)))
                factored.append(gradient)
    others = [use for use in uses if not factored_names.issuperset(use.names)]
    return Collected(factored, _materialise(others, flow), of_use)


def _group_by_weight(placed: list[tuple[int, Use]]) -> list[dict[int, MatrixUse]] | None:
    """Return the uses of one parameter by weight, if all of them can stay factored.

    Each group has uses of one layer; or of a linear one and an embedding, which are tied. Several
    groups are selections that contain each entry of the parameter at most once.
    """
    matrices: dict[int, MatrixUse] = {}
    for place, use in placed:
        matrix = use.factorable
        if matrix is None:
            return None
        matrices[place] = matrix
    if len(matrices) == 1:  # the usual case
        return [matrices]
    groups: dict[Any, dict[int, MatrixUse]] = defaultdict(dict)
    for place, matrix in matrices.items():
        groups[matrix.weight.key][place] = matrix
    for group in groups.values():
        layers = {use.layer for use in group.values()}
        tied = all(layer.is_matrix_product for layer in layers)
        if len(layers) > 1 and not (tied and _weight_of(group).func is None):
            return None
    weights = [_weight_of(group) for group in groups.values()]
    if len(weights) > 1:
        if not all(w.selection for w in weights):
            return None
        entries = [entry for w in weights for entry in w.entries()]
        if len(entries) != len(set(entries)):
            return None
    return list(groups.values())


def _weight_of(group: dict[int, MatrixUse]) -> Weight:
    return next(iter(group.values())).weight


def _factor(
    group: dict[int, MatrixUse], flow: Flow, plain: PlainPass | None
) -> FactoredGradient | None:
    """Return the factored gradient of uses of one weight; None: the loss depends on none."""
    uses = list(group.values())
    layer, pairs = _join_pairs(uses, flow)
    if not pairs:
        return None
    weight = uses[0].weight
    if weight.centred:
        layer = cast(Layer, Centred(layer))
    gradient = Factored(weight, layer, pairs, flow.limit, flow.purpose)
    index = None if plain is None else plain.collected.of_use.get(next(iter(group)))
    if plain is None or index is None:
        return ScaledGradient(gradient) if weight.scaled else gradient
    before, norm = plain.collected.factored[index], plain.norms[index]
    return before.follow(gradient, norm, plain.penalty, swap=uses[0].swap)


def _join_pairs(uses: list[MatrixUse], flow: Flow) -> tuple[Layer, list[Pair]]:
    """Return the layer, and the pairs of all uses joined: (x, b); or (x, ybar), (hbar, b)."""
    tied = len({use.layer for use in uses}) > 1
    layer = uses[0].layer
    kinds: tuple[list[Pair], list[Pair]] = ([], [])
    for use in uses:
        for kind, pair in zip(kinds, use.pairs(flow), strict=True):
            if pair is None:
                continue
            if tied:
                layer, pair = use.layer.as_product(*pair)
            kind.append(pair)
    return layer, [_concatenate(pairs) for pairs in kinds if pairs]


def _concatenate(pairs: list[Pair]) -> Pair:
    """Return the positions of all pairs side by side."""
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 1)


def _materialise(uses: list[Use], flow: Flow) -> list[Materialised]:
    total: Params = {}
    for use in uses:
        for name, gradient in use.materialise(flow).items():
            gradient = gradient.to(accumulation_dtype(gradient.dtype))
            total[name] = total[name] + gradient if name in total else gradient
    return [Materialised(name, values) for name, values in total.items()]
