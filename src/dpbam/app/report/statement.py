"""What a reader wants first: how good a run is, how private, and what may be published."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpbam.app.report.groups import Group
from dpbam.app.report.records import Run, unit_of
from dpbam.app.report.tables import Table, shown, side_by_side
from dpbam.app.runs.documents import Statement
from dpbam.app.runs.statement_text import right_guesses
from dpbam.privacy.accounting import Charge, total_epsilon
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text, wilson

#: Fields of a statement that the page shows apart from its table of facts.
LISTED = frozenset((
    "may_be_published", "may_be_published_if_the_test_records_are_not_sensitive",
    "must_not_be_published", "format",
))  # fmt: skip


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
    """Return what the runs promise, one by one and together."""
    runs = [run for group in groups for run in group.runs]
    statements = [run.statement for run in runs if run.statement is not None]
    alone = len(runs) == 1
    epsilon, promise = _promise(runs[0]) if alone else _together(runs)
    withheld = _union(statement.must_not_be_published for statement in statements)
    if len(statements) < len(runs):
        withheld = ("everything: the training has not finished", *withheld)
    return Privacy(
        epsilon=epsilon,
        promise=promise,
        share=_share(runs[0]) if alone else None,
        facts=side_by_side(groups, _facts),
        publishable=_union(statement.may_be_published for statement in statements),
        perhaps=_union(
            statement.may_be_published_if_the_test_records_are_not_sensitive
            for statement in statements
        ),
        withheld=withheld,
        warnings=_warnings(groups),
        seeded=any(run.seeded for run in runs),
    )


def _promise(run: Run) -> tuple[str, str]:
    if not run.private:
        return "∞", "This model gives no privacy: it was trained without noise, as a reference."
    unit = "record" if run.statement is None else run.statement.unit
    return up(run.epsilon), f"at δ = {shown(run.delta)}, for every {unit}"


def _together(runs: Sequence[Run]) -> tuple[str, str]:
    """Return the cost of publishing every private run of one data set: their steps composed."""
    private = [run for run in runs if run.private]
    if len(private) < 2 or len({run.data for run in private}) > 1:
        return "", "Each run has a budget of its own, in the table."
    statements = [run.statement for run in private if run.statement is not None]
    if len(statements) < len(private):
        return "", "Not all runs have finished: each has a budget of its own, in the table."
    delta = max(statement.delta for statement in statements)
    accountant = str(private[0].config.get("accountant", "pld"))
    total = total_epsilon(_charges(statements), delta, accountant=accountant)
    # runs of one epsilon still differ in what an attacker achieves: the weakest is stated
    sentence = privacy_sentence(max(private, key=_right_guesses))
    return up(total), (
        f"at δ = {shown(delta)}, if all {len(private)} private models are published: they were "
        "trained on the same data, and their budgets add up. If one model is published, "
        f"{sentence[0].lower()}{sentence[1:]}"
    )


def _charges(statements: Sequence[Statement]) -> list[Charge]:
    """Return what the runs were charged."""
    steps: Counter[tuple[float, float]] = Counter()
    for s in statements:
        steps[s.charged_noise_multiplier, s.sampling_rate] += s.charged_steps
        if s.noise_multiplier_before:
            steps[s.noise_multiplier_before, 1.0] += 1
    return [Charge(sigma, q, count) for (sigma, q), count in steps.items()]


def _share(run: Run) -> float | None:
    budget = run.config.get("epsilon")
    if not isinstance(budget, int | float) or not run.private:
        return None
    share = 100 * run.epsilon / budget
    return min(100.0, math.ceil(share * 10) / 10)  # shown with one digit, never rounded down


def _facts(run: Run) -> dict[str, object]:
    """Return the statement but for what the page lists next to it, or what is known without one."""
    facts: dict[str, object] = {"unfinished": True, "epsilon": run.epsilon, "delta": run.delta}
    if run.statement is not None:
        facts = {k: v for k, v in run.statement.to_json().items() if k not in LISTED}
    elif run.facts is not None:
        names = ("noise_multiplier", "sampling_rate", "clip_norm")
        facts |= {name: getattr(run.facts, name) for name in names}
    return {name.replace("_", " "): value for name, value in facts.items() if value is not None}


def _union(lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _warnings(groups: Sequence[Group]) -> tuple[tuple[str, str], ...]:
    """What a reader must know before anything else."""
    cases = (
        ("Research only", "seeded: an attacker who knows the seed can subtract the noise. Do "
         "not publish such a model of sensitive data", lambda run: run.seeded),
        ("No privacy", "trained without noise, as a reference: publishing such a model may "
         "reveal its training data", lambda run: not run.private),
        ("Not finished", "not finished: there is no privacy statement yet, and epsilon is what was "
         "spent at the last evaluation", lambda run: run.statement is None),
    )  # fmt: skip
    warnings = []
    alone = sum(len(group.runs) for group in groups) == 1
    for title, text, holds in cases:
        labels = [g.label for g in groups if any(holds(run) for run in g.runs)]
        if labels:
            of_all = len(labels) == len(groups)
            subject = "The run is" if alone else "All runs are" if of_all else "These runs are"
            names = ", ".join(label.replace(", no privacy", "") for label in labels)
            whose = title if of_all else f"{title}: {names}"
            warnings.append((whose, f"{subject} {text}."))
    return tuple(warnings)


@dataclass(frozen=True)
class Headline:
    """The top of a page about one run, in words."""

    score: str  # empty if none may be shown, "useless" of a model that learned nothing
    quality: str
    privacy: str
    publish: str


def headline(run: Run) -> Headline:
    score, quality = _quality(run)
    return Headline(score, quality, privacy_sentence(run), _publish(run))


def _quality(run: Run) -> tuple[str, str]:
    if not run.metrics:
        return "", "How good the model is on test records is not shown on this page."
    name, records = run.metric, int(run.metrics[-1].get("records") or 0)
    value = float(run.metrics[-1].get(name) or 0.0)
    interval = _interval(run, value, records)
    ends = " to ".join(metric_text(name, end) for end in interval or ())
    stated = f"95% interval {ends}, " if ends else ""
    quality = [f"{metric_label(name)}, {stated}on {records:,} test records."]
    if (constant := run.constant) is not None:
        quality.append(f"The best constant answer would have {metric_text(name, constant)}.")
    if ends and (unit := unit_of([run])[:-1]) != "sample":
        quality.append(
            f"The interval takes images as independent: with several per {unit} the true one is "
            "wider."
        )
    # a number in large type reads as a success: a model that learned nothing has none
    if run.useless:
        quality.insert(0, f"Not better than a constant answer by more than chance: "
                          f"{metric_text(name, value)}")  # fmt: skip
        return "useless", " ".join(quality)
    if run.useless is None:
        quality.insert(0, "There are too few test records to tell whether it is better than a "
                          "constant answer:")  # fmt: skip
    return metric_text(name, value), " ".join(quality)


def _interval(run: Run, value: float, records: int) -> Sequence[float] | None:
    """Wilson's for an accuracy; of other metrics, what was recorded."""
    if run.metric == "accuracy":
        return wilson(round(value * records), records) if records else None
    stored = run.evaluation_of_last_records.get("interval")
    return stored if isinstance(stored, list) and len(stored) == 2 else None


def privacy_sentence(run: Run) -> str:
    """Return epsilon in one plain sentence."""
    statement = run.statement
    if not run.private:
        return "There is no privacy: the model was trained without noise, as a reference."
    if statement is None or not math.isfinite(statement.epsilon):
        return "The training has not finished, so that nothing is promised yet."
    right = _right_guesses(run)
    return (
        f"Someone who knows all other training data, and guesses whether one {run.unit} was used "
        f"or left out, is right at most {up(min(100.0, 100 * right), 3)}% of the time with the "
        "model, and 50% without it "
        f"(ε = {up(statement.epsilon)}, δ = {shown(statement.delta)})."
    )


def _right_guesses(run: Run) -> float:
    s = run.statement
    return math.inf if s is None else right_guesses(s.epsilon, s.delta, s.trade_off)


def _publish(run: Run) -> str:
    statement = run.statement
    if statement is None or not statement.may_be_published or not run.private:
        return "Nothing of this run may be published."
    perhaps = statement.may_be_published_if_the_test_records_are_not_sensitive
    more = f"; {', '.join(perhaps)} if the test records are not sensitive" if perhaps else ""
    files = ", ".join(statement.may_be_published)
    listed = f"{files}{more}. Everything else stays with the operator."
    if run.seeded:
        return f"Of sensitive data nothing, since the run is seeded. Of other data: {listed}"
    return listed
