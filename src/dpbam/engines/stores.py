"""Per-unit gradients of one parameter, held as what they are made of.

:class:`Formed` holds [U, *shape]: small parameters, and layers where forming is cheapest.
:class:`Unformed` holds the pairs (a, b) of a matrix: G_u = sum over pairs and positions b (x) a.

A weight D = s(V) may be standardised; then the gradient in V is J_s^T G, channel by channel

    none     H = G
    centre   H = G'                                       G' = G - mean(G)
    scale    H = r G' + kappa V'                          r = 1 / sqrt(var + eps), V' = V - mean(V),
                                                          kappa = -r^3 rho / m + along, rho = <V', G>

with m the fan-in; ``along`` is the part of BAM's third term that lies along V' (see ``third``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpbam.engines.layer_math import Family
from dpbam.engines.sources import Source
from dpbam.nn.standardise import standardised
from dpbam.trees import Params

Pairs = list[tuple[Tensor, Tensor]]


class Store(Protocol):
    """The per-unit gradients of some parameters (one clipping group's, or one parameter's)."""

    name: str

    def squared_norm(self) -> Tensor:
        """[U]."""

    def detached(self) -> Store:
        """Without the graph."""

    def weighted_sum(self, factors: Tensor) -> Params:
        """sum_u factors[u] d_u; a factor of 0 removes the unit."""

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """[U]: <d_u, vector>."""


@dataclass
class Formed:
    """[U, *shape], one parameter."""

    name: str
    values: Tensor

    def detached(self) -> Formed:
        """Without the graph."""
        return Formed(self.name, self.values.detach())

    def squared_norm(self) -> Tensor:
        """|d_u|^2."""
        return self.values.reshape(self.values.shape[0], -1).square().sum(1)

    def weighted_sum(self, factors: Tensor) -> Params:
        """Factors times values."""
        d, kept = self.values, factors != 0
        if not bool(kept.all()):
            d, factors = d[kept], factors[kept]
        return {self.name: torch.tensordot(factors.to(d.dtype), d, dims=1)}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Values times vector."""
        v = vector[self.name].to(self.values)
        return self.values.reshape(self.values.shape[0], -1) @ v.flatten()


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
    """

    def __init__(
        self, source: Source, family: Family, pairs: Pairs, along: Tensor | None = None
    ) -> None:
        self.source, self.family, self.pairs, self._along = source, family, pairs, along
        self.form, self.name = Form(source), source.names[0]

    def detached(self) -> Unformed:
        """Without the graph."""
        pairs = [(a.detach(), b.detach()) for a, b in self.pairs]
        return Unformed(self.source, self.family, pairs, self._along)

    # --- the norm

    def squared_norm(self) -> Tensor:
        """|H_u|^2, by the cheaper of forming G_u and not."""
        if not self.form.scaled:
            return self._channel_norms(None).sum(1) if not self._ghost() else self._ghost_norm(None)
        f = self.form
        rho = self.rho()
        kappa = -(f.r**3) * rho / f.fan
        if self._along is not None:
            kappa = kappa + self._along
        first = self._ghost_norm(f.r) if self._ghost() else self._channel_norms(f.r).sum(1)
        # |r G' + kappa V'|^2 = r^2 |G'|^2 + 2 r kappa <G', V'> + kappa^2 |V'|^2
        return first + (2 * f.r * kappa * rho + kappa.square() * f.v2).sum(1)

    def _ghost(self) -> bool:
        if not self.family.ghost:
            return False
        t = self.family.positions(self.pairs[0][1]) * len(self.pairs)
        o = self.family.shape[0]
        i = self.source.tensor.numel() // o
        return 2 * t * (i + o) < 3 * i * o

    def _ghost_norm(self, scale: Tensor | None) -> Tensor:
        """sum_tt' <a_t, a_t'> <b_t, b_t'> over all pairs' positions, b scaled by channel."""
        rows = [self.family.right(b) for _, b in self.pairs]
        if scale is not None:
            rows = [row * scale for row in rows]
        total = None
        for j in range(len(rows)):
            for k in range(j, len(rows)):
                right = rows[j] @ rows[k].transpose(1, 2)
                part = (self._gram(j, k).to(right.dtype) * right).sum((1, 2)) * (1 if j == k else 2)
                total = part if total is None else total + part
        assert total is not None
        return total

    def _gram(self, j: int, k: int) -> Tensor:
        """Of the rows a_t, centred where the weight is: <a', c'> = <a, c> - m mean(a) mean(c)."""
        a, c = self.pairs[j][0], self.pairs[k][0]
        gram = self.family.gram(a, c)
        if self.form.centred:
            left, right = self.family.mean(a), self.family.mean(c)
            gram = gram - self.form.fan * left[:, :, None] * right[:, None, :]
        return gram

    def _channel_norms(self, scale: Tensor | None) -> Tensor:
        """[U, o]: |G'_c|^2, times scale_c^2."""
        g = self.form_gradients().flatten(2)
        if self.form.centred:
            g = g - g.mean(2, keepdim=True)
        if scale is not None:
            g = g * scale[:, None]
        return g.square().sum(2)

    def form_gradients(self) -> Tensor:
        """[U, *D]: G_u."""
        total = None
        for a, b in self.pairs:
            part = self.family.instantiate(a, b)
            total = part if total is None else total + part
        assert total is not None
        return total

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
            return self._channel_norms(None)
        total = None
        rows = [self.family.right(b) for _, b in self.pairs]
        for j in range(len(rows)):
            for k in range(len(rows)):
                part = (rows[j] * (self._gram(j, k).to(rows[k].dtype) @ rows[k])).sum(1)
                total = part if total is None else total + part
        assert total is not None
        return total

    # --- the sums

    def weighted_sum(self, factors: Tensor) -> Params:
        """J_s^T sum_u c_u G_u + (sum_u c_u along_u) V'."""
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
