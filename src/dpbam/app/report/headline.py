"""What a reader wants first of one run: how good it is, how private, what may be published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpbam.app.report.records import Run, unit_of
from dpbam.app.report.tables import shown
from dpbam.app.runs.statement_text import right_guesses
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text, wilson


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
    right = right_guesses(statement.epsilon, statement.delta, statement.trade_off)
    return (
        f"Someone who has the model, and knows all training data but whether one {run.unit} is "
        f"among them, guesses that right at most {up(min(100.0, 100 * right), 4)}% of the time, "
        "against 50% without the model "
        f"(ε = {up(statement.epsilon)}, δ = {shown(statement.delta)})."
    )


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
