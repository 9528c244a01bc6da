"""Privacy statements as the report shows them: one run in full, several side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpbam.app.report.groups import Group
from dpbam.app.report.headline import privacy_sentence
from dpbam.app.report.records import Run
from dpbam.app.report.tables import Table, shown, side_by_side
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.rounding import up

PUBLISHABLE, WITHHELD = "may_be_published", "must_not_be_published"
PERHAPS = "may_be_published_if_the_test_records_are_not_sensitive"
LISTED = frozenset((PUBLISHABLE, PERHAPS, WITHHELD, "format"))


@dataclass(frozen=True)
class Privacy:
    """The first section of a report.

    Attributes:
        epsilon: the main number: a run's own, or that of all runs together; empty if neither is.
        promise: what it means.
        share: of the configured budget, what is spent, in percent; None if there is no budget.
        facts: of the statements, a column per group.
        publishable: files that may be published.
        perhaps: files that may be if the test records are not sensitive.
        withheld: files that must not.
        warnings: (subject, sentence) for the top of the page.
        seeded: whether a run is: then nothing of sensitive data may be published.
    """

    epsilon: str
    promise: str
    share: float | None
    facts: Table
    publishable: tuple[str, ...]
    perhaps: tuple[str, ...]
    withheld: tuple[str, ...]
    warnings: tuple[tuple[str, str], ...]
    seeded: bool


def privacy(groups: Sequence[Group]) -> Privacy:
    """What the runs promise, one by one and together."""
    runs = [run for group in groups for run in group.runs]
    statements = [run.statement for run in runs]
    alone = len(runs) == 1
    epsilon, promise = _one(runs[0]) if alone else _together(runs)
    return Privacy(
        epsilon=epsilon,
        promise=promise,
        share=_share(runs[0]) if alone else None,
        facts=side_by_side(groups, _facts),
        publishable=_files(statements, PUBLISHABLE),
        perhaps=_files(statements, PERHAPS),
        withheld=_files(statements, WITHHELD),
        warnings=_warnings(groups),
        seeded=any(statement.get("seeded") for statement in statements),
    )


def _one(run: Run) -> tuple[str, str]:
    s = run.statement
    if not s.get("private", True):
        return "∞", "This model gives no privacy: it was trained without noise, as a reference."
    return up(_epsilon(s)), f"at δ = {shown(s.get('delta'))}, for every {s.get('unit', 'record')}"


def _together(runs: Sequence[Run]) -> tuple[str, str]:
    """The cost of publishing every private run of one data set: their steps composed."""
    private = [run for run in runs if run.statement.get("private", True)]
    if len(private) < 2 or len({run.data for run in private}) > 1:
        return "", "Each run has a budget of its own, in the table."
    if any(run.statement.get("unfinished") for run in private):
        return "", "Not all runs have finished: each has a budget of its own, in the table."
    delta = max(float(run.statement["delta"]) for run in private)
    accountant = str(private[0].config.get("accountant", "pld"))
    total = total_epsilon(_charges(private), delta, accountant=accountant)
    return up(total), (
        f"at δ = {shown(delta)}, if all {len(private)} private models are published: they were "
        "trained on the same data, and their budgets add up. If one model is published: "
        f"{privacy_sentence(max(private, key=lambda run: _epsilon(run.statement)).statement)}"
    )


def _charges(runs: Sequence[Run]) -> list[Charge]:
    """What the runs were charged."""
    steps: Counter[tuple[float, float]] = Counter()
    for run in runs:
        s = run.statement
        steps[(s["charged_noise_multiplier"], s["sampling_rate"])] += s["charged_steps"]
        if s.get("noise_multiplier_before"):
            steps[(s["noise_multiplier_before"], 1.0)] += 1
    return [Charge(sigma, q, count) for (sigma, q), count in steps.items()]


def _epsilon(s: dict[str, Any]) -> float:
    value = s.get("epsilon")
    return float(value) if isinstance(value, int | float) else float("inf")


def _share(run: Run) -> float | None:
    budget = run.config.get("epsilon")
    if not budget or not run.statement.get("private", True):
        return None
    share = 100 * _epsilon(run.statement) / float(budget)
    return min(100.0, math.ceil(share * 10) / 10)  # shown with one digit, never rounded down


def _facts(run: Run) -> dict[str, Any]:
    """The statement but for what the page lists next to it."""
    facts = {name: value for name, value in run.statement.items() if name not in LISTED}
    return {name.replace("_", " "): value for name, value in facts.items() if value is not None}


def _files(statements: Sequence[dict[str, Any]], key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(file for s in statements for file in s.get(key, ())))


def _warnings(groups: Sequence[Group]) -> tuple[tuple[str, str], ...]:
    """What a reader must know before anything else."""
    cases = (
        ("Research only", "seeded: an attacker who knows the seed can subtract the noise. Do "
         "not publish such a model of sensitive data", lambda s: s.get("seeded")),
        ("No privacy", "trained without noise, as a reference: publishing such a model may "
         "reveal its training data", lambda s: not s.get("private", True)),
        ("Not finished", "not finished: there is no privacy statement yet, and epsilon is what was "
         "spent at the last evaluation", lambda s: s.get("unfinished")),
    )  # fmt: skip
    warnings = []
    alone = sum(len(group.runs) for group in groups) == 1
    for title, text, holds in cases:
        labels = [g.label for g in groups if any(holds(run.statement) for run in g.runs)]
        if labels:
            of_all = len(labels) == len(groups)
            subject = "The run is" if alone else "All runs are" if of_all else "These runs are"
            names = ", ".join(label.replace(", no privacy", "") for label in labels)
            whose = title if of_all else f"{title}: {names}"
            warnings.append((whose, f"{subject} {text}."))
    return tuple(warnings)
