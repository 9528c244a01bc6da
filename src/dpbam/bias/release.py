"""A private release of per-unit norms and of the bias's length.

It is released next to the gradient of the same batch, with noise of its own, as one joint Gaussian
event (:mod:`dpbam.joint_release`). C is the clipping norm, t thresholds, B a bound:

==================  ==============================================  ============  ================
released            sum over the units of                           sensitivity   noise
==================  ==============================================  ============  ================
norm counts         the one-hot bin of |d_i| among t and C          1             sigma_1
bias (optional)     (1 - f_i) d_i, clipped to norm B                B             sigma_2 B
==================  ==============================================  ============  ================

A unit falls into one bin, so the counts together move by 1; quantiles are functions of the counts
and cost nothing more. Clipping removes (1 - f_i) d_i from unit i, so the sum over i, divided by -l,
is the bias against the method's own unclipped gradient. Its length is estimated without that of the
noise: |v|^2 - d s^2, s the noise per coordinate. A unit that is not finite contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbam import _validate
from dpbam.bias.decomposition import dot, flat
from dpbam.errors import ArgumentError
from dpbam.joint_release import Contributions
from dpbam.observers import StepFacts, UnitFacts
from dpbam.params import Params


@dataclass(frozen=True)
class ReleasedStatistics:
    """What one step released about its batch, with noise: it may be published.

    Attributes:
        step: from 0.
        thresholds: ascending; C is among them.
        counts: units with a norm up to the first threshold, up to the second, ..., above the last.
            Noised, so neither whole numbers nor all positive.
        count_std: the standard deviation of the noise on each count.
        clip_norm: C.
        bias: estimate of |bias|, from contributions clipped to B; None if it was not released.
        bias_square_std: the standard error of bias^2.
    """

    step: int
    thresholds: tuple[float, ...]
    counts: tuple[float, ...]
    count_std: float
    clip_norm: float
    bias: float | None = None
    bias_square_std: float | None = None

    def quantile(self, q: float) -> float:
        """Return the first threshold up to which the noised share of units reaches q, or infinity.

        Example:
            >>> seen = ReleasedStatistics(0, (0.5, 1.0, 2.0), (10.0, 30.0, 50.0, 10.0), 1.0, 1.0)
            >>> seen.quantile(0.5), seen.quantile(0.95)
            (2.0, inf)
        """
        _validate.probability("q", q)
        below, total = 0.0, sum(self.counts)
        for threshold, count in zip(self.thresholds, self.counts, strict=False):
            below += count
            if below >= q * total:
                return threshold
        return math.inf


class PrivateStatistics:
    """Releases norm counts and, with a bound, the bias's length next to each gradient.

    Args:
        thresholds: public numbers between which norms are counted; C is added.
        noise_multiplier: sigma_1, the noise of the counts; at l = 4096, 20 is half a per cent of
            the batch, and costs a step with sigma = 1 as much as lowering sigma by 0.1%.
        bias_bound: B; None releases no bias.
        bias_noise_multiplier: sigma_2; None takes ``noise_multiplier``.
        sink: called with each release, when it is on the ledger; None appends to :attr:`released`.

    Guarantee: with the gradient, one Gaussian mechanism of noise multiplier sigma_joint; the plan
    must have been made with this object's ``noise_multipliers``, or the oracle refuses it.

    Assumptions: thresholds and B do not depend on the data.

    Proof: a unit moves the counts by at most 1, in one bin, and the bias sum by at most B; then
    ``joint_noise_multiplier``.

    Example:
        >>> from dpbam import PrivacyPlan, PrivateGradientOracle
        >>> statistics = PrivateStatistics([0.5, 2.0], noise_multiplier=20.0)
        >>> plan = PrivacyPlan.calibrate(epsilon=3, delta=1e-4, n=1000, batch_size=200, steps=5,
        ...                              joint_noise_multipliers=statistics.noise_multipliers)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> oracle = PrivateGradientOracle(torch.nn.Linear(4, 3), loss, plan, statistics=statistics)
        >>> data = (torch.randn(1000, 4), torch.zeros(1000, dtype=torch.long))
        >>> oracle.backward(*next(oracle.batches(data)))
        >>> statistics.released[0].thresholds, plan.epsilon() <= 3
        ((0.5, 1.0, 2.0), True)
    """

    def __init__(
        self,
        thresholds: list[float] | tuple[float, ...],
        *,
        noise_multiplier: float,
        bias_bound: float | None = None,
        bias_noise_multiplier: float | None = None,
        sink: Callable[[ReleasedStatistics], None] | None = None,
    ) -> None:
        self.thresholds = tuple(_validate.positive("each of thresholds", t) for t in thresholds)
        self.count_multiplier = _validate.positive("noise_multiplier", noise_multiplier)
        self.noise_multipliers: tuple[float, ...] = (self.count_multiplier,)
        self.bias_bound: float | None = None
        if bias_bound is not None:
            self.bias_bound = _validate.positive("bias_bound", bias_bound)
            other = noise_multiplier if bias_noise_multiplier is None else bias_noise_multiplier
            other = _validate.positive("bias_noise_multiplier", other)
            self.noise_multipliers = (self.count_multiplier, other)
        elif bias_noise_multiplier is not None:
            raise ArgumentError("bias_noise_multiplier needs a bias_bound: what one unit may add")
        self.released: list[ReleasedStatistics] = []
        self._sink = sink or self.released.append
        self._step, self._sensitivity = 0, math.inf
        self._batch_size, self._private = 1, True

    @property
    def sensitivities(self) -> dict[str, float]:
        """1 for the counts, B for the bias."""
        return {"counts": 1.0} | ({} if self.bias_bound is None else {"bias": self.bias_bound})

    def begin(self, facts: StepFacts) -> None:
        # single values: the facts as a whole hold the batch, and this object outlives the step
        self._step, self._sensitivity = facts.step, facts.sensitivity
        self._batch_size, self._private = facts.plan.batch_size, facts.plan.private

    def contributions(self, batch: UnitFacts) -> dict[str, Contributions]:
        """Return the bin of each unit's norm and, with a bound, what the clip removes of it."""
        lengths = batch.norms.double().square().sum(0).sqrt()  # [U], |d_i|
        parts = {"counts": Contributions(values=self._bins(lengths))}
        if self.bias_bound is not None:
            parts["bias"] = Contributions(
                factors=removed(batch.norms, batch.factors, self.bias_bound)
            )
        return parts

    def publish(self, released: dict[str, Params]) -> None:
        bias = error = None
        counts = released["counts"]["statistics/counts"]
        if "bias" in released:
            bias, error = self._bias(released["bias"])
        self._sink(
            ReleasedStatistics(
                step=self._step,
                thresholds=self._thresholds(),
                counts=tuple(counts.tolist()),
                count_std=self._std(0),
                clip_norm=self._sensitivity,
                bias=bias,
                bias_square_std=error,
            )
        )

    def _bins(self, lengths: Tensor) -> Tensor:
        """Return the one-hot bins [K, U]; a unit in bin k has t_(k-1) < |d_i| <= t_k."""
        edges = torch.tensor(self._thresholds(), dtype=torch.float64, device=lengths.device)
        numbers = torch.arange(len(edges) + 1, device=lengths.device)[:, None]
        return ((torch.bucketize(lengths, edges) == numbers) & lengths.isfinite()).double()

    def _bias(self, noised: Params) -> tuple[float, float]:
        """Return |bias|, from |v|^2 - d s^2, and the standard error of its square."""
        v = flat(noised, 1 / self._batch_size)
        s2 = (self._std(1) / self._batch_size) ** 2
        square = max(0.0, dot(v, v) - v.numel() * s2)
        error = math.sqrt(2 * v.numel() * s2**2 + 4 * square * s2)
        return math.sqrt(square), error

    def _std(self, k: int) -> float:
        """Return sigma_k times the sum's sensitivity; 0 under a plan without privacy."""
        sensitivity = 1.0 if k == 0 else self.bias_bound or 0.0
        return self.noise_multipliers[k] * sensitivity if self._private else 0.0

    def _thresholds(self) -> tuple[float, ...]:
        return tuple(sorted({*self.thresholds, self._sensitivity} - {math.inf}))


def removed(norms: Tensor, factors: Tensor, bound: float) -> Tensor:
    """Return weights w [G, U] with w_i d_i = (1 - f_i) d_i clipped to ``bound``, or 0.

    Guarantee: |w_i d_i| <= bound, and 0 for a unit that is not finite.

    Assumptions: norms are right, groups disjoint.

    Proof: division by max(1, |(1 - f_i) d_i| / bound).
    """
    finite = norms.isfinite().all(dim=0, keepdim=True)
    lengths = torch.where(finite, (1 - factors).abs() * torch.where(finite, norms, 0.0), 0.0)
    total = lengths.square().sum(0, keepdim=True).sqrt()  # [1, U]
    return torch.where(finite, (1 - factors) / (total / bound).clamp(min=1.0), 0.0)
