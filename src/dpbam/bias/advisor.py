"""Predict bias and noise at other clipping norms, lambdas and batch sizes, from a few batches.

For independent units with plain gradients g, directions d and clip factors f, let mu = E g,
mu_c = E f d and m = E |f d|^2. The private gradient of l units has mean mu_c and two noises:

    from sampling     variance (m - |mu_c|^2) / l
    for privacy       variance p (sigma C / l)^2, p the number of parameters

so its expected cosine with the true gradient, which matters to optimisers that normalise their
steps (Adam and its variants), is about

    cos(mu_c, mu) |mu_c| / sqrt(|mu_c|^2 + (m - |mu_c|^2) / l + p (sigma C / l)^2)

A small C makes the bias large and the noise small; the best cosine is in between. |mu_c|^2 is
estimated without bias, (|S|^2 / N - m) / (N - 1) for the sum S over N units. Not protected
by privacy, do not share: a choice based on it uses the data, which no epsilon covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpbam import _validate
from dpbam.batches import LogicalBatch, Views
from dpbam.bias.decomposition import dot, flat
from dpbam.compute import Compute, Runner
from dpbam.engines import Loss, PerSampleDirections
from dpbam.engines.synthetic import use_first
from dpbam.errors import ArgumentError
from dpbam.methods import BAM, DPSGD
from dpbam.params import device_of, trainable
from dpbam.privacy import calibration
from dpbam.privacy.clipping import make_clipping, unclipped
from dpbam.privacy.plan import PrivacyPlan, replace_quietly

WARNING = (
    "Not protected by privacy: do not share. This was computed from the data without noise. "
    "Choosing a setting by it uses those data, which the run's privacy statement does not cover."
)
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # candidates for l, as multiples of the plan's
BOUNDS = (0.05, 0.25, 0.5, 0.75, 0.95)  # candidates for C, as quantiles of the norms
_NOTICEABLE = 0.01  # a smaller rise of the cosine is no reason to change a setting


@dataclass(frozen=True)
class Option:
    """A setting, and its effect on the gradient at the current parameters.

    Attributes:
        clip_norm: C.
        lam: BAM's lambda; 0 is DP-SGD.
        batch_size: l.
        noise_multiplier: the sigma that keeps the plan's epsilon at this batch size.
        noise_norm: sigma C sqrt(d) / l.
        non_private_clip_share: units above C.
        non_private_bias: |mu_c - mu|, against the plain gradient.
        non_private_noise_ratio: noise_norm over |mu_c|.
        non_private_clipped_cosine: cos(mu_c, mu): the effect of clipping alone on the direction.
        non_private_cosine: the expected cosine of the private gradient with the true one.
    """

    clip_norm: float
    lam: float
    batch_size: int
    noise_multiplier: float
    noise_norm: float
    non_private_clip_share: float
    non_private_bias: float
    non_private_noise_ratio: float
    non_private_clipped_cosine: float
    non_private_cosine: float


@dataclass(frozen=True)
class Advice:
    """The options that were compared. ``str()`` gives a recommendation, its reason and the warning.

    Attributes:
        now: the plan's setting.
        best: the option with the best expected cosine at the plan's batch size.
        options: other clipping norms and lambdas at the plan's batch size.
        batch_sizes: other batch sizes at the plan's C, for the same number of epochs.
        units: the number of units used.
    """

    now: Option
    best: Option
    options: tuple[Option, ...]
    batch_sizes: tuple[Option, ...]
    units: int

    def __str__(self) -> str:
        now, best = self.now, self.best
        larger = max(self.batch_sizes, key=lambda o: o.non_private_cosine)
        compared = len(self.options) + len(self.batch_sizes)
        first = f"From {self.units} samples, the best of {compared} settings at these parameters:"
        shown = [o for o in (best, larger) if _gain(now, o) >= _NOTICEABLE]
        rows = [_row(now, True), *(_row(o, False) for o in dict.fromkeys(shown))]
        return "\n".join([first, *rows, _recommendation(now, best) + _batch(now, larger), WARNING])


def advise(
    model: nn.Module,
    loss: Loss,
    plan: PrivacyPlan,
    batches: Iterable[tuple[Any, Any]],
    *,
    lam: float = 0.0,
    lambdas: Sequence[float] = (0.0, 0.005, 0.02),
    engine: str = "auto",
    physical_batch_size: int = 128,
) -> Advice:
    """Predict the effect of other settings from a few batches.

    Args:
        model: at the parameters of interest.
        loss: (output, targets) -> one value per sample.
        plan: the current setting.
        batches: (inputs, targets), whole samples; a few hundred in all are enough.
        lam: the current lambda of BAM; 0 for DP-SGD.
        lambdas: candidates. The prediction is for the current gradient, not for the norms that
            training with another lambda would lead to.
        engine: "auto", "fused" or "functional".
        physical_batch_size: samples at once.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> plan = PrivacyPlan.non_private(n=1000, batch_size=100, steps=100, clip_norm=1.0)
        >>> x, y = torch.randn(64, 3), torch.randint(0, 2, (64,))
        >>> advice = advise(model, nn.CrossEntropyLoss(reduction="none"), plan, [(x, y)])
        >>> advice.now.clip_norm, WARNING in str(advice)
        (1.0, True)
    """
    chosen = sorted({0.0, _validate.non_negative("lam", lam), *lambdas})
    pools = {value: _Pool(plan) for value in chosen}
    groups = plan.clipper().groups(trainable(model))
    maker = Runner(Compute(engine=engine), model, loss, groups)
    bounds: list[float] = []
    for inputs, targets in batches:
        batch_of_all = LogicalBatch.of(inputs, targets, None, 1)
        for batch in batch_of_all.split(physical_batch_size, Views(), device_of(model)):
            if not bounds:
                use_first(maker, batch, DPSGD())  # what a model fixes is not taken from a record
                bounds = _bounds(plan, maker.directions(batch, DPSGD(), 0.0).norms())
            for value, pool in pools.items():
                method = BAM(value, exact=True) if value else DPSGD()
                pool.add(maker.directions(batch, method, value), bounds)
    truth = pools[0.0]
    if truth.units < 2:
        raise ArgumentError(f"advice needs at least 2 samples with finite gradients: {truth.units}")
    options = tuple(p.option(truth, plan, c, value) for value, p in pools.items() for c in bounds)
    now = pools[lam].option(truth, plan, plan.clip_norm, lam)
    sizes = tuple(pools[lam].option(truth, p, p.clip_norm, lam) for p in _resized(plan))
    best = max(options, key=lambda o: o.non_private_cosine)
    return Advice(now, best, options, sizes, truth.units)


def method_advice(method: str, *, averaged: bool) -> str:
    """Return the advice of docs/results.md for a method, by public settings alone.

    Args:
        method: its name, such as "bam".
        averaged: whether an average of the weights is handed out.

    Example:
        >>> method_advice("dp-sgd", averaged=False).partition(":")[0]
        'Try averaged weights (--swa 0.5)'
        >>> method_advice("bam", averaged=True).partition(":")[0]
        'Compare with --method dp-sgd'
        >>> method_advice("dp-sgd", averaged=True)
        ''
    """
    sentences = []
    if not averaged:
        sentences.append(
            "Try averaged weights (--swa 0.5): they cost neither privacy nor time, and gained "
            "with an MLP on CIFAR-10 in our comparison, though not on digits (docs/results.md)."
        )
    if method == "bam":
        sentences.append(
            "Compare with --method dp-sgd: with averaged weights BAM was not shown to be better in "
            "our comparison (docs/results.md), and a step takes twice as long."
        )
    return " ".join(sentences)


@dataclass
class _Pool:
    """Sums over all units of one lambda: sum_i d_i, and sum_i f_i d_i for each C."""

    plan: PrivacyPlan
    units: int = 0
    total: Tensor | None = None
    clipped: dict[float, Tensor] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)  # [G, U] each, finite units only

    def add(self, directions: PerSampleDirections, bounds: list[float]) -> None:
        norms = directions.norms()
        finite_factors = unclipped(norms)
        self.norms.append(norms[:, finite_factors[0] != 0].double())
        self.units += self.norms[-1].shape[1]
        batch_sum = flat(directions.weighted_sum(finite_factors))
        self.total = batch_sum if self.total is None else self.total + batch_sum
        for bound in bounds:
            batch_sum = flat(directions.weighted_sum(self._factors(norms, bound)))
            before = self.clipped.get(bound)
            self.clipped[bound] = batch_sum if before is None else before + batch_sum

    def option(self, truth: _Pool, plan: PrivacyPlan, bound: float, lam: float) -> Option:
        """Predict C = ``bound`` under ``plan``; ``truth`` has the plain gradients."""
        assert truth.total is not None
        n, l = self.units, plan.batch_size  # noqa: E741 (the paper's letter)
        norms = torch.cat(self.norms, dim=1)
        factors = self._factors(norms, bound)
        clipped, plain = self.clipped[bound], truth.total
        second = float((factors * norms).square().sum()) / n  # E |f d|^2
        cc = max(0.0, (dot(clipped, clipped) / n - second) / (n - 1))  # |mu_c|^2
        cosine = dot(clipped, plain) / math.sqrt(dot(clipped, clipped) * dot(plain, plain))
        noise = plan.noise_multiplier * bound * math.sqrt(len(plain)) / l
        spread = cc + (second - cc) / l + noise**2  # E |g_priv|^2
        return Option(
            clip_norm=bound,
            lam=lam,
            batch_size=l,
            noise_multiplier=plan.noise_multiplier,
            noise_norm=noise,
            non_private_clip_share=float((factors < 1).any(0).double().mean()),
            non_private_bias=float((clipped / n - plain / truth.units).norm()),
            non_private_noise_ratio=noise / math.sqrt(cc) if cc else math.inf,
            non_private_clipped_cosine=cosine,
            non_private_cosine=cosine * math.sqrt(cc / spread) if spread else math.nan,
        )

    def _factors(self, norms: Tensor, bound: float) -> Tensor:
        return make_clipping(self.plan.clipping, bound).factors(norms)


def _bounds(plan: PrivacyPlan, norms: Tensor) -> list[float]:
    """Return the plan's C and, to two digits, quantiles of the first physical batch's norms."""
    total = norms.double().square().sum(0).sqrt()
    total = total[total.isfinite() & (total > 0)].cpu()
    at = torch.tensor(BOUNDS, dtype=torch.float64)
    quantiles = torch.quantile(total, at).tolist() if len(total) else []
    return sorted({plan.clip_norm, *(float(f"{bound:.2g}") for bound in quantiles)})


def _resized(plan: PrivacyPlan) -> list[PrivacyPlan]:
    """Return the plan at other batch sizes, with the noise for the same epsilon and epochs."""
    estimates = []
    for step in SIZES:
        size = max(1, round(plan.batch_size * step))
        if size > plan.n:
            continue
        steps = max(1, round(plan.epochs * plan.n / size))
        sigma = plan.noise_multiplier
        if plan.private and size != plan.batch_size:
            sigma = calibration.noise_multiplier(
                plan.epsilon(), plan.delta, size / plan.n, steps, accountant=plan.accountant
            )
        changed = {"batch_size": size, "steps": steps, "noise_multiplier": sigma}
        estimates.append(replace_quietly(plan, **changed))
    return estimates


def _row(o: Option, now: bool) -> str:
    return (
        f"  C {o.clip_norm:<6.3g} lambda {o.lam:<6.3g} batch {o.batch_size:<6d} "
        f"clipped {o.non_private_clip_share:4.0%}  bias {o.non_private_bias:<8.3g} "
        f"noise {o.noise_norm:<8.3g} expected cosine {o.non_private_cosine:.3f}"
        f"{'  <- now' if now else ''}"
    )


def _recommendation(now: Option, best: Option) -> str:
    if best == now or _gain(now, best) < _NOTICEABLE:
        return (
            f"Keep C = {now.clip_norm:g} and lambda = {now.lam:g}: at a batch size of "
            f"{now.batch_size} no other C or lambda brings the private gradient noticeably nearer "
            f"to the true one (expected cosine {now.non_private_cosine:.3f}, at best "
            f"{best.non_private_cosine:.3f})."
        )
    caution = (
        " With a larger lambda a better cosine was no better accuracy in our comparison "
        "(docs/results.md)."
        if best.lam > now.lam
        else ""
    )
    return (
        f"Try C = {best.clip_norm:g} and lambda = {best.lam:g}: the expected cosine of the private "
        f"gradient with the true one rises from {now.non_private_cosine:.3f} to "
        f"{best.non_private_cosine:.3f}. Clipping alone leaves a cosine of "
        f"{now.non_private_clipped_cosine:.3f} now, {best.non_private_clipped_cosine:.3f} then; "
        f"the noise is {now.non_private_noise_ratio:.2g} times as long as the clipped gradient "
        f"now, {best.non_private_noise_ratio:.2g} times then.{caution}"
    )


def _batch(now: Option, best: Option) -> str:
    """Name the batch size that brings the private gradient nearest, if another one does."""
    if _gain(now, best) < _NOTICEABLE:
        return ""
    return (
        f" A batch size of {best.batch_size} in place of {now.batch_size}, at the present C and "
        f"lambda, raises the expected cosine from {now.non_private_cosine:.3f} to "
        f"{best.non_private_cosine:.3f}, at the same epsilon but with another number of steps."
    )


def _gain(now: Option, best: Option) -> float:
    return best.non_private_cosine - now.non_private_cosine
