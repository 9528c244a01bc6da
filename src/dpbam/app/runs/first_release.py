"""What is released once, before the first step: class counts, and the centre of fixed features.

**The centre.** Features of all records of a data set have much in common: of the square of a
MobileNet's features, scaled to norm 1, half to five sixths is that of their mean. The common part
teaches a head nothing, but it takes its share of every clipped gradient, next to noise that stays
as it is. So the mean is released with noise and subtracted, and what is left is brought to norm 1
again. Noise of deviation s in each of D coordinates adds D s^2 to the square of the mean m; the
centre is k m with k = 1 - D s^2 / |m|^2, at least 0 (James and Stein), so that noise alone is not
subtracted.

**The counts.** A unit's contribution c is the mean over its records of their classes (one-hot),
findings (0 and 1 each) or shares of the pixels, so that its length s is at most 1, or sqrt(L) for L
findings, whatever its number of records. Weights are functions of the noised counts and the public
n, so they cost nothing more:

====================================  ====================================
single-label, segmentation            w_k = n / (K c_k)
multi-label                           w_k = (n - c_k) / c_k, at least 1
====================================  ====================================

A count below its noise is replaced by it, so that noise alone makes no weight large. With
``balance`` a, the counts of a single-label task do not weigh the loss: they give the offsets a log
pi_k of the classes' frequencies pi (:class:`~dpbam.tasks.single_label.SingleLabel`), which act
whatever the clipping norm is. The frequencies' distance from uniform is shrunk by what of its
square is noise, so that noise alone makes no class frequent.

**The release.** A unit contributes (c, x): its class counts c, of length at most s
(above), and the mean x of its records' features, of length at most 1.
The sum of c gets noise of sigma_c s in each coordinate, the sum of x noise of sigma_x.

Guarantee: one Gaussian mechanism on all units (q = 1) with the noise multiplier

    sigma = 1 / sqrt(1 / sigma_c^2 + 1 / sigma_x^2)

Assumptions: n is public; a record's features depend on that record and public values alone.

Proof: divide each coordinate by the deviation of its noise. The noise is then standard, and adding
or removing a unit moves the sum by (c / (s sigma_c), x / sigma_x), of length at most 1 / sigma,
since |c| <= s and |x| <= 1. It is on the ledger before it is written. Centre and weights are
functions of what was released and of n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam.app.runs.documents import ClassCounts, FeatureCentre
from dpbam.app.runs.files import FORMAT, DiskError
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.run import RunError
from dpbam.app.runs.spending import explain_loss
from dpbam.privacy.rounding import up

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.app.runs.preparation import Prepared
    from dpbam.data import DataSet
    from dpbam.oracle import PrivateGradientOracle

Floats = NDArray[np.float64]
_ROWS = 4096  # summed at once


def apply_first_release(
    folder: RunFolder, prepared: Prepared, oracle: PrivateGradientOracle
) -> None:
    """Set class weights and the features' centre as released, which is done if it was not yet."""
    config = prepared.config
    wanted = {folder.class_counts: config.release_counts, folder.centre: config.release_centre}
    files = [path for path, sigma in wanted.items() if sigma is not None]
    if not all(path.exists() for path in files):
        _release(folder, prepared, oracle)
    elif known := oracle.ledger.released_before():  # by a process that died before a checkpoint
        oracle.before = known[0]
    if config.release_counts is not None:
        set_class_weights(ClassCounts.read(folder.class_counts), prepared)
    if config.release_centre is not None:
        set_centre(FeatureCentre.read(folder.centre), prepared)


def _release(folder: RunFolder, prepared: Prepared, oracle: PrivateGradientOracle) -> None:
    """Release what was asked for: on the ledger first, then in its files."""
    import torch

    config = prepared.config
    if not oracle.randomness.seeded and oracle.ledger.released_before():
        raise RunError(
            f"the ledger of {folder.path} has the release before the first step, and the folder "
            "does not have its file: the run was ended between the two, or the file was lost. A "
            "second release is not in the plan: restore the file, or start a new run with another "
            f"--out; epsilon {up(oracle.ledger.epsilon())}, spent here, adds to that of the new run"
        )
    sums: dict[str, Tensor] = {}
    std = config.release_centre or 0.0
    if config.release_counts is not None:
        std = config.release_counts * sensitivity(prepared.train)
        counted = contributions(prepared.train, prepared.units).sum(axis=0)
        sums["counts"] = torch.from_numpy(counted)
    # features are weighted so that one deviation serves both
    weight = 1.0 if config.release_centre is None else std / config.release_centre
    if config.release_centre is not None:
        sums["centre"] = torch.from_numpy(weight * feature_sum(prepared))
    noised = oracle.release_before(sums, std)
    try:
        _write_released(folder, prepared, noised, std)
    except DiskError as error:
        if oracle.randomness.seeded:  # resuming repeats the release
            raise
        raise explain_loss(error.problem, oracle.ledger) from error


def _write_released(
    folder: RunFolder, prepared: Prepared, noised: Mapping[str, Tensor], std: float
) -> None:
    """Write the files of the release, the centre in the weight that it was released with."""
    config, unit = prepared.config, prepared.plan.unit
    if config.release_centre is not None:
        n = prepared.plan.n
        weight = std / config.release_centre
        mean = (noised["centre"] / (weight * n)).tolist()
        noise = config.release_centre / n
        FeatureCentre(format=FORMAT, mean=mean, noise=noise, of=unit).write(folder.centre)
    if config.release_counts is not None:
        names = prepared.task.class_names
        counts = dict(zip(names, noised["counts"].tolist(), strict=True))
        ClassCounts(format=FORMAT, counts=counts, noise=std, of=unit).write(folder.class_counts)


def feature_sum(prepared: Prepared) -> Floats:
    """Return the sum over the units of the mean of their records' features, float64 [D].

    A row is as long as 1 at most; rounding may have made it longer by a bit, so it is cut here.
    """
    from dpbam.app.runs.feature_model import FixedFeatureImages

    images = prepared.seen.train.images
    assert isinstance(images, FixedFeatureImages)
    rows, share = images.uncentred(), np.ones(len(prepared.train))
    if prepared.units is not None:
        _, owner, records = np.unique(prepared.units, return_inverse=True, return_counts=True)
        share = 1 / records[owner]
    total = np.zeros(rows.shape[1])
    for start in range(0, len(rows), _ROWS):
        block = rows[start : start + _ROWS].astype(np.float64)
        # a row of a damaged cache that is not finite counts as zero, as it would in a step
        block[~np.isfinite(block).all(axis=1)] = 0.0
        norms = np.sqrt(np.square(block).sum(axis=1))
        total += (share[start : start + _ROWS] / np.maximum(norms, 1.0)) @ block
    return total


def set_centre(stored: FeatureCentre, prepared: Prepared) -> None:
    """Give the model the centre of its features."""
    import torch

    from dpbam.app.runs.feature_model import FeatureModel

    assert isinstance(prepared.model, FeatureModel)
    centre = shrunk(np.array(stored.mean), stored.noise)
    prepared.model.set_centre(torch.from_numpy(centre))


def shrunk(mean: Floats, noise: float) -> Floats:
    """Return k m with k = 1 - D s^2 / |m|^2, at least 0: what of a noised mean is not noise.

    Example:
        >>> shrunk(np.array([3.0, 4.0]), noise=1.0)
        array([2.76, 3.68])
        >>> shrunk(np.array([3.0, 4.0]), noise=9.0)
        array([0., 0.])
    """
    square = float(mean @ mean)
    share = 1 - len(mean) * noise**2 / square if square else 0.0
    return np.asarray(max(0.0, share) * mean)


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
