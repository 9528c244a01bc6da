"""Weights that are standardised at each use: centred by output channel, and perhaps scaled.

The layer uses D = r V' with V' = V - mean(V), and r = 1 or 1 / sqrt(var + eps).

**Centred.** The gradient in V is G' = G - mean(G). Centring is an orthogonal projection P, so
|G'|^2 = <a', a'> <b, b> with a' = P a, and <a'_t, c'_t'> = <a_t, c_t'> - m mean(a_t) mean(c_t'),
with m the fan-in. :class:`Centred` wraps a layer.

**Scaled.** The gradient in V is

    H = r G' + kappa V'          rho = <V', G>,   kappa = -r^3 rho / m + along

with ``along`` the part of BAM's third term along V' (:meth:`ScaledGradient.third_term`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.batching import apply
from dpbam.engines.fused.bilinear import Ascend, Layer, Pair
from dpbam.engines.fused.ghost_norm import Factors, grams_of
from dpbam.engines.fused.gradients import (
    Doubt,
    Factored,
    Norm,
    recompute_cancelling,
    sum_with_recomputed,
)
from dpbam.params import Params


def centre(g: Tensor) -> Tensor:
    """Subtract the mean over ``rest``, by unit and channel: [U, o, *rest]."""
    return g - g.mean(tuple(range(2, g.ndim)), keepdim=True)


@dataclass(frozen=True)
class Centred:
    """``layer`` with G' in the place of G; all other attributes are those of ``layer``."""

    layer: Layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    @property
    def _fan_in(self) -> int:
        return math.prod(self.layer.shape[1:])

    def patches(self, a: Tensor) -> Tensor:
        patches = self.layer.patches(a)
        return patches - patches.mean(-1, keepdim=True)

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        left = self.layer.mean(a)
        right = left if c is a else self.layer.mean(c)
        gram = self.layer.gram(a, c)
        return gram.baddbmm_(left.unsqueeze(2), right.unsqueeze(1), alpha=-self._fan_in)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        pulled = (weights @ self.layer.mean(a).unsqueeze(2)).squeeze(2)
        plain = self.layer.gram_back(weights, a)
        return plain - self.layer.mean_back(self._fan_in * pulled, a)

    def ascend(self, x: Tensor, pairs: Sequence[Pair]) -> Tensor:
        y: Tensor = apply(Ascend, x, self, pairs)  # not the layer's own, uncentred
        return y

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        return centre(self.layer.materialise(a, b))

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """Return f(P weight, a), so that <G'_u, V> = sum_t <b_t, f(P V, a)_t>."""
        return self.layer.apply(centre(weight.unsqueeze(0)).squeeze(0), a)

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """Return f(P weights_u, a_u): a mean left by rounding would be multiplied by sum(a)."""
        return self.layer.apply_each(centre(weights), a)

    def transpose_each(self, weights: Tensor, b: Tensor, template: Tensor) -> Tensor:
        return self.layer.transpose_each(centre(weights), b, template)

    @property
    def uncentred(self) -> Layer:
        return self.layer


@dataclass(frozen=True)
class ScaledGradient:
    """H_u, from the pairs of G_u.

    Attributes:
        base: the factored, centred gradient in D.
        along: [U, o] or None, in the notation above.
    """

    base: Factored
    along: Tensor | None = None

    @property
    def name(self) -> str:
        return self.base.name

    @cached_property
    def _v(self) -> Tensor:
        """V', [o, *rest]."""
        return centre(self.base.weight.args[0].tensor.detach().unsqueeze(0)).squeeze(0)

    @cached_property
    def _stats(self) -> tuple[float, int, Tensor, Tensor]:
        """Return eps, m, r [o] and |V'|^2 [o]."""
        eps, m = self.base.weight.args[2], self._v[0].numel()
        variance = self._v.flatten(1).square().mean(1)
        return eps, m, (variance + eps).rsqrt(), m * variance

    @property
    def flat(self) -> None:
        return None

    def detach(self) -> ScaledGradient:
        return replace(self, base=self.base.detach())

    def square_by_parameter(self, norm: Norm) -> dict[str, Tensor]:
        return {self.name: norm.square}

    def by_unit(self) -> NoReturn:
        # s(V + eps_u H_u) is not s(V) + eps_u G_u
        raise UnsupportedModelError(f"{self.name} is moved through its standardisation's scale")

    def as_small(self) -> None:
        return None

    def as_pairs(self) -> NoReturn:
        self.by_unit()

    def follow(
        self, second: Factored, norm: Norm, penalty: Tensor, *, swap: bool
    ) -> ScaledGradient:
        """Return (x, ybar + share b) for (x, ybar), the third term along G, and the rest."""
        share, along = self.third_term(penalty / 2)
        (x, ybar), *others = second.pairs
        b = self.base.pairs[0][1]
        more = ybar + second.layer.channels(share, b) * b
        return ScaledGradient(replace(second, pairs=[(x, more), *others]), along)

    def norm(self, *, differentiable: bool = False) -> Norm:
        """Return |r G' + kappa V'|^2 = r^2 |G'|^2 + 2 r kappa <G', V'> + kappa^2 |V'|^2."""
        _, m, r, v2 = self._stats
        rho = self._rho()
        kappa = -(r**3) * rho / m
        if self.along is not None:
            kappa = kappa + self.along
        layer = self.base.layer
        pairs = [(a, b * layer.channels(r, b).to(b.dtype)) for a, b in self.base.pairs]
        scaled = replace(self.base, pairs=pairs)
        inner = scaled.norm(differentiable=differentiable)
        more = (2 * r * kappa * rho + kappa.square() * v2).sum(1)
        parts = (scaled, inner, more) if differentiable else None
        return Norm(inner.square + more, inner=parts)

    def doubt(self, norm: Norm, *, differentiable: bool) -> Doubt | None:
        if norm.inner is not None:  # the factored part alone is repaired
            scaled, inner, _ = norm.inner
            return scaled.doubt(inner, differentiable=differentiable)
        doubt = self.base.doubt(norm, differentiable=False)
        return None if doubt is None else doubt._replace(bound=self._size_bound)

    def repair(self, norm: Norm, *, differentiable: bool) -> Norm:
        if norm.inner is not None:
            scaled, inner, more = norm.inner
            return Norm(scaled.repair(inner, differentiable=differentiable).square + more)
        return recompute_cancelling(norm, self._size_bound(self.base.sizes()), self._of_units)

    def _size_bound(self, sizes: Tensor) -> Tensor:
        """Return a bound on |H_u| if nothing cancelled, by the largest r and |G_u|'s: [U]."""
        _, _, r, v2 = self._stats
        along = 0.0 if self.along is None else (self.along.abs() * v2.sqrt()).sum(1)
        return r.max() * sizes + along

    def _of_units(self, units: Tensor) -> Tensor:
        """Return H_u of these units, materialised: [k, *theta]."""
        h = self.base.of_units(units)
        return h if self.along is None else h + self._along_v(self.along[units])

    def _along_v(self, factors: Tensor) -> Tensor:
        """Return factors V' by channel: [*, o] -> [*, o, *rest]."""
        return factors.view(*factors.shape, *(1,) * (self._v.ndim - 1)) * self._v

    def weighted_sum(self, factors: Factors, norm: Norm | None) -> Params:
        """Return J_s^T sum_u c_u G_u + (sum_u c_u along_u) V'."""
        return sum_with_recomputed(self._contract, self.name, factors, norm)

    def _contract(self, factors: Factors) -> Params:
        pulled = self.base.contract(factors)
        if self.along is None:
            return pulled
        return {self.name: pulled[self.name] + self._along_v(factors.contract(self.along))}

    def inner(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return <G_u, J_s v> + <along V', v>; J_s is symmetric, so J_s v = J_s^T v."""
        pushed = self.base.weight.pull(vector[self.name])[self.name]
        total = self.base.inner_with(pushed)
        if self.along is None:
            return total
        v = vector[self.name].to(self._v)
        return total + self.along @ (v * self._v).flatten(1).sum(1)

    def _rho(self) -> Tensor:
        """Return <V'_c, G_c> = sum_t b_tc (f(V', a))_tc: [U, o]."""
        layer = self.base.layer
        parts = [
            layer.rows(b * layer.apply(self._v.to(b.dtype), a)).sum(1) for a, b in self.base.pairs
        ]
        return torch.stack(parts).sum(0)

    def third_term(self, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """Return (share, along): d(p |g_u|)/dV for fixed G is J_s^T (share G) + along V'.

        With q = r^2 and n^2 = sum_c q |G'|^2 - q^2 rho^2 (1 + eps q) / m, for fixed G:
            d(n^2)/dV' = alpha V' + beta G',
            alpha = -(2 q^2 / m) (|G'|^2 - 2 q rho^2 (1 + eps q) / m - q^2 rho^2 eps / m),
            beta = -2 q^2 rho (1 + eps q) / m,
        and J_s^T (beta / r) G = beta G' - (beta q rho / m) V'. ``penalty`` [U] is p / (2 |g_u|).
        """
        eps, m, r, _ = self._stats
        rho, q = self._rho(), r.square()
        ratio = 1 + eps * q
        inside = self._channel_norms() - (2 * q * ratio + q.square() * eps) * rho**2 / m
        alpha = -2 * q.square() / m * inside
        beta = -2 * q.square() * rho * ratio / m
        share = penalty[:, None] * beta / r
        return share, penalty[:, None] * (alpha + beta * q * rho / m)

    def _channel_norms(self) -> Tensor:
        """Return |G'_c|^2 = sum_jk b_jc^T K_jk b_kc: [U, o]."""
        base = self.base
        if not base.prefers_gram(base.purpose):
            return base.materialise().flatten(2).square().sum(2)
        grams = grams_of(base.layer, base.pairs, {})
        rows = [base.layer.rows(b) for _, b in base.pairs]
        parts = [
            (rows[j] * (matrix @ rows[k])).sum(1) * (1 if j == k else 2)
            for (side, j, k), matrix in grams.items()
            if side == "left"
        ]
        return torch.stack(parts).sum(0)
