"""BAM on a public encoder: its gain over DP-SGD for linear heads, and the bias share.

The plan stands in the recipe ``encoder-cifar10``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpbam.app.runs import RunRecord
from reproduce.accuracy_claims import last_accuracy, over_cells, shared_seeds
from reproduce.claims import Claim
from reproduce.outcome import (
    Outcome,
    Reading,
    Study,
    TextTable,
    accuracy,
    bias_share,
    difference_of,
    mean_of,
    points,
)

PRIMARY = "bam-0.02"
READINGS: dict[str, Reading] = {"last weights": last_accuracy, "averaged weights": accuracy}
_LAMBDAS = {"bam": "default", "bam-0.02": "0.02", "bam-0.1": "0.1"}
_NOTES = (
    """\
    A linear head on frozen features of MobileNetV3-small (ImageNet), with the settings that `dpbam
    train` takes by default: full batches, 100 steps, C = 3, learning rate by its rule; nothing is
    tuned. Accuracy in percent; differences are paired by seed, in points. The bias share is that of
    DP-SGD's gradient over training: 1 if only clipping turns it away from the plain one, 0 if only
    noise does.""",
    """\
    Planned before the runs: BAM with lambda 0.02, the mean over the three epsilons, by both
    readings. All else is secondary. LoRA on an encoder was not trained.""",
)
Arms = Mapping[str, Mapping[int, RunRecord]]


def encoders(studies: Sequence[Study]) -> Outcome:
    """Judge BAM's gain on features of a public encoder."""
    trained = [study for study in studies if study.records]
    return Outcome(
        "encoders",
        "BAM on a public encoder",
        tables=[_table(trained)],
        claims=[claim for study in trained for claim in _claims(study)],
        notes=_NOTES,
        studies=studies,
    )


def data_of(study: Study) -> str:
    """Name the data set: the title's part after the encoder's name."""
    return study.recipe.title.split(", ")[1]


def _table(studies: Sequence[Study]) -> TextTable:
    """One row per data set, epsilon and lambda; the rows of DP-SGD are its columns."""
    rows = []
    for study in studies:
        for cell in study.recipe.cells():
            arms = study.arms(cell)
            base = arms.get("dp-sgd", {})
            for arm, by_seed in arms.items():
                if arm == "dp-sgd" or not set(by_seed) & set(base):
                    continue
                gains = (difference_of(by_seed, base, reading) for reading in READINGS.values())
                measured = [
                    row for record in base.values() for row in record.non_private_bias
                    if row["step"] > 0
                ]  # fmt: skip
                rows.append((
                    data_of(study), cell["at"].removeprefix("epsilon-"),
                    points(mean_of(base)), f"{bias_share(measured):.2g}", _LAMBDAS[arm],
                    *(points(gain, signed=True, digits=2) for gain in gains), str(len(by_seed)),
                ))  # fmt: skip
    header = ("data", "epsilon", "DP-SGD, averaged weights", "bias share", "lambda of BAM",
              *(f"BAM against it, {name}" for name in READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _claims(study: Study) -> list[Claim]:
    """Judge each lambda over all epsilons, the planned one first."""
    cells = [study.arms(cell) for cell in study.recipe.cells()]
    claims = []
    for arm in (PRIMARY, *(arm for arm in _LAMBDAS if arm != PRIMARY)):
        if not all({arm, "dp-sgd"} <= set(arms) for arms in cells):
            continue
        if not shared_seeds(cells, arm, "dp-sgd"):
            continue
        for name, reading in READINGS.items():
            gain = over_cells(cells, arm, "dp-sgd", reading)
            place = f"{data_of(study)}, {name}{' (primary)' * (arm == PRIMARY)}"
            text = f"{place}: BAM, lambda {_LAMBDAS[arm]}, is more accurate than DP-SGD"
            claims.append(Claim(text, "above", gain, "points"))
    return claims
