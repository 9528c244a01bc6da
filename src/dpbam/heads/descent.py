"""A linear head by full-batch private gradient descent on features.

Softmax regression from zero, with momentum, every record in every step (q = 1), and the mean of the
weights over the last steps. Each step is one release of
:class:`~dpbam.oracle.PrivateGradientOracle` and is charged on its ledger.

The head sees features of norm 10 (:data:`dpbam.features.HEAD_SCALE`). What decides is then the
length of the path that the weights may go, L = lr C T, in units of the clipped gradient: the noise
in the weights after T steps is about L sigma_1 / n per coordinate, where sigma_1 is the noise
multiplier of a single step within the same budget, whatever T is (T steps need sigma = sigma_1
sqrt(T), and their noise adds up to sqrt(T) times one's). So T is fixed, and L alone follows from
public facts (:mod:`dpbam.auto`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpbam import _validate
from dpbam.compute import Compute
from dpbam.features.base import HEAD_SCALE
from dpbam.heads.base import LinearHead, check_rows
from dpbam.oracle import PrivateGradientOracle
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.plan import PrivacyPlan
from dpbam.training.averaging import WeightAverage, dense


@dataclass(frozen=True)
class Descent:
    """The settings of the descent; none of them bears on privacy.

    Attributes:
        lr: the learning rate.
        momentum: of the heavy ball.
        average: the share of the steps, the last ones, whose weights are averaged.
    """

    lr: float
    momentum: float = 0.9
    average: float = 0.3

    def __post_init__(self) -> None:
        _validate.positive("lr", self.lr)
        _validate.probability("average", self.average)


def fit_by_descent(
    features: Tensor,
    labels: Tensor,
    classes: int,
    plan: PrivacyPlan,
    descent: Descent,
    *,
    units: Tensor | None = None,
    noise: Any = "standard",
    seed: int | None = None,
    ledger: Ledger | None = None,
    compute: Compute | None = None,
) -> LinearHead:
    """Train a linear head on standardised features, one release per step of the plan.

    Args:
        features: float32 [N, D], standardised (:func:`dpbam.features.standardise_rows`).
        labels: int64 [N], each 0 .. classes - 1.
        classes: a public number.
        plan: full batches: its batch_size is its n.
        descent: learning rate, momentum and averaging.
        units: the owner of each record, where the unit of privacy is not the record.
        noise: as of the oracle.
        seed: as of the oracle; for research only.
        ledger: as of the oracle.
        compute: as of the oracle.

    Guarantee: the head is a function of the steps that are on the ledger, and of public values.

    Assumptions: those of the oracle; features of a record depend on that record alone.

    Proof: the optimiser and the average read the released gradients alone.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(200, 4))
        >>> plan = PrivacyPlan.calibrate(epsilon=3, delta=1e-4, n=200, batch_size=200, steps=3)
        >>> fit_by_descent(x, (x[:, 0] > 0).long(), 2, plan, Descent(lr=3.0)).weight.shape
        torch.Size([2, 4])
    """
    check_rows(features, labels)
    model = nn.Linear(features.shape[1], classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # from zero: nothing is drawn, and all classes are alike
    oracle = PrivateGradientOracle(
        model, nn.CrossEntropyLoss(reduction="none"), plan,
        noise=noise, seed=seed, ledger=ledger, compute=compute,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=descent.lr, momentum=descent.momentum)
    average = WeightAverage(model, dense(round(plan.steps * (1 - descent.average))))
    for inputs, targets, owners in oracle.batches((HEAD_SCALE * features, labels), units=units):
        step = oracle.step
        oracle.backward(inputs, targets, owners)
        optimizer.step()
        average.update(step)
    with average.applied(), torch.no_grad():
        return LinearHead(HEAD_SCALE * model.weight.detach(), model.bias.detach().clone())
