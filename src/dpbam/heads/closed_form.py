"""A head in closed form: second moments of features and targets, released once.

Ridge regression needs two sums over the records, sum x x^T and sum y x^T. They are released
together, by one Gaussian query on all units (q = 1), and everything else is post-processing: there
is nothing to tune, and the same release serves classification, with a balanced decision or without,
and regression.

The release is one step of :class:`~dpbam.oracle.PrivateGradientOracle`. With x the features and z
the targets of a record, both vectors, the loss <W x, z> of a linear layer W has the gradient z x^T
at every W. So a record's statistics are its gradient, and units, clipping, noise, ledger and all
checks are those of training.

    x = (features, 1) / sqrt(2)             |x| <= 1
    z = (a x, y)                            a = GRAM_WEIGHT, |y| <= 1
    z x^T = (a x x^T, y x^T)                Euclidean norm |z| |x| <= sqrt(a^2 + 1) = C

The noise on x x^T has standard deviation sigma C / (a n) in each entry; the matrix is made
symmetric, (M + M^T) / 2, which halves the variance off the diagonal. That is the same
release as the upper triangle with off-diagonal entries times the root of two.

:class:`MomentHead` is that layer and :class:`MomentLoss` that loss, for one call
(:func:`release_moments`) and for a run, whose trainer takes the one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpbam import _validate
from dpbam.auto import GRAM_WEIGHT, MOMENT_BOUND
from dpbam.compute import Compute
from dpbam.errors import ArgumentError
from dpbam.features.base import HEAD_SCALE
from dpbam.heads.base import LinearHead, check_rows
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

RIDGE = 0.1  # of the Gram matrix's noise, as a spectral norm: by the study
RIDGE_OF_VALUES = 0.3  # noise enters the error of a value itself: at 0.1 R2 can be below 0
BOUND = MOMENT_BOUND  # C: no record of standardised features is clipped by it
_ROOT2 = math.sqrt(2.0)
_LEAST_SHARE = 0.2  # of a uniform class's prior: a smaller one is noise
_MOST_EXPLAINED = 0.95  # of the targets' variance: more is noise, and would make logits infinite


@dataclass(frozen=True)
class Moments:
    """Released second moments, means over the units: they may be published.

    Attributes:
        gram: float64 [D + 1, D + 1], of x x^T, symmetric; noise makes it indefinite.
        cross: float64 [K, D + 1], of y x^T.
        gram_std: the standard deviation of the noise on a diagonal entry of ``gram``.
        cross_std: the same for every entry of ``cross``.
    """

    gram: Tensor
    cross: Tensor
    gram_std: float
    cross_std: float

    def ridge(self, factor: float = RIDGE) -> LinearHead:
        """Return the ridge head: (G + lambda I)^-1 with lambda from the noise alone.

        The noise of G is a symmetric Gaussian matrix with spectral norm s sqrt(2 D); lambda is
        ``factor`` times that (as in AdaSSP, Wang 2018), and eigenvalues of G below zero, which
        are noise, become zero.
        """
        weight = self._ridge(factor)[0] / _ROOT2  # x = (features, 1) / sqrt 2
        return LinearHead(weight[:, :-1].float(), weight[:, -1].float())

    def _ridge(self, factor: float) -> tuple[Tensor, Tensor]:
        """Return the weights on x, [K, D + 1], and the trace of (G + lambda I)^-1."""
        values, vectors = torch.linalg.eigh(self.gram)
        penalty = factor * self.gram_std * math.sqrt(2 * len(values))
        inverse = 1 / (values.clamp(min=0.0) + max(penalty, 1e-12))
        return (self.cross @ vectors * inverse) @ vectors.T, inverse.sum()

    def explained(self) -> Tensor:
        """Return the variance of each target that the ridge head explains, float64 [K].

        By the released moments, less what their noise alone would seem to explain; at least 0.
        """
        weight, trace = self._ridge(RIDGE)
        squares = (weight * self.cross).sum(dim=1) - self.cross_std**2 * trace
        return (squares - self.target_means().square()).clamp(min=0.0)

    def target_means(self) -> Tensor:
        """Return the means of the targets, float64 [K]: the constant feature's column of y x^T."""
        return self.cross[:, -1] * _ROOT2


def closed_form_plan(
    *,
    epsilon: float,
    delta: float,
    n: int,
    unit: str = "record",
    max_records: int = 1,
    accountant: str = "pld",
    **further: Any,
) -> PrivacyPlan:
    """Return the plan of the release: one step on all units, clipped to :data:`BOUND`.

    ``further`` are other arguments of :meth:`~dpbam.privacy.plan.PrivacyPlan.calibrate`, such as
    what was spent.

    Example:
        >>> plan = closed_form_plan(epsilon=1, delta=1e-5, n=500)
        >>> plan.steps, plan.sampling_rate, plan.epsilon() <= 1
        (1, 1.0, True)
    """
    return PrivacyPlan.calibrate(
        epsilon=epsilon, delta=delta, n=n, batch_size=n, steps=1, clip_norm=BOUND, unit=unit,
        max_records=max_records, accountant=accountant, **further,
    )  # fmt: skip


def release_moments(
    features: Tensor,
    targets: Tensor,
    plan: PrivacyPlan,
    *,
    units: Tensor | None = None,
    noise: Any = "standard",
    seed: int | None = None,
    ledger: Ledger | None = None,
    compute: Compute | None = None,
) -> Moments:
    """Release the second moments of features and targets, as one step of the plan.

    Args:
        features: float32 [N, D], each row of norm at most 1; a longer one is clipped.
        targets: float32 [N, K], each row of norm at most 1, by public bounds.
        plan: of :func:`closed_form_plan`.
        units: the owner of each record, where the unit of privacy is not the record.
        noise: as of the oracle.
        seed: as of the oracle; for research only.
        ledger: as of the oracle.
        compute: as of the oracle.

    Guarantee: one Gaussian mechanism with noise multiplier sigma on all units, under adding or
    removing one unit; it is on the ledger before anything is returned.

    Assumptions: those of the oracle; n is public; features and targets of a record depend on that
    record and on public values alone.

    Proof: a unit contributes v, the mean over its records of z x^T, times min(1, C / |v|), where
    |v| is the Euclidean norm of all entries together, (a x x^T, y x^T) jointly. So the sum over the
    units moves by at most C when one unit is added or removed, whatever its records are; the noise
    has standard deviation sigma C in every entry. v is the gradient of the mean over its records of
    <W x, z>, which does not depend on W, so the oracle's proof applies word for word. Symmetrising,
    dividing by the public n, and every head made of it are post-processing. The bound C is reached
    by |x| = |y| = 1 (|v|^2 = a^2 |x|^4 + |y|^2 |x|^2), so that no noise is wasted.

    Example:
        >>> x = nn.functional.normalize(torch.randn(300, 4))
        >>> plan = closed_form_plan(epsilon=3, delta=1e-4, n=300)
        >>> moments = release_moments(x, class_targets((x[:, 0] > 0).long(), 2), plan)
        >>> moments.gram.shape, moments.ridge().weight.shape
        (torch.Size([5, 5]), torch.Size([2, 4]))
    """
    check_rows(features, targets)
    check_closed_form_plan(plan)
    head = MomentHead(features.shape[1], targets.shape[1])
    oracle = PrivateGradientOracle(
        head, MomentLoss(), plan, noise=noise, seed=seed, ledger=ledger, compute=compute
    )
    for inputs, values, owners in oracle.batches((HEAD_SCALE * features, targets), units=units):
        oracle.backward(inputs, values, owners)
    weight = head.released.weight
    assert weight.grad is not None
    with torch.no_grad():
        weight.sub_(weight.grad)
    head.noise_std = oracle.noise_std
    return head.moments()


class MomentHead(nn.Module):
    """Second moments as the weights of a layer, and the head that is solved from them.

    In training mode it returns [N, 1 + K], (a <W_1 x, x>, W_2 x), which :class:`MomentLoss` turns
    into <W x, z>: the gradient z x^T of a record does not depend on W. One step of plain gradient
    descent from zero, with learning rate 1, leaves W at minus the released mean. In eval mode it
    returns the scores [N, K] of the head that is solved from W, which is post-processing.

    Args:
        width: D, of the features.
        outputs: K.
        task: what the scores are for: ``"single-label"``, ``"multi-label"`` or ``"regression"``.
        balance: of :func:`classifier`.
        noise_std: the standard deviation of the noise on the released means, a public number.
    """

    def __init__(
        self, width: int, outputs: int, *, task: str = "regression", balance: float = 0.0,
        noise_std: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        _validate.one_of("task", task, tuple(_SOLVED))
        self.task, self.balance, self.noise_std = task, balance, noise_std
        self.released = nn.Linear(width + 1, width + 1 + outputs, bias=False)
        nn.init.zeros_(self.released.weight)
        self._solved: tuple[tuple[int, float], Tensor, Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [N, 1 + K] in training, [N, K] in eval, from features times HEAD_SCALE [N, D]."""
        features = inputs / HEAD_SCALE
        if not self.training:
            return self.solve().scores(features)
        x = nn.functional.pad(features, (0, 1), value=1.0) / _ROOT2  # [N, D + 1]
        z_weights = self.released(x)  # [N, D + 1 + K]
        gram = (z_weights[:, : x.shape[1]] * x).sum(dim=1, keepdim=True)
        return torch.cat([GRAM_WEIGHT * gram, z_weights[:, x.shape[1] :]], dim=1)

    def moments(self) -> Moments:
        """Return what was released: means over the units."""
        released = -self.released.weight.detach().double()
        side = released.shape[1]
        gram = released[:side] / GRAM_WEIGHT
        return Moments(
            gram=(gram + gram.T) / 2, cross=released[side:],
            gram_std=self.noise_std / GRAM_WEIGHT, cross_std=self.noise_std,
        )  # fmt: skip

    def solve(self) -> LinearHead:
        """Return the task's head; solved again only when the moments have changed."""
        released = self.released.weight
        state = (released._version, self.noise_std)
        if self._solved is None or self._solved[0] != state:
            head = _SOLVED[self.task](self.moments(), self.balance)
            # cloned: a view keeps the strides of the matrix that it was taken from
            layout = torch.contiguous_format
            weight = head.weight.to(released.device).clone(memory_format=layout)
            bias = head.bias.to(released.device).clone(memory_format=layout)
            self._solved = (state, weight, bias)
        return LinearHead(*self._solved[1:])

    def description(self) -> dict[str, object]:
        """Return what a saved head is built from, next to its tensor."""
        return {"task": self.task, "balance": self.balance, "noise_std": self.noise_std}


class MomentLoss(nn.Module):
    """Returns <W x, z> per row, [N], from the outputs of :class:`MomentHead` in training mode.

    Args:
        targets: maps the labels of rows to y, [N, K] with rows of norm at most 1, each by that row
            and public constants alone; None: the labels are y.
    """

    def __init__(self, targets: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.targets = targets

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        y = labels if self.targets is None else self.targets(labels)
        return outputs[:, 0] + (outputs[:, 1:] * y.to(outputs.dtype)).sum(dim=1)


def check_closed_form_plan(plan: PrivacyPlan) -> None:
    """Refuse a plan that is not one release from all units, clipped to :data:`BOUND`."""
    if plan.private and (plan.steps, plan.batch_size, plan.clip_norm) != (1, plan.n, BOUND):
        raise ArgumentError(
            f"the closed-form head is one release from all units, clipped to {BOUND:.4g}, and the "
            f"plan has {plan.steps} steps of {plan.batch_size} of {plan.n} units, clipped to "
            f"{plan.clip_norm:g}: make it by closed_form_plan"
        )


def class_targets(labels: Tensor, classes: int) -> Tensor:
    """Return (one-hot - 1/K) / sqrt(1 - 1/K): float32 [N, K], every row of norm 1.

    Example:
        >>> class_targets(torch.tensor([0, 1]), 2)
        tensor([[ 0.7071, -0.7071],
                [-0.7071,  0.7071]])
    """
    if _validate.count("classes", classes) < 2:
        raise ArgumentError("a classifier needs at least two classes")
    return (nn.functional.one_hot(labels, classes) - 1 / classes).float() / _deviation(classes)


def finding_targets(findings: Tensor) -> Tensor:
    """Return findings 0 and 1, [N, L], as -1 and 1 over sqrt(L): every row of norm 1.

    Example:
        >>> finding_targets(torch.tensor([[0, 1, 1, 0]]))
        tensor([[-0.5000,  0.5000,  0.5000, -0.5000]])
    """
    return (2 * findings.float() - 1) / math.sqrt(findings.shape[1])


def bounded_targets(values: Tensor, low: float, high: float) -> Tensor:
    """Return values between public bounds as [N, 1] in [-1, 1]; what is outside is moved inside.

    Example:
        >>> bounded_targets(torch.tensor([20.0, 95.0, 130.0]), 0, 100).flatten()
        tensor([-0.6000,  0.9000,  1.0000])
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ArgumentError(f"the bounds of a value must be finite and ascending: {low}, {high}")
    scaled = (values.double() - low) * (2 / (high - low)) - 1
    return torch.nan_to_num(scaled, nan=0.0).clamp(-1, 1).float()[:, None]


def class_shares(moments: Moments) -> Tensor:
    """Return the released share of each class, float64 [K], at least a fifth of a uniform one's.

    The constant feature's column of y x^T is the mean of y: no further release is needed.
    """
    classes = len(moments.cross)
    shares = moments.target_means() * _deviation(classes) + 1 / classes
    shares = shares.clamp(min=_LEAST_SHARE / classes)
    return shares / shares.sum()


def classifier(moments: Moments, balance: float = 0.0) -> LinearHead:
    """Return a head whose scores are logits: largest where P(class | x) / P(class)^balance is.

    P(class | x) is estimated by the ridge head, P(class) by the released shares. At 1 all classes
    count as equally frequent. The estimates become logits by K / (1 - R2), the factor of Fisher's
    discriminant, where R2 is the explained share of the targets' variance.
    """
    classes = len(moments.cross)
    ridge, deviation = moments.ridge(), _deviation(classes)
    variance = (1 - moments.target_means().square().sum()).clamp(min=1e-6)
    share = float((moments.explained().sum() / variance).clamp(max=_MOST_EXPLAINED))
    rarity = (1 / (classes * class_shares(moments))).float() ** balance
    scale = rarity * classes / (1 - share)
    weight, bias = ridge.weight * deviation, ridge.bias * deviation + 1 / classes
    return LinearHead(weight * scale[:, None], bias * scale)


def detector(moments: Moments) -> LinearHead:
    """Return a head with one logit per finding, from targets of :func:`finding_targets`.

    The ridge head estimates p = P(finding | x). With pi the released frequency of the finding and
    R2 the explained share of its variance, Fisher's discriminant has the logit

        log(pi / (1 - pi)) + (p - pi - (1 - 2 pi) R2 / 2) / (pi (1 - pi) (1 - R2))
    """
    ridge, root = moments.ridge(), math.sqrt(len(moments.cross))
    # a frequency below its own noise is noise
    least = min(0.4, max(1e-3, root * moments.cross_std))
    frequency = ((1 + root * moments.target_means()) / 2).clamp(least, 1 - least)
    spread = frequency * (1 - frequency)  # a fourth of L times the target's variance
    share = (moments.explained() * len(moments.cross) / (4 * spread)).clamp(max=_MOST_EXPLAINED)
    slope = (1 / (spread * (1 - share))).float()
    offset = torch.logit(frequency) - (frequency + (1 - 2 * frequency) * share / 2) * slope
    weight, bias = ridge.weight * root / 2, (ridge.bias * root + 1) / 2
    return LinearHead(weight * slope[:, None], bias * slope + offset.float())


def regressor(moments: Moments, low: float, high: float) -> LinearHead:
    """Return a head whose only score is the value, from targets of :func:`bounded_targets`."""
    ridge = moments.ridge(RIDGE_OF_VALUES)
    scale = (high - low) / 2
    return LinearHead(ridge.weight * scale, (ridge.bias + 1) * scale + low)


def class_means(moments: Moments) -> LinearHead:
    """Return the nearest-mean head, the simplest one: scores <m_c, x> - |m_c|^2 / 2.

    m_c is the mean of the features of class c, from y x^T and the shares; the noise's part of
    |m_c|^2 is subtracted.
    """
    classes, shares = len(moments.cross), class_shares(moments)
    deviation = _deviation(classes)
    # sum over classes of y x^T is zero, so the mean of x itself is read from the Gram matrix
    mean = moments.gram[-1] * 2  # E[(features, 1)]
    by_class = moments.cross * deviation * _ROOT2 + mean / classes  # E[1_c (features, 1)]
    means = by_class[:, :-1] / shares[:, None]  # [K, D]
    variance = (2 * (deviation * moments.cross_std) ** 2) / shares**2
    squares = (means.square().sum(1) - means.shape[1] * variance).clamp(min=0.0)
    return LinearHead(means.float(), (-squares / 2).float())


def _deviation(classes: int) -> float:
    return math.sqrt(1 - 1 / classes)


# the head of a task from moments and balance; the outputs mean what the task's own mean
_SOLVED: dict[str, Callable[[Moments, float], LinearHead]] = {
    "single-label": classifier,
    "multi-label": lambda moments, balance: detector(moments),
    "regression": lambda moments, balance: moments.ridge(RIDGE_OF_VALUES),
}
