"""A recipe of one's own: every arm against the first, at each place of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpbam.app.runs import RunRecord, places
from reproduce.accuracy_claims import last_accuracy
from reproduce.claims import Claim
from reproduce.outcome import (
    Outcome,
    Reading,
    Study,
    TextTable,
    accuracy,
    difference_of,
    mean_of,
    points,
)

Arms = Mapping[str, Mapping[int, RunRecord]]


def judge(study: Study) -> Outcome:
    """Tabulate accuracies, and judge whether each arm is more accurate than the first."""
    rows, claims = [], []
    base = next(iter(study.recipe.arms))
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        for name, reading in readings(study).items():
            for arm, by_seed in arms.items():
                difference = ""
                if arm != base and len(set(by_seed) & set(arms.get(base, {}))) > 1:
                    estimate = difference_of(by_seed, arms[base], reading)
                    difference = points(estimate, signed=True, digits=2)
                    text = f"{_place(cell)}{name}: {arm} is more accurate than {base}"
                    claims.append(
                        Claim(
                            text,
                            "above",
                            estimate,
                            "points",
                            floor_missed=_is_below_floor(study, arms, base, reading),
                            resolution=study.recipe.resolution,
                        )
                    )
                rows.append((_place(cell) + name, arm, points(mean_of(by_seed, reading)),
                             difference, str(len(by_seed))))  # fmt: skip
    return Outcome(
        study.recipe.name,
        study.recipe.title,
        tables=[TextTable(("reading", "arm", "accuracy", f"against {base}", "seeds"), rows)],
        claims=claims,
        notes=[
            "Accuracy in percent on the test set with its 95% t interval over the seeds; "
            "differences are paired by seed, in points."
        ],
        studies=[study],
    )


def readings(study: Study) -> dict[str, Reading]:
    """Return the accuracy of the model handed out, and of the last weights where it is a mean."""
    if study.records and all(record.last_accuracy is not None for record in study.records):
        return {"averaged weights": accuracy, "last weights": last_accuracy}
    return {"accuracy": accuracy}


def _place(cell: Mapping[str, Any]) -> str:
    return "".join(f"{place}, " for place in places(cell))


def _is_below_floor(study: Study, arms: Arms, base: str, reading: Reading) -> bool:
    floor = study.recipe.floor
    return floor is not None and not mean_of(arms[base], reading).low > floor
