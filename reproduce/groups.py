"""Whom clipping hurts: accuracy on rare classes and hard records, next to the mean.

A recipe names a function, ``groups = "reproduce.groups:cifar10_8x8"``, that returns masks of the
test records by name. Of each finished run the accuracy in each group is kept, by the last weights
and by the averaged ones. The plan of the study stands in the recipe ``imbalanced``.

**Hard records** are, within each class, the half of the test records to whose true class a
reference model gives the lowest probabilities. The reference is trained without privacy on the
complete training set, so that hard and rare are two things.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpbam.app.report.charts import Series, dots
from dpbam.app.report.figure import Figure
from dpbam.app.runs import ConfigError, RunRecord
from dpbam.data import DataSet, data_root
from dpbam.nn import build_model
from dpbam.training.evaluation import predict_logits
from reproduce import small_data
from reproduce.claims import Claim
from reproduce.drawings import with_zero_line
from reproduce.outcome import (
    Outcome,
    Reading,
    Study,
    TextTable,
    difference_of,
    mean_of,
    points,
    shared_seeds,
)

Mask = NDArray[np.bool_]
_FORMAT = 1  # of the cached reference: raise it when its training changes
_EPOCHS, _BATCH, _RATE = 6, 250, 0.002
GROUPS = ("all records", "worst class", "rare classes", "hard records")
WEIGHTS = ("averaged", "last")
PRIMARY = ("rare classes", "hard records")
_KEYS = {"rare classes": "rare", "hard records": "hard"}
_NAMES = {"dp-sgd": "DP-SGD", "dp-sat": "DP-SAT", "bam": "BAM", "bam-strong": "BAM, ten times"}
_NOTES = (
    """\
    An MLP on CIFAR-10 at 8x8; in the training set three classes (bird, dog, ship) have half of
    their records, the test set has all ten classes in equal numbers. Hard records are, within
    each class, the half to whose true class a reference without privacy gives the lowest
    probabilities; it is trained on the complete set. C = 1 clips 85% of the records, C = 6
    about half. BAM's lambda is 5e-4 |theta|, or ten times that. Rows of DP-SGD show the
    accuracy in percent; all others the paired difference to it in points, with its 95% t
    interval.""",
    """\
    Planned before the runs: BAM against DP-SGD on rare classes and on hard records, C = 1, averaged
    weights. All else is secondary.""",
)


def load_groups(name: str) -> dict[str, Mask]:
    """Call ``module:function`` and return its masks of the test records."""
    module, _, function = name.partition(":")
    try:
        define: Callable[[], Mapping[str, Mask]] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError):
        raise ConfigError(f"the groups {name!r} are not module:function of masks") from None
    return dict(define())


def accuracies(
    logits: torch.Tensor, labels: torch.Tensor, groups: Mapping[str, Mask]
) -> dict[str, float]:
    """Return the share of right predictions in each group."""
    is_right = (logits.argmax(1) == labels).numpy()
    return {name: float(is_right[mask].mean()) for name, mask in groups.items()}


def cifar10_8x8() -> dict[str, Mask]:
    """Return the ten classes, the rare and frequent ones, and the hard and easy half of each."""
    test = small_data.cifar10_8x8("test")
    labels = np.asarray(test.labels)
    is_rare = np.isin(labels, small_data.RARE)
    is_hard = lowest_half(reference_confidence(), labels)
    return {
        **{f"class {name}": labels == k for k, name in enumerate(test.class_names)},
        "rare": is_rare, "frequent": ~is_rare, "hard": is_hard, "easy": ~is_hard,
        "rare and hard": is_rare & is_hard,
    }  # fmt: skip


def lowest_half(confidence: NDArray[np.float32], labels: NDArray[np.int64]) -> Mask:
    """Return, within each class, which half of the records has the lowest confidence.

    Example:
        >>> lowest_half(np.array([0.9, 0.1, 0.3, 0.2]), np.array([0, 0, 1, 1])).tolist()
        [False, True, False, True]
    """
    is_low = np.zeros(len(labels), dtype=bool)
    for k in np.unique(labels):
        where = np.flatnonzero(labels == k)
        order = np.argsort(confidence[where], kind="stable")
        is_low[where[order[: len(where) // 2]]] = True
    return is_low


def reference_confidence() -> NDArray[np.float32]:
    """Return the reference's probability of the true class of each test record; trained once."""
    train, test = small_data.cifar10_8x8("train"), small_data.cifar10_8x8("test")
    facts = f"{_FORMAT} {_EPOCHS} {_BATCH} {_RATE} {train.fingerprint()} {test.fingerprint()}"
    path = data_root() / f"reference-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        logits, labels = predict_logits(_train_reference(train), test)
        probabilities = logits.softmax(1)[torch.arange(len(labels)), labels]
        temporary = path.with_suffix(f".{os.getpid()}.npy")
        np.save(temporary, probabilities.numpy())
        temporary.rename(path)
    confidence: NDArray[np.float32] = np.load(path, allow_pickle=False)
    return confidence


def _train_reference(train: DataSet) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = build_model(
        "small-cnn", in_channels=3, image_size=8, num_classes=10, seed=0, channels=[32, 64, 64]
    )
    images, labels = train.batch(np.arange(len(train)))
    inputs = images.float() / 127.5 - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    for _ in range(_EPOCHS):
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def reading_of(group: str, weights: str) -> Reading:
    """Return what reads the accuracy of a run in one group, by averaged or by the last weights."""

    def read(record: RunRecord) -> float:
        if group == "all records":
            last = record.accuracy if record.last_accuracy is None else record.last_accuracy
            return record.accuracy if weights == "averaged" else last
        assert record.group_accuracy is not None  # its recipe names groups
        by_group = record.group_accuracy[weights]
        if group == "worst class":
            return min(share for name, share in by_group.items() if name.startswith("class "))
        return by_group[_KEYS[group]]

    return read


def whom(studies: Sequence[Study]) -> Outcome:
    """Judge whether BAM helps the records that clipping is said to hurt."""
    study = studies[0]
    return Outcome(
        "groups",
        "Whom clipping hurts",
        tables=[_accuracies(study)],
        figures=[_figure(study)] if _pairs(study, study.recipe.cells()[0], "bam") > 1 else [],
        claims=[*_gains(study), *_stronger(study), *_larger_clip_norm(study)],
        notes=_NOTES,
        studies=studies,
    )


def _pairs(study: Study, cell: Mapping[str, Any], arm: str) -> int:
    return len(shared_seeds([study.arms(cell)], arm, "dp-sgd"))


def _accuracies(study: Study) -> TextTable:
    """One row per C, weights and method: the accuracy of DP-SGD, and differences to it."""
    rows = []
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        for weights in WEIGHTS:
            readings = [reading_of(group, weights) for group in GROUPS]
            for arm, by_seed in arms.items():
                if arm == "dp-sgd":
                    columns = [points(mean_of(by_seed, reading)) for reading in readings]
                elif not _pairs(study, cell, arm):
                    continue
                else:
                    base = arms["dp-sgd"]
                    differences = (difference_of(by_seed, base, reading) for reading in readings)
                    columns = [points(each, signed=True, digits=2) for each in differences]
                place = (f"{cell['clip_norm']:g}", weights, _NAMES[arm])
                rows.append((*place, *columns, str(len(by_seed))))
    return TextTable(("C", "weights", "method", *GROUPS, "seeds"), rows)


def _gains(study: Study) -> list[Claim]:
    """Judge BAM against DP-SGD in each group, the primary contrasts first."""
    claims = []
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        if not _pairs(study, cell, "bam"):
            continue
        for weights in WEIGHTS:
            for group in (*PRIMARY, "worst class"):
                planned = cell == study.recipe.cells()[0] and group in PRIMARY
                primary = planned and weights == "averaged"
                place = f"C {cell['clip_norm']:g}, {weights} weights{' (primary)' * primary}"
                text = f"{place}: BAM is more accurate than DP-SGD on {_phrase(group)}"
                gain = difference_of(arms["bam"], arms["dp-sgd"], reading_of(group, weights))
                headline = f"{group}, imbalanced data".capitalize() if planned else ""
                which = f"{weights} weights"
                claims.append(
                    Claim(text, "above", gain, "points", reading=which, headline=headline)
                )
    return claims


def _stronger(study: Study) -> list[Claim]:
    """Judge ten times the lambda, averaged weights, where most records are clipped."""
    arms = study.arms(study.recipe.cells()[0])
    if not shared_seeds([arms], "bam-strong", "dp-sgd"):
        return []
    place = f"C {study.recipe.cells()[0]['clip_norm']:g}, averaged weights"
    claims = []
    for group in PRIMARY:
        reading = reading_of(group, "averaged")
        text = f"{place}: BAM with ten times the lambda is more accurate on {_phrase(group)}"
        gain = difference_of(arms["bam-strong"], arms["dp-sgd"], reading)
        claims.append(Claim(text, "above", gain, "points"))
    return claims


def _phrase(group: str) -> str:
    return f"the {group}" if group == "worst class" else group


def _larger_clip_norm(study: Study) -> list[Claim]:
    """Judge what clipping less does for DP-SGD, paired by seed over the two values of C."""
    small, large = (study.arms(cell).get("dp-sgd", {}) for cell in study.recipe.cells()[:2])
    if not set(small) & set(large):
        return []
    claims = []
    for group in GROUPS:
        gain = difference_of(large, small, reading_of(group, "averaged"))
        first, second = (f"{cell['clip_norm']:g}" for cell in study.recipe.cells()[:2])
        text = f"DP-SGD, averaged weights, {group}: C {second} is more accurate than C {first}"
        claims.append(Claim(text, "above", gain, "points"))
    return claims


def _figure(study: Study) -> Figure:
    """Draw BAM's gain in each group by both readings, a panel per value of C."""
    panels = []
    for cell in study.recipe.cells():
        arms, series = study.arms(cell), []
        if _pairs(study, cell, "bam") < 2:
            continue
        for colour, weights in enumerate(reversed(WEIGHTS)):
            gains = [
                difference_of(arms["bam"], arms["dp-sgd"], reading_of(group, weights))
                for group in GROUPS
            ]
            series.append(
                Series(
                    f"{weights} weights", colour, list(GROUPS),
                    tuple(100 * e.mean for e in gains), tuple(100 * e.low for e in gains),
                    tuple(100 * e.high for e in gains),
                )
            )  # fmt: skip
        title = f"C = {cell['clip_norm']:g}"
        panel = dots(title, "points above DP-SGD", series, percent=False)
        panels.append(with_zero_line(panel))
    return Figure(
        "groups", "Whom clipping hurts",
        "BAM's paired difference to DP-SGD in accuracy on groups of test records, mean and 95% "
        "interval over the seeds; imbalanced CIFAR-10 at epsilon 8, two values of C.",
        "public", panels,
    )  # fmt: skip
