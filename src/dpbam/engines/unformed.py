"""Per-unit gradients of a matrix, held as what they are made of.

The pairs (a, b) of a layer give G_u = sum over pairs and positions b (x) a; norms, sums and inner
products of G_u need not form it. A weight D = s(V) may be standardised; then the gradient in V is
J_s^T G, channel by channel

    none     H = G
    centre   H = G'                                       G' = G - mean(G)
    scale    H = r G' + kappa V'                          r = 1 / sqrt(var + eps), V' = V - mean(V),
                                                          kappa = -r^3 rho / m + along,
                                                          rho = <V', G>

with m the fan-in; ``along`` is the part of BAM's third term that lies along V' (see ``third``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpbam.engines.layer_math import Family
from dpbam.engines.maps import FormedNorm, GhostNorm, centred_gram, frobenius
from dpbam.engines.sources import Source
from dpbam.engines.stores import Formed
from dpbam.nn.standardise import standardised
from dpbam.trees import Params

Pairs = list[tuple[Tensor, Tensor]]


class Form:
    """How D = s(V) is standardised: see the module."""

    def __init__(self, source: Source) -> None:
        self.centred = source.func is standardised
        self.scaled = False
        if not self.centred:
            return
        inner, self.scaled, eps = source.args
        v = inner.tensor.detach()
        self.fan = v[0].numel()  # m
        flat = v.flatten(1)
        self.v = (flat - flat.mean(1, keepdim=True)).view_as(v)  # V'
        variance = self.v.flatten(1).square().mean(1)
        self.r = (variance + eps).rsqrt()  # [o]
        self.eps, self.v2 = eps, self.fan * variance  # |V'|^2


class Unformed:
    """The pairs of one matrix D that is a selection of, or a standardised, parameter.

    Args:
        source: D.
        family: of its layer.
        pairs: (a, b), each [U, q, ...].
        along: [U, o] or None, in the notation above.
        limit: bytes that a norm may take for Gram matrices or formed gradients.
    """

    def __init__(
        self,
        source: Source,
        family: Family,
        pairs: Pairs,
        along: Tensor | None = None,
        limit: int = 2**28,
    ) -> None:
        self._limit = limit
        self.source, self.family, self.pairs, self._along = source, family, pairs, along
        self.form, self.name = Form(source), source.names[0]
        self.grams: list[Tensor] = []  # of a and of b, from a norm that was differentiated
        self._known: dict[tuple[str, int, int], Tensor] = {}
        self._kept: Tensor | None = None  # G_u (centred), where the norm formed it
        self._overflowed = False  # some unit's Gram matrix did

    def detached(self) -> Unformed:
        """Without the graph."""
        pairs = [(a.detach(), b.detach()) for a, b in self.pairs]
        bare = Unformed(self.source, self.family, pairs, self._along, self._limit)
        bare.grams = self.grams
        return bare

    # --- the norm

    def squared_norm(self) -> Tensor:
        """|H_u|^2, by the cheaper of forming G_u and not."""
        if not self.form.scaled:
            return self._base_norm(None)
        f = self.form
        rho = self.rho()
        kappa = -(f.r**3) * rho / f.fan
        if self._along is not None:
            kappa = kappa + self._along
        # |r G' + kappa V'|^2 = r^2 |G'|^2 + 2 r kappa <G', V'> + kappa^2 |V'|^2
        first = self._base_norm(f.r)
        second: Tensor = (2 * f.r * kappa * rho + kappa.square() * f.v2).sum(1)
        return first + second

    def _base_norm(self, scale: Tensor | None) -> Tensor:
        """sum_c scale_c^2 |G'_c|^2."""
        pairs = self.pairs
        if scale is not None:
            pairs = [(a, b * self.family.channels(scale, b)) for a, b in pairs]
        ghost = self._ghost()
        if len(pairs) == 1 and torch.is_grad_enabled():
            a, b = pairs[0]
            if ghost:
                found: list[Tensor] = list(GhostNorm.apply(a, b, self.family, self.fan))  # type: ignore[no-untyped-call]
                if not self._rescued(found[0], pairs)[1]:
                    self.grams = found[1:]
                    return found[0]
            formed: Tensor = FormedNorm.apply(a, b, self.family, self.fan)  # type: ignore[no-untyped-call]
            return formed
        norms = self._in_parts(pairs, ghost)
        if ghost:
            norms, self._overflowed = self._rescued(norms, pairs)
            if self._overflowed and torch.is_grad_enabled():  # the Gram way's derivative is NaN
                return self._in_parts(pairs, ghost=False)
        return norms

    def _rescued(self, norms: Tensor, pairs: Pairs) -> tuple[Tensor, bool]:
        """The norms with those of units whose Gram matrix overflowed, and whether there were any.

        <a, a> overflows before |G_u| does. Whether the Gram way is taken hangs on the whole batch,
        so without this a unit could count or not by what the others are.
        """
        lost = (~norms.isfinite()).nonzero()[:, 0]
        if not len(lost):
            return norms, False
        with torch.no_grad():
            redone = self._in_parts([(a[lost], b[lost]) for a, b in pairs], ghost=False)
        self._kept = None
        return norms.index_put((lost,), redone), bool(redone.isfinite().any())

    def _in_parts(self, pairs: Pairs, ghost: bool) -> Tensor:
        """|G_u|^2 by one of the two ways, within the memory bound."""
        way = self._ghost_norm if ghost else lambda part: _square(self._form(part))
        needed = self._bytes()[0 if ghost else 1]
        if needed <= self._limit:
            return way(pairs)
        self._known = {}  # over the limit: some units at a time, and nothing is kept
        units = torch.arange(pairs[0][1].shape[0]).chunk(-(-needed // self._limit))
        norms = [way([(a[i], b[i]) for a, b in pairs]) for i in units]
        self._kept = None
        return torch.cat(norms)

    def _bytes(self) -> tuple[int, int]:
        """What the Gram matrices take, and the formed gradients."""
        units, size = self.pairs[0][1].shape[0], self.pairs[0][1].element_size()
        t = self.family.positions(self.pairs[0][1])
        entries = t * t + self.family.pixels(t) ** 2
        return units * entries * size, units * self.source.tensor.numel() * size

    @property
    def stays_unformed(self) -> bool:
        """Whether its norm did not need G_u."""
        return self._kept is None and self._ghost() and not self._overflowed

    def formed(self) -> Tensor:
        """[U, o, fan-in]: G_u, centred where the weight is; not for a scaled one."""
        if self._kept is None:
            with torch.no_grad():
                self._form(self.pairs)
        assert self._kept is not None
        return self._kept

    @property
    def fan(self) -> int | None:
        """The fan-in if the weight is centred."""
        return self.form.fan if self.form.centred else None

    def _ghost(self) -> bool:
        """Which is cheaper, by a model whose constants were measured: docs/engine.md."""
        if not self.family.ghost:
            return False
        t = self.family.positions(self.pairs[0][1])
        better = self.family.prefers_ghost(t, len(self.pairs), twice=torch.is_grad_enabled())
        ghost, formed = self._bytes()
        if (ghost if better else formed) <= self._limit:
            return better
        return ghost <= formed

    def _ghost_norm(self, pairs: Pairs) -> Tensor:
        """sum_tt' <a_t, a_t'> <b_t, b_t'> over all pairs' positions."""
        rows = [self.family.right(b) for _, b in pairs]
        total = None
        for j in range(len(rows)):
            for k in range(j, len(rows)):
                left = self._known.get(("left", j, k))
                right = self._known.get(("right", j, k))
                if right is None:
                    right = rows[j] @ rows[k].transpose(1, 2)
                if left is None:
                    left = centred_gram(self.family, pairs[j][0], pairs[k][0], self.fan)
                part = frobenius(left.to(right.dtype), right) * (1 if j == k else 2)
                total = part if total is None else total + part
        assert total is not None
        return total

    def know(self, plain: Unformed, *, swap: bool) -> None:
        """Take over the Gram matrices of x and of b from the plain gradients' norm.

        The pairs are (x, ybar) and (hbar, b); with ``swap``, (ybar, x) and (b, hbar).
        """
        if plain.grams and len(self.pairs) == 2 and not self.form.scaled:
            left, right = (1, 0) if swap else (0, 1)
            self._known[("left", left, left)] = plain.grams[0]
            self._known[("right", right, right)] = plain.grams[1]

    def _form(self, pairs: Pairs) -> Tensor:
        """[U, o, fan-in]: G_u, centred where the weight is; kept, to serve the weighted sum too."""
        g = _form(self.family, pairs).flatten(2)
        if self.form.centred:
            g = g - g.mean(2, keepdim=True)
        if not torch.is_grad_enabled() and not self.form.scaled:
            self._kept = g
        return g

    def rho(self) -> Tensor:
        """[U, o]: <V'_c, G_c> = sum_t b_tc (f(V', a))_tc."""
        total = None
        for a, b in self.pairs:
            part = self.family.right(b * self.family.apply(self.form.v.to(b.dtype), a)).sum(1)
            total = part if total is None else total + part
        assert total is not None
        return total

    # --- BAM's third term for scaled weights

    def third(self, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """(share, along): the explicit derivative of p |g_u| in V is J_s^T (share G) + along V'.

        With q = r^2 and n^2 = sum_c q |G'|^2 - q^2 rho^2 (1 + eps q) / m, for fixed G:
            d(n^2)/dV' = alpha V' + beta G',
            alpha = -(2 q^2 / m) (|G'|^2 - 2 q rho^2 (1 + eps q) / m - q^2 rho^2 eps / m),
            beta = -2 q^2 rho (1 + eps q) / m,
        and J_s^T (beta / r) G = beta G' - (beta q rho / m) V'. ``penalty`` [U] is p / (2 |g_u|).
        """
        f, rho = self.form, self.rho()
        q = f.r.square()
        wide = 1 + f.eps * q
        inside = self._plain_channel_norms() - (2 * q * wide + q.square() * f.eps) * rho**2 / f.fan
        alpha = -2 * q.square() / f.fan * inside
        beta = -2 * q.square() * rho * wide / f.fan
        share = penalty[:, None] * beta / f.r
        return share, penalty[:, None] * (alpha + beta * q * rho / f.fan)

    def _plain_channel_norms(self) -> Tensor:
        """[U, o]: |G'_c|^2 = b_c^T (A' A'^T) b_c."""
        if not self._ghost():
            return self._form(self.pairs).square().sum(2)
        total = None
        rows = [self.family.right(b) for _, b in self.pairs]
        for j in range(len(rows)):
            for k in range(len(rows)):
                left = centred_gram(self.family, self.pairs[j][0], self.pairs[k][0], self.fan)
                part = (rows[j] * (left @ rows[k])).sum(1)
                total = part if total is None else total + part
        assert total is not None
        return total

    # --- the sums

    def weighted_sum(self, factors: Tensor) -> Params:
        """J_s^T sum_u c_u G_u + (sum_u c_u along_u) V'."""
        if self._kept is not None:
            formed = Formed(self.name, self._kept).weighted_sum(factors)[self.name]
            return self.source.pull(formed.view(self.source.tensor.shape))
        kept = factors != 0
        whole = bool(kept.all())
        total = None
        for a, b in self.pairs:
            a, b, c = (a, b, factors) if whole else (a[kept], b[kept], factors[kept])
            if a.shape[0] == 0:
                continue
            part = self.family.contract(a, b * c.to(b.dtype).view(-1, *(1,) * (b.ndim - 1)))
            total = part if total is None else total + part
        if total is None:
            total = self.pairs[0][1].new_zeros(self.source.tensor.shape)
        pulled = self.source.pull(total.view(self.source.tensor.shape))
        if self._along is None:
            return pulled
        share = torch.where(kept[:, None], factors[:, None] * self._along, 0.0).sum(0)
        name = self.source.names[0]
        return {name: pulled[name] + share.view(-1, *(1,) * (self.form.v.ndim - 1)) * self.form.v}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """<G_u, J_s v> + <along V', v>: one forward pass of the layer with v in V's place."""
        if self.form.scaled:  # J_s is symmetric: J_s v = J_s^T v
            pushed = self.source.pull(vector[self.name])[self.name]
        else:
            pushed = self.source.push(vector)
        total = self.pairs[0][1].new_zeros(self.pairs[0][1].shape[0])
        for a, b in self.pairs:
            total = total + (self.family.apply(pushed.to(b.dtype), a) * b).flatten(1).sum(1)
        if self._along is not None:
            v = vector[self.source.names[0]].to(self.form.v)
            total = total + self._along @ (v * self.form.v).flatten(1).sum(1)
        return total


def _form(family: Family, pairs: Pairs) -> Tensor:
    """[U, *D]: G_u."""
    total = None
    for a, b in pairs:
        part = family.instantiate(a, b)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _square(formed: Tensor) -> Tensor:
    """[U]: |G_u|^2."""
    return frobenius(formed, formed)
