"""Class weights from class counts that are released with noise, once, before the first step.

A unit's contribution is the mean over its records of their classes (one-hot), findings (0 and 1
each) or shares of the pixels. Its length is at most

====================================  ==========
single-label, segmentation            1
multi-label, L findings               sqrt(L)
====================================  ==========

whatever its number of records, and adding or removing a unit changes the sum by that much. The sum
is released with Gaussian noise of ``release_counts`` (sigma_c) times this sensitivity: a Gaussian
mechanism on all units, charged with q = 1 (:mod:`dpbam.app.runs.first_release`). It composes with
the steps; the plan's sigma is calibrated so that both together stay within epsilon. Weights are
functions of the noised counts c and the public n, so they cost nothing more:

====================================  ====================================
single-label, segmentation            w_k = n / (K c_k)
multi-label                           w_k = (n - c_k) / c_k, at least 1
====================================  ====================================

A count below its noise is replaced by it, so that noise alone makes no weight large.

With ``balance`` a, the counts of a single-label task do not weigh the loss: they give the offsets a
log pi_k of the classes' frequencies pi (:class:`~dpbam.tasks.single_label.SingleLabel`), which act
whatever the clipping norm is. The frequencies' distance from uniform is shrunk by what of its
square is noise, so that noise alone makes no class frequent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam.app.runs.documents import ClassCounts

if TYPE_CHECKING:
    from dpbam.app.runs.preparation import Prepared
    from dpbam.data import DataSet

Floats = NDArray[np.float64]


def set_class_weights(stored: ClassCounts, prepared: Prepared) -> None:
    """Set the task's weights, or its offsets, from the run's released counts."""
    import torch

    from dpbam.tasks.single_label import SingleLabel

    task = prepared.task
    counts = np.array([stored.counts[name] for name in task.class_names])
    if isinstance(task, SingleLabel) and prepared.config.balance:
        adjustment = offsets(counts, stored.noise, prepared.plan.n, prepared.config.balance)
        task.offsets.copy_(torch.from_numpy(adjustment))
        return
    weights = balanced(counts, stored.noise, prepared.plan.n, task.several_labels)
    task.weights.copy_(torch.from_numpy(weights))


def sensitivity(train: DataSet) -> float:
    """Return the most by which one unit changes the counts, as a vector."""
    return math.sqrt(train.num_classes) if train.task == "multi-label" else 1.0


def contributions(train: DataSet, units: NDArray[Any] | None) -> Floats:
    """Return what each unit adds to the counts: [U, K], the mean of its records' shares."""
    shares = train.class_shares()
    if units is None:
        return shares
    _, owner, records = np.unique(units, return_inverse=True, return_counts=True)
    sums = np.zeros((len(records), shares.shape[1]))
    np.add.at(sums, owner, shares)
    return np.asarray(sums / records[:, None])


def offsets(counts: Floats, noise: float, n: int, balance: float) -> Floats:
    """Return a log pi_k from noised counts: pi is their share of n, shrunk towards uniform.

    The squared distance from uniform is |c/n - 1/K|^2, of which (K - 1) (noise / n)^2 is expected
    of noise alone; a class has at least a fifth of a uniform one's frequency.

    Example:
        >>> offsets(np.array([750.0, 250.0]), noise=10.0, n=1000, balance=0.5).round(2)
        array([-0.14, -0.69])
        >>> offsets(np.array([40.0, 60.0]), noise=30.0, n=100, balance=1.0).round(2)
        array([-0.69, -0.69])
    """
    classes = len(counts)
    away = counts / n - 1 / classes
    square = float(away @ away)
    signal = 1 - (classes - 1) * (noise / n) ** 2 / square if square else 0.0
    shares = np.maximum(1 / classes + max(0.0, signal) * away, 0.2 / classes)
    return np.asarray(balance * np.log(shares / shares.sum()))


def balanced(counts: Floats, noise: float, n: int, findings: bool) -> Floats:
    """Return the weights of classes, or of findings, from their noised counts.

    Example:
        >>> balanced(np.array([900.0, 100.0, -7.0]), noise=20.0, n=1000, findings=False).round(2)
        array([ 0.37,  3.33, 16.67])
    """
    c = np.maximum(counts, max(1.0, noise))
    return np.asarray(np.maximum((n - c) / c, 1.0) if findings else n / (len(c) * c))
