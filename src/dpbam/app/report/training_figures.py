"""Figures over training: the metric, the loss, and the bias that clipping causes.

A row of the bias is one line of ``non-private/bias.jsonl``; names are those of
:class:`dpbam.bias.record.BiasRecord`. Loss and bias are not to be shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dpbam.app.report.charts import Numbers, Series, lines
from dpbam.app.report.figure import Figure, Panel, Spec, mean
from dpbam.app.report.groups import (
    Group,
    Runs,
    curves,
    finite,
    mean_of,
    mean_score,
    numbers,
    present,
)
from dpbam.app.report.records import Rows, Run
from dpbam.privacy.rounding import up
from dpbam.tasks.scores import metric_label, metric_text

Builder = Callable[[Sequence[Group]], Figure]
PLAIN, OWN = "non_private_against_plain", "non_private_against_own"
BEST = "best"
NOT_MEASURED = (
    "The bias was not measured in this run. Train with --measure-bias every=10 to record it."
)
LAST_PART = 0.1  # the end of training: the last tenth of the measured steps


def epochs(run: Run, rows: Rows) -> Numbers:
    """Expected passes over the data at each row's step: step * q."""
    return tuple(step * run.sampling_rate for step in numbers(rows, "step"))


def has(run: Run, reading: str) -> bool:
    """Whether the run was measured so. DP-SAT's first step, which is plain, does not count."""
    return bool(run.bias and run.bias[-1].get(reading))


def best(run: Run) -> str:
    """The paper's reading where the run has it, else the method's own."""
    return PLAIN if has(run, PLAIN) else OWN


def over_training(groups: Sequence[Group], path: Sequence[str]) -> tuple[Series, ...]:
    """Curves of one recorded number; runs without it are left out.

    A path that begins with :data:`BEST` takes each run's best reading.
    """

    def points(run: Run) -> tuple[Numbers, Numbers]:
        first = best(run) if path[0] == BEST else path[0]
        y = numbers(run.bias, first, *path[1:])
        lacking = first == PLAIN and not has(run, PLAIN)
        return ((), ()) if lacking or not any(map(math.isfinite, y)) else (epochs(run, run.bias), y)

    # nothing is clipped in a reference without privacy: its bias is 0 by definition
    clipped = [group for group in groups if group.runs[0].private]
    return curves(clipped, points)


class Reading:
    """One recorded number over training, found along ``path`` in a row: a panel."""

    def __init__(self, title: str, label: str, *path: str, **options: Any) -> None:
        self.title, self.label, self.path, self.options = title, label, path, options

    def panels(self, groups: Sequence[Group]) -> list[Panel]:
        """The panel, or none where no run has the number."""
        series = over_training(groups, self.path)
        return [lines(self.title, "epoch", self.label, series, **self.options)] if series else []


def measured(
    name: str, title: str, caption: str, *readings: Reading, scales: Spec | None = None,
    otherwise: str = NOT_MEASURED,
) -> Builder:  # fmt: skip
    """A figure of recorded numbers over training; ``otherwise`` is why a measured run has none."""

    def build(groups: Sequence[Group]) -> Figure:
        panels = _distinct([panel for r in readings for panel in r.panels(groups)])
        against = any(r.path[0] in (BEST, PLAIN) for r in readings)
        explained = caption + (_own_only(groups) if against else "")
        missing = otherwise if any(g.runs[0].bias for g in groups) else NOT_MEASURED
        return Figure(name, title, explained, "training", panels, missing, scales or {})

    return build


def _distinct(panels: Sequence[Panel]) -> list[Panel]:
    """Leave out panels that repeat the curves of one before: of DP-SGD both readings are one."""
    distinct: list[Panel] = []
    curves: list[list[tuple[Any, ...]]] = []
    for panel in panels:
        points = [(row["series"], row["x"], row["y"]) for row in panel.rows]
        if points not in curves:
            curves.append(points)
            distinct.append(panel)
    return distinct


def _own_only(groups: Sequence[Group]) -> str:
    """Which groups lack the paper's reading, as a sentence for a caption."""
    lacking = [g.label for g in groups if has(g.runs[0], OWN) and not has(g.runs[0], PLAIN)]
    if not lacking:
        return ""
    names = " and ".join(lacking)
    return f" {names}: against its own gradient alone; the plain one would take another pass."


#: The paper's Figure 2, in both readings.
bias = measured(
    "bias", "Bias of the clipped gradient",
    "Length of g_clip − ĝ over training, in two readings: ĝ is the plain batch gradient, the "
    "paper's definition, or what the method itself would use without clipping.",
    Reading("Against the plain batch gradient", "length of the bias vector", PLAIN, "bias",
            zero=True),
    Reading("Against the method's own gradient", "length of the bias vector", OWN, "bias",
            zero=True),
    scales={"y": "shared"},
)  # fmt: skip

direction = measured(
    "direction", "Length, direction or noise?",
    "A cosine of 1 means that clipping only shortens the gradient, which a learning rate can make "
    "up for; the share of direction is what it cannot. Where the share of noise is above one half, "
    "noise dominates, and less bias gains little.",
    Reading("Cosine with the unclipped gradient", "cosine of ĝ clipped and ĝ", BEST, "cosine"),
    Reading("Share of direction in the squared bias", "|c|² / |bias|²", BEST, "direction_share",
            percent=True, zero=True),
    Reading("Share of the noise in the squared error", "variance / (variance + bias²)",
            BEST, "noise_share", percent=True, zero=True),
    Reading("What is left of the direction", "cosine, noise included",
            BEST, "private_cosine"),
)  # fmt: skip


def last_part(rows: Rows) -> Rows:
    """The last tenth of the measured steps, one at least."""
    return rows[-max(1, round(LAST_PART * len(rows))) :]


def last_mean(run: Run, *path: str) -> float | None:
    """The mean of a recorded number over the last tenth of the measured steps; None without."""
    value = mean(numbers(last_part(run.bias), *path)) if run.bias else math.nan
    return value if math.isfinite(value) else None


def of_bias(runs: Runs) -> str:
    length, relative = _last(runs, "bias", "{:.3g}"), _last(runs, "relative_bias", "{:.0%}")
    if not length or not relative:
        return ""
    return f"at the end clipping moves the average gradient by {length}, {relative} of its length"


def of_direction(runs: Runs) -> str:
    cosines, shares = _lasts(runs, "cosine"), _lasts(runs, "direction_share")
    if not cosines or not shares:
        return ""
    share = mean_of(shares, "{:.0%}") if mean(shares) >= 0.01 else "less than 1%"
    angle = mean_of([math.degrees(math.acos(max(-1.0, min(1.0, c)))) for c in cosines], "{:.0f}°")
    noise = _last(runs, "noise_share", "{:.0%}")
    return (
        f"at the end the clipped gradient points {angle} away from the true one; {share} of the "
        "bias is direction" + (f", and {noise} of the error of a step is noise" if noise else "")
    )


def _last(runs: Runs, key: str, form: str) -> str:
    return mean_of(_lasts(runs, key), form)


def _lasts(runs: Runs, key: str) -> list[float]:
    """A number of the bias at the end of each private run that has it."""
    return present(last_mean(run, best(run), key) for run in runs if run.private)


def accuracy(groups: Sequence[Group]) -> Figure:
    """The task's main metric on the test data over training, and over the budget spent."""
    metrics = list(dict.fromkeys(run.metric for group in groups for run in group.runs))
    label = ", ".join(map(metric_label, metrics)) or "accuracy"
    percent = metrics in ([], ["accuracy"])

    def over(key: str, run: Run) -> tuple[Numbers, Numbers]:
        return numbers(run.metrics, key), numbers(run.metrics, run.metric)

    def over_epsilon(run: Run) -> tuple[Numbers, Numbers]:
        """Rounded up to the digits shown, so that no point is below its epsilon."""
        spent, reached = over("epsilon", run)
        return tuple(x if math.isnan(x) else float(up(x, 3)) for x in spent), reached

    by_epoch = curves(groups, lambda run: over("epoch", run))
    by_epsilon = curves([g for g in groups if g.runs[0].private], over_epsilon)
    constants = {run.constant for group in groups for run in group.runs}
    # one line says it for all runs of one data set, and none where some run lacks it
    alone = constants.pop() if len(constants) == 1 else None
    marks = (
        ()
        if alone is None
        else ((alone, f"best constant answer {metric_text(metrics[0], alone)}"),)
    )
    panels = (
        lines("Over training", "epoch", label, by_epoch, percent=percent, marks=marks),
        lines("Over the budget", "ε spent", label, by_epsilon, percent=percent, marks=marks),
    )
    return Figure(
        "accuracy",
        label[:1].upper() + label[1:],
        f"{'Share of test records classified correctly' if percent else f'{label} on test records'}"
        ", by the model that would be handed out at that moment: against passes over the data, and "
        "against the budget spent by then. The best constant answer ignores the image.",
        "test",
        [panel for panel in panels if panel.rows],
        "No accuracy was recorded, or it was left out of a report for publication: with "
        "--public-test-data it stays in.",
        {"y": "shared"},
    )


def of_accuracy(runs: Runs) -> str:
    name = runs[0].metric
    finals = [run.final for run in runs if run.final is not None]
    if not finals:
        return ""
    ending = mean_score(finals, name)
    if len(runs) > 1:
        return f"the {metric_label(name)} ends at {ending}"
    rows = [row for row in runs[0].metrics if row.get(name) is not None]
    top = max(rows, key=lambda row: row[name])
    highest = f"{metric_text(name, top[name])} at epoch {top['epoch']:.3g}"
    more = f", the highest on the way was {highest}" if top[name] > finals[0] else ", its highest"
    return f"the {metric_label(name)} ends at {ending}{more}"


def loss(groups: Sequence[Group]) -> Figure:
    """Training loss over steps."""
    series = curves(groups, _loss)
    return Figure(
        "loss",
        "Training loss",
        "Mean loss on a part of each batch, before the step.",
        "training",
        [lines("", "epoch", "loss", series, zero=True)] if series else (),
        "No training loss was recorded.",
    )


def of_loss(runs: Runs) -> str:
    firsts, lasts, most = [], [], 0
    for run in runs:
        losses = finite(numbers(run.steps, "non_private_loss"))
        most = max(most, len(losses))
        tenth = max(1, len(losses) // 10)
        if losses:
            firsts.append(mean(losses[:tenth]))
            lasts.append(mean(losses[-tenth:]))
    first, last = mean_of(firsts, "{:.3g}"), mean_of(lasts, "{:.3g}")
    if most == 1:
        return f"the loss was recorded once, {first}"
    return first and f"the loss goes from {first} to {last}, means of a tenth of the steps each"


def _loss(run: Run) -> tuple[Numbers, Numbers]:
    rows = tuple(row for row in run.steps if row.get("non_private_loss") is not None)
    return epochs(run, rows), numbers(rows, "non_private_loss")
