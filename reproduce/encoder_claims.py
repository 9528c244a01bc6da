"""BAM on a public encoder: its gain over DP-SGD for linear heads and LoRA, and the bias share.

The plans stand in the recipes ``encoder-cifar10`` and ``encoder-lora``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbam.privacy.rounding import up
from reproduce.claims import Claim
from reproduce.outcome import (
    READINGS,
    Outcome,
    Study,
    TextTable,
    bias_share,
    difference_of,
    mean_of,
    over_cells,
    points,
    shared_seeds,
)

PRIMARY = "bam-0.02"
_LAMBDAS = {"bam": "default", "bam-0.02": "0.02", "bam-0.1": "0.1"}
_NOTES = (
    """\
    A linear head on frozen features of MobileNetV3-small (ImageNet), with the settings that `dpbam
    train` takes by default: full batches, 100 steps, C = 3, learning rate by its rule; nothing is
    tuned. Accuracy in percent; differences are paired by seed, in points. The bias share is that of
    DP-SGD's gradient over training: 1 if only clipping turns it away from the plain one, 0 if only
    noise does.""",
    """\
    LoRA of rank 8 and a head on a small ConvNeXt that was trained without privacy on the other five
    classes of CIFAR-10 at 16x16: 80 steps of 500, C = 1, averaged over the second half.""",
    """\
    Planned before the runs: BAM with lambda 0.02, the mean over the three epsilons, by both
    readings. All else is secondary.""",
)


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


def name_of(study: Study) -> str:
    """Name what is trained, and the data: the title without the encoder and the number of records.

    The title is "WHAT on ENCODER, DATA, and anything else".
    """
    first, data, *_ = study.recipe.title.split(", ")
    return f"{first.partition(' on ')[0]}, {data}"


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
                    name_of(study), _epsilon(study, cell),
                    points(mean_of(base)), f"{bias_share(measured):.2g}", _LAMBDAS[arm],
                    *(points(gain, signed=True, digits=2) for gain in gains), str(len(by_seed)),
                ))  # fmt: skip
    header = ("what, data", "epsilon", "DP-SGD, averaged weights", "bias share", "lambda of BAM",
              *(f"BAM against it, {name}" for name in READINGS), "seeds")  # fmt: skip
    return TextTable(header, rows)


def _epsilon(study: Study, cell: Mapping[str, Any]) -> str:
    if "at" in cell:
        return str(cell["at"]).removeprefix("epsilon-")
    return up(float(study.recipe.setting["epsilon"]))


def _claims(study: Study) -> list[Claim]:
    """Judge each lambda over all epsilons, the planned one first."""
    cells = [study.arms(cell) for cell in study.recipe.cells()]
    claims = []
    for arm in (PRIMARY, *(arm for arm in _LAMBDAS if arm != PRIMARY)):
        if not shared_seeds(cells, arm, "dp-sgd"):
            continue
        for name, reading in READINGS.items():
            gain = over_cells(cells, arm, "dp-sgd", reading)
            is_primary = arm == PRIMARY
            place = f"{name_of(study)}, {name}{' (primary)' * is_primary}"
            text = f"{place}: BAM, lambda {_LAMBDAS[arm]}, is more accurate than DP-SGD"
            headline = f"Public encoder, {name_of(study)}" if is_primary else ""
            claims.append(Claim(text, "above", gain, "points", reading=name, headline=headline))
    return claims
