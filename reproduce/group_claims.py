"""Whom clipping hurts: accuracy on rare classes and hard records, next to the mean.

The plan stands in the recipe ``imbalanced``; what the groups are, in :mod:`reproduce.groups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbam.app.report.charts import Series, dots
from dpbam.app.report.figure import Figure
from dpbam.app.runs import RunRecord
from reproduce.claims import Claim
from reproduce.outcome import Outcome, Reading, Study, TextTable, difference_of, mean_of, points

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
Arms = Mapping[str, Mapping[int, RunRecord]]


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
    arms = study.arms(cell)
    return len(set(arms.get(arm, {})) & set(arms.get("dp-sgd", {})))


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
                is_first = cell == study.recipe.cells()[0]
                planned = is_first and weights == "averaged" and group in PRIMARY
                place = f"C {cell['clip_norm']:g}, {weights} weights{' (primary)' * planned}"
                text = f"{place}: BAM is more accurate than DP-SGD on {_phrase(group)}"
                gain = difference_of(arms["bam"], arms["dp-sgd"], reading_of(group, weights))
                claims.append(Claim(text, "above", gain, "points"))
    return claims


def _stronger(study: Study) -> list[Claim]:
    """Judge ten times the lambda, averaged weights, where most records are clipped."""
    arms = study.arms(study.recipe.cells()[0])
    if not set(arms.get("bam-strong", {})) & set(arms.get("dp-sgd", {})):
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
        panels.append(dots(title, "points above DP-SGD", series, percent=False))
    return Figure(
        "groups", "Whom clipping hurts",
        "BAM's paired difference to DP-SGD in accuracy on groups of test records, mean and 95% "
        "interval over the seeds; imbalanced CIFAR-10 at epsilon 8, two values of C.",
        "public", panels,
    )  # fmt: skip
