"""From sites to stores: the uses of each parameter, gathered.

A parameter whose uses are all matrix uses of one kind keeps them unformed, stacked. Any other
mixture of uses is formed and added up: always right, and such parameters are small or rare.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.base import CannotServe
from dpbam.engines.generic import GenericSite
from dpbam.engines.layer_math import EmbeddingFamily, Family, LinearFamily
from dpbam.engines.sites import Flow, MatrixSite, Site
from dpbam.engines.sources import Source, disjoint
from dpbam.engines.stores import Formed, Store
from dpbam.engines.unformed import Pairs, Unformed
from dpbam.nn.standardise import standardised
from dpbam.trees import Params


class Plain:
    """The plain gradients' stores, and p / |g_u|: what BAM's third term is made of."""

    def __init__(self, stores: list[Store], penalty: Tensor) -> None:
        self.penalty = penalty
        self.formed = {s.name: s.values.detach() for s in stores if isinstance(s, Formed)}
        self.unformed = {s.source.key: s for s in stores if isinstance(s, Unformed)}

    def direction(self, names: tuple[str, ...]) -> Params:
        """(p / |g_u|) g_u."""
        return {n: _scaled(self.formed[n], self.penalty) for n in names}


def stores_for(sites: list[Site], flow: Flow, plain: Plain | None) -> list[Store]:
    """The stores of every parameter that the loss depends on.

    Args:
        sites: the tape's.
        flow: plain, or BAM's with ``plain`` from the pass before.
        plain: see above.
    """
    by_name: dict[str, list[Site]] = defaultdict(list)
    for site in sites:
        for name in site.names:
            by_name[name].append(site)
    unformed = {n: group for n, s in by_name.items() if (group := _matrices(s)) is not None}
    stores: list[Store] = []
    for groups in unformed.values():
        stores += [s for g in groups if (s := _unformed(g, flow, plain)) is not None]
    rest = {n for n in by_name if n not in unformed}
    stores += _formed([s for s in sites if rest & set(s.names)], flow, plain)
    return stores


def _matrices(sites: list[Site]) -> list[list[MatrixSite]] | None:
    """The sites by source, if the parameter can stay unformed."""
    groups: dict[Any, list[MatrixSite]] = defaultdict(list)
    for site in sites:
        if not isinstance(site, MatrixSite) or len(site.names) != 1:
            return None
        groups[site.source.key].append(site)
    if not all(_one_kind(group) for group in groups.values()):
        return None
    sources = [group[0].source for group in groups.values()]
    if len(sources) > 1:
        leaf = next(sources[0]._leaves())
        sizes = {leaf.names[0]: leaf.tensor.shape}
        if not all(s.selection for s in sources) or not disjoint(sources, sizes):
            return None
    return list(groups.values())


def _one_kind(sites: list[MatrixSite]) -> bool:
    """One family; or a linear layer tied to an embedding, which is linear in one-hot rows."""
    families = {site.family for site in sites}
    tied = all(isinstance(f, LinearFamily | EmbeddingFamily) for f in families)
    return len(families) == 1 or (tied and sites[0].source.func is None)


def _unformed(sites: list[MatrixSite], flow: Flow, plain: Plain | None) -> Unformed | None:
    tied = len({site.family for site in sites}) > 1
    family: Family = LinearFamily(sites[0].family.shape) if tied else sites[0].family
    pairs: list[Pairs] = []
    for site in sites:
        found = site.terms(flow)
        if tied and isinstance(site.family, EmbeddingFamily):
            found = [_one_hot(site.family, a, b) for a, b in found]
        pairs.append(found)
    source = sites[0].source
    along = None
    if plain is not None and _scaled_weight(source):
        share, along = plain.unformed[source.key].third(plain.penalty / 2)
        before = iter(plain.unformed[source.key].pairs)
        pairs = [_add_share(family, p, next(before), share) for p in pairs if p]
    flat = [pair for found in pairs for pair in found]
    if not flat:
        return None
    store = Unformed(source, family, flat, along, flow.limit)
    if plain is not None and source.key in plain.unformed:
        store.know(plain.unformed[source.key], swap=sites[0].swap)
    return store


def _add_share(family: Family, pairs: Pairs, before: tuple[Tensor, Tensor], share: Tensor) -> Pairs:
    """(x, ybar) -> (x, ybar + share b): the part of the third term that is made of G."""
    (x, ybar), *others = pairs
    b = before[1]
    return [(x, ybar + family.channels(share, b) * b), *others]


def _one_hot(family: EmbeddingFamily, ids: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """An embedding's pair as a linear layer's: the one-hot rows stand where its b stands."""
    rows = F.one_hot(ids, family.shape[0]).to(b.dtype)
    if family.padding is not None:
        rows = torch.where((ids == family.padding)[..., None], 0.0, rows)
    return b, rows


def _formed(sites: list[Site], flow: Flow, plain: Plain | None) -> list[Store]:
    total: Params = {}
    for site in sites:
        if plain is not None:
            if isinstance(site, GenericSite):
                site = replace(site, direction=plain.direction(site.names))
            if isinstance(site, MatrixSite) and _scaled_weight(site.source):
                raise CannotServe(f"{site.names[0]} is scaled in one use and bare in another")
        for name, part in site.instantiate(flow).items():
            total[name] = total[name] + part if name in total else part
    return [Formed(name, value) for name, value in total.items()]


def _scaled_weight(source: Source) -> bool:
    """Whether D is standardised with a scale: the one matrix that is not linear in theta."""
    return source.func is standardised and bool(source.args[1])


def _scaled(t: Tensor, factors: Tensor) -> Tensor:
    return t * factors.view(-1, *(1,) * (t.ndim - 1))
