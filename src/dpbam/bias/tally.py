"""The sums and norms of one measured step, and its record.

Sums are over the units of a logical batch; gradients such as g_hat are sums divided by l. A unit
that is not finite is left out of every sum, as in the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpbam.bias.decomposition import cosine, decompose, dot, flat, norm, ratio
from dpbam.bias.record import EDGES, QUANTILES, BiasRecord, Layer, Norms, Reading
from dpbam.engines import PerSampleDirections
from dpbam.methods import Form
from dpbam.observers import Observation, StepFacts, layer_of
from dpbam.params import Params, doubled, map_rows
from dpbam.privacy.clipping import unclipped


@dataclass
class Tally:
    """The sums and norms of one step.

    Attributes:
        facts: what is known before the step.
        form: what the method declares its direction to be, if anything.
        own_is_plain: the directions are the plain gradients at theta.
        plain: g_hat at theta, divided by l, where it has a pass of its own (theta is shifted).
    """

    facts: StepFacts
    form: Form | None
    own_is_plain: bool
    plain: Params | None = None
    _unclipped: Params = field(default_factory=dict)  # sum_i d_i
    _plain: Params = field(default_factory=dict)  # sum_i g_i
    _ascent: Params = field(default_factory=dict)  # sum_i g_i / |g_i|
    _norms: list[Tensor] = field(default_factory=list)  # |d_i|: [U] per physical batch
    _plain_norms: list[Tensor] = field(default_factory=list)  # |g_i|
    _lost: list[Tensor] = field(default_factory=list)  # |1 - f_i| |d_i|
    _shortened: list[Tensor] = field(default_factory=list)  # f_i < 1: [U], True or False
    _layer_norms: list[dict[str, Tensor]] = field(default_factory=list)
    _a_own: float | None = None
    _a_plain: float | None = None

    def add(self, batch: Observation, *, eta: bool, layers: bool) -> None:
        """Add one physical batch: norms and factors [G, U]."""
        directions, norms, factors = batch.directions, batch.norms, batch.factors
        finite_factors = unclipped(norms)  # [G, U], 0 where a unit is not finite
        _accumulate(self._unclipped, directions.weighted_sum(finite_factors))
        self._norms.append(_total(norms))
        removed = (1 - factors).abs() * norms
        self._lost.append(_total(torch.where(finite_factors != 0, removed, 0.0)))
        self._shortened.append((factors < 1).any(0))
        if directions.plain is not None and not self.own_is_plain:
            self._add_plain(directions.plain)
        if layers:
            self._layer_norms.append(batch.layer_norms())
        if eta and self.facts.in_one_batch and len(factors) == 1:
            self._add_etas(directions, factors[0])

    def _add_plain(self, plain: PerSampleDirections) -> None:
        norms = plain.norms()  # [G, U]
        _accumulate(self._plain, plain.weighted_sum(unclipped(norms)))
        total = _total(norms)  # [U]
        self._plain_norms.append(total)
        nonzero = total.isfinite() & (total > 0)
        inverse = torch.where(nonzero, 1 / torch.where(nonzero, total, 1.0), 0.0)
        _accumulate(self._ascent, plain.weighted_sum(inverse.expand(norms.shape)))

    def _add_etas(self, directions: PerSampleDirections, factors: Tensor) -> None:
        """Compute a = (1/l) sum_i f_i eta_i; eta_i = <d_i, r> / |r|^2, r = (batch sum) / l."""

        def a(total: Params) -> float:
            inner = torch.where(factors != 0, factors * directions.inner(total), 0.0)
            return ratio(float(inner.double().sum()), norm(flat(total)) ** 2)

        self._a_own = a(self._unclipped)
        if self._plain:
            self._a_plain = a(self._plain)
        elif self.plain is not None:
            scaled = {n: g * self.facts.plan.batch_size for n, g in self.plain.items()}
            self._a_plain = a(scaled)

    def record(self, clipped: Params, released: Params) -> BiasRecord:
        """Compare the clipped sum and the released gradient with what was accumulated."""
        self._join()
        facts, plan = self.facts, self.facts.plan
        sigma, bound = plan.noise_multiplier_at(facts.step), facts.sensitivity
        std = sigma * bound if sigma else 0.0  # sigma_t C_t
        variance = sum(g.numel() for g in clipped.values()) * (std / plan.batch_size) ** 2
        against_own, plain, g_hat = self._readings(clipped, released, variance)
        norms, lost = _join(self._norms), _join(self._lost)
        finite, shortened = norms.isfinite(), _join(self._shortened)
        return BiasRecord(
            step=facts.step,
            method=facts.method.name,
            lam=facts.lam,
            clip_norm=bound,
            batch_size=plan.batch_size,
            noise_multiplier=sigma,
            noise_norm=math.sqrt(variance),
            non_private_units=len(norms),
            non_private_broken=int((~finite).sum()),
            non_private_against_plain=plain,
            non_private_against_own=against_own,
            non_private_lemma2_bound=float(lost[finite].sum()) / plan.batch_size,
            non_private_norms=summary(norms, bound),
            non_private_plain_norms=summary(_join(self._plain_norms)) if self._plain else None,
            non_private_clip_share=ratio(int(shortened[finite].sum()), int(finite.sum())),
            non_private_alignment=self._alignment(g_hat),
            non_private_flatness_slack=self._slack(g_hat),
            non_private_layers=self._layers(clipped),
        )

    def _join(self) -> None:
        """Add up the sums, and collect the norms, of all ranks; some may have had no unit."""
        ranks = self.facts.ranks
        if ranks.world == 1:
            return
        lists: list[list[Any]]
        lists = [self._norms, self._plain_norms, self._lost, self._shortened, self._layer_norms]
        every = ranks.collect(map_rows(Tensor.cpu, lists))
        for mine, theirs in zip(lists, zip(*every, strict=True), strict=True):
            mine[:] = [entry for parts in theirs for entry in parts]
        sums = [self._unclipped, *([self._plain, self._ascent] if self._plain_norms else [])]
        for total in sums if self._norms else []:
            total.update(ranks.total(doubled(total or self.facts.zeros())))

    def _readings(
        self, clipped: Params, released: Params, variance: float
    ) -> tuple[Reading, Reading | None, Tensor | None]:
        """Return readings against the method's own gradient and, if known, g_hat; and g_hat."""
        scale = 1 / self.facts.plan.batch_size
        g_clip, private = flat(clipped, scale), flat(released)
        unclipped_own = (
            flat(self._unclipped, scale) if self._unclipped else torch.zeros_like(g_clip)
        )
        against_own = decompose(g_clip, unclipped_own, private, variance=variance, a=self._a_own)
        g_hat = self._g_hat(unclipped_own)
        if g_hat is None or self.own_is_plain:
            return against_own, against_own if self.own_is_plain else None, g_hat
        against_plain = decompose(g_clip, g_hat, private, variance=variance, a=self._a_plain)
        return against_own, against_plain, g_hat

    def _g_hat(self, unclipped_own: Tensor) -> Tensor | None:
        """Return the plain batch gradient at theta, divided by l, if it is known."""
        if self.own_is_plain:
            return unclipped_own
        if self._plain:
            return flat(self._plain, 1 / self.facts.plan.batch_size)
        return None if self.plain is None else flat(self.plain)

    def _alignment(self, g_hat: Tensor | None) -> float | None:
        """Compare the ascent direction with SAM's; see :class:`BiasRecord`."""
        if g_hat is None:
            return None
        if self.facts.shift is not None:
            return cosine(flat({n: self.facts.shift[n] for n in self._unclipped}), g_hat)
        if not self._regularised:  # the method does not say along what it ascends, if it does
            return None
        units = int(_join(self._plain_norms).isfinite().sum())
        return ratio(dot(flat(self._ascent), g_hat), units * norm(g_hat))  # mean_i cos(g_i, g_hat)

    def _slack(self, g_hat: Tensor | None) -> float | None:
        """Return L_BAO - L_Z = lambda ((1/l) sum_i |g_i| - |g_hat|)."""
        if g_hat is None or self.form is None or not self._regularised:
            return None
        norms = _join(self._plain_norms)
        mean = float(norms[norms.isfinite()].sum()) / self.facts.plan.batch_size
        return self.form.weight * (mean - norm(g_hat))

    @property
    def _regularised(self) -> bool:
        """Whether the method is BAM, by its form, and the |g_i| of this step are known."""
        return self.form is not None and self.form.weight > 0 and bool(self._plain_norms)

    def _layers(self, clipped: Params) -> dict[str, Layer]:
        if not self._layer_norms:
            return {}
        l = self.facts.plan.batch_size  # noqa: E741
        layers_of_batches = self._layer_norms
        joined = {k: _join([norms[k] for norms in layers_of_batches]) for k in layers_of_batches[0]}
        squares = {k: float(v[v.isfinite()].square().sum()) for k, v in joined.items()}
        total_square = sum(squares.values())
        layers: dict[str, Layer] = {}
        for layer, norms in joined.items():
            names = [n for n in clipped if layer_of(n) == layer]
            g_clip = flat({n: clipped[n] for n in names}, 1 / l)
            r = flat({n: self._unclipped[n] for n in names}, 1 / l)
            bias = norm(g_clip - r)
            layers[layer] = Layer(
                norms=summary(norms),
                share=ratio(squares[layer], total_square),
                bias=bias,
                relative_bias=ratio(bias, norm(r)),
                cosine=cosine(g_clip, r),
            )
        return layers


def summary(norms: Tensor, clip_norm: float | None = None) -> Norms:
    """Summarise the finite ones of norms [U]; with a finite C, also as a histogram."""
    finite = norms[norms.isfinite()].double()
    if not len(finite):
        return Norms((), math.nan)
    at = torch.tensor(QUANTILES, dtype=torch.float64, device=finite.device)
    quantiles = tuple(torch.quantile(finite, at).tolist())
    return Norms(quantiles, float(finite.mean()), _histogram(finite, clip_norm))


def _histogram(norms: Tensor, clip_norm: float | None) -> tuple[int, ...]:
    if clip_norm is None or not math.isfinite(clip_norm):
        return ()
    edges = torch.tensor(EDGES, dtype=torch.float64, device=norms.device) * clip_norm
    counts = torch.bincount(torch.bucketize(norms, edges), minlength=len(edges) + 1)
    return tuple(counts.tolist())


def _accumulate(total: Params, batch_sum: Params) -> None:
    for name, g in batch_sum.items():
        total[name] = total[name] + g if name in total else g


def _total(norms: Tensor) -> Tensor:
    """Combine norms [G, U] over the groups to [U]."""
    return norms.square().sum(0).sqrt() if len(norms) > 1 else norms[0]


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)
