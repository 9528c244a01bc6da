"""A recipe of the user's own: every arm against the first, at each place of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpbam.app.runs import places
from reproduce.claims import Claim
from reproduce.outcome import (
    Arms,
    Outcome,
    Reading,
    Study,
    TextTable,
    difference_of,
    mean_of,
    points,
    readings,
    shared_seeds,
)


def judge(study: Study) -> Outcome:
    """Tabulate accuracies, and judge whether each arm is more accurate than the first."""
    rows, claims = [], []
    base = next(iter(study.recipe.arms))
    for cell in study.recipe.cells():
        arms = study.arms(cell)
        for which, reading in readings(study).items():
            place = _place(cell, which)
            for arm, by_seed in arms.items():
                against = ""
                if arm != base and len(shared_seeds([arms], arm, base)) > 1:
                    difference = difference_of(by_seed, arms[base], reading)
                    against = points(difference, signed=True, digits=2)
                    claims.append(Claim(
                        f"{place}: {arm} is more accurate than {base}", "above", difference,
                        "points", floor_missed=_is_below_floor(study, arms, base, reading),
                        resolution=study.recipe.resolution,
                    ))  # fmt: skip
                level = points(mean_of(by_seed, reading))
                rows.append((place, arm, level, against, str(len(by_seed))))
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


def _place(cell: Mapping[str, Any], which: str) -> str:
    return ", ".join([*places(cell), which or "accuracy"])


def _is_below_floor(study: Study, arms: Arms, base: str, reading: Reading) -> bool:
    floor = study.recipe.floor
    return floor is not None and not mean_of(arms[base], reading).low > floor
