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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpbam import _validate
from dpbam.compute import Compute
from dpbam.errors import ArgumentError
from dpbam.heads.base import LinearHead, check_rows
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan

GRAM_WEIGHT = 0.5  # a: of 0.2, 0.5 and 1 the best or within a point of it at all n and epsilon
RIDGE = 0.03  # of the Gram matrix's noise, as a spectral norm: by the study
BOUND = math.hypot(GRAM_WEIGHT, 1.0)  # C: no record of standardised features is clipped by it
_ROOT2 = math.sqrt(2.0)
_LEAST_SHARE = 0.2  # of a uniform class's prior: a smaller one is noise


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

    def ridge(self) -> LinearHead:
        """Return the ridge head: (G + lambda I)^-1 with lambda from the noise alone.

        The noise of G is a symmetric Gaussian matrix with spectral norm s sqrt(2 D); lambda is
        :data:`RIDGE` times that (as in AdaSSP, Wang 2018), and eigenvalues of G below zero, which
        are noise, become zero.
        """
        values, vectors = torch.linalg.eigh(self.gram)
        penalty = RIDGE * self.gram_std * math.sqrt(2 * len(values))
        inverse = 1 / (values.clamp(min=0.0) + max(penalty, 1e-12))
        weight = (self.cross @ vectors * inverse) @ vectors.T / _ROOT2  # x = (features, 1) / sqrt 2
        return LinearHead(weight[:, :-1].float(), weight[:, -1].float())


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
    _check_plan(plan)
    x = nn.functional.pad(features, (0, 1), value=1.0) / _ROOT2  # [N, D + 1]
    z = torch.cat([GRAM_WEIGHT * x, targets.to(x.dtype)], dim=1)  # [N, D + 1 + K]
    layer = nn.Linear(x.shape[1], z.shape[1], bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    oracle = PrivateGradientOracle(
        layer, _inner_product, plan, noise=noise, seed=seed, ledger=ledger, compute=compute
    )
    for inputs, weights, owners in oracle.batches((x, z), units=units):
        oracle.backward(inputs, weights, owners)
    assert layer.weight.grad is not None
    released = layer.weight.grad.double()
    gram = released[: x.shape[1]] / GRAM_WEIGHT
    return Moments(
        gram=(gram + gram.T) / 2, cross=released[x.shape[1] :],
        gram_std=oracle.noise_std / GRAM_WEIGHT, cross_std=oracle.noise_std,
    )  # fmt: skip


def _inner_product(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return <W x, z> per row: its gradient with respect to W is z x^T."""
    return (outputs * targets).sum(dim=1)


def _check_plan(plan: PrivacyPlan) -> None:
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
    shares = moments.cross[:, -1] * _ROOT2 * _deviation(classes) + 1 / classes
    shares = shares.clamp(min=_LEAST_SHARE / classes)
    return shares / shares.sum()


def classifier(moments: Moments, *, balanced: bool = False) -> LinearHead:
    """Return a head whose scores estimate P(class | x); balanced, P(class | x) / P(class).

    The balanced decision treats all classes as equally frequent, by the released shares.
    """
    classes = len(moments.cross)
    ridge, deviation = moments.ridge(), _deviation(classes)
    weight, bias = ridge.weight * deviation, ridge.bias * deviation + 1 / classes
    if balanced:
        shares = class_shares(moments).float()
        weight, bias = weight / shares[:, None], bias / shares
    return LinearHead(weight, bias)


def regressor(moments: Moments, low: float, high: float) -> LinearHead:
    """Return a head whose only score is the value, from targets of :func:`bounded_targets`."""
    ridge = moments.ridge()
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
