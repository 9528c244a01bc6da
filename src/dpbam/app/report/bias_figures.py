"""Figures of the bias that clipping causes. All of them are not private.

A row is one line of ``non-private/bias.jsonl``; names are those of
:class:`dpbam.bias.record.BiasRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group, curves, numbers
from dpbam.app.report.panels import Lines, Numbers, Series
from dpbam.app.report.records import Rows, Run

PLAIN, OWN = "non_private_against_plain", "non_private_against_own"
BEST = "best"
NOT_MEASURED = (
    "The bias was not measured in this run. Train with --measure-bias every=10 to record it."
)
LAST_PART = 0.1  # the end of training: the last tenth of the measured steps


def epochs(run: Run, rows: Rows) -> Numbers:
    """Expected passes over the data at each row's step: step * q."""
    q = run.statement.get("sampling_rate") or math.nan
    return tuple(step * float(q) for step in numbers(rows, "step"))


def has(run: Run, reading: str) -> bool:
    """Whether the run was measured so. DP-SAT's first step, which is plain, does not count."""
    return bool(run.bias and run.bias[-1].get(reading))


def best(run: Run) -> str:
    """The paper's reading where the run has it, else the method's own."""
    return PLAIN if has(run, PLAIN) else OWN


def over_training(groups: Sequence[Group], *path: str) -> tuple[Series, ...]:
    """Curves of one recorded number; runs that have none of it are left out.

    A path that begins with :data:`BEST` takes each run's best reading.
    """

    def points(run: Run) -> tuple[Numbers, Numbers]:
        first, *rest = path
        first = best(run) if first == BEST else first
        y = numbers(run.bias, first, *rest)
        lacking = first == PLAIN and not has(run, PLAIN)
        return ((), ()) if lacking or not any(map(math.isfinite, y)) else (epochs(run, run.bias), y)

    return curves(groups, points)


def bias(groups: Sequence[Group]) -> Figure:
    """The paper's Figure 2, in both readings."""
    panels = [
        Lines(title, "epoch", "length of the bias vector", over_training(groups, reading, "bias"),
              zero=True)
        for reading, title in (
            (PLAIN, "Against the plain batch gradient"),
            (OWN, "Against the method's own gradient"),
        )
    ]  # fmt: skip
    return Figure(
        "bias",
        "Bias of the clipped gradient",
        "Length of g_clip − ĝ over training, in two readings: ĝ is the plain batch gradient, the "
        "paper's definition, or what the method itself would use without clipping."
        + _own_only(groups),
        about="training",
        panels=[p for p in panels if p.series],
        missing=NOT_MEASURED,
        wide=True,
    )


def relative(groups: Sequence[Group]) -> Figure:
    """The bias over the gradient's length."""
    return _single(
        groups, "relative-bias", "Bias relative to the gradient",
        "Length of the bias over the length of ĝ: at 100% the error is as long as the gradient.",
        "bias / gradient length", BEST, "relative_bias", percent=True, zero=True,
    )  # fmt: skip


def direction(groups: Sequence[Group]) -> Figure:
    """Cosine of clipped and unclipped gradient, and which kind of error dominates."""
    panels = (
        Lines("Cosine with the unclipped gradient", "epoch", "cosine of ĝ clipped and ĝ",
              over_training(groups, BEST, "cosine")),
        Lines("Share of direction in the squared bias", "epoch", "|c|² / |bias|²",
              over_training(groups, BEST, "direction_share"), percent=True, zero=True),
    )  # fmt: skip
    return Figure(
        "direction",
        "Direction or length?",
        "A cosine of 1 means that clipping only shortens the gradient, which a learning rate can "
        "make good. The share of direction is what it cannot." + _own_only(groups),
        about="training",
        panels=[p for p in panels if p.series],
        missing=NOT_MEASURED,
        same_scale=False,
        wide=True,
    )


def noise(groups: Sequence[Group]) -> Figure:
    """Bias against variance."""
    panels = (
        Lines("Share of the noise in the squared error", "epoch", "variance / (variance + bias²)",
              over_training(groups, BEST, "noise_share"), percent=True, zero=True),
        Lines("What is left of the direction", "epoch", "cosine of the released gradient and ĝ",
              over_training(groups, BEST, "private_cosine")),
    )  # fmt: skip
    return Figure(
        "noise",
        "Bias or noise?",
        "Above one half the noise dominates and less bias gains little; below it the bias does. "
        "The cosine is that of the gradient as released, noise included." + _own_only(groups),
        about="training",
        panels=[p for p in panels if p.series],
        missing=NOT_MEASURED,
        same_scale=False,
        wide=True,
    )


def alignment(groups: Sequence[Group]) -> Figure:
    """The paper's Figure 4."""
    series = over_training(groups, "non_private_alignment")
    return Figure(
        "alignment",
        "Alignment of the ascent step",
        "Cosine of the direction that the method ascends along with the current batch gradient, "
        "SAM's direction: the previous private gradient for DP-SAT, the mean over samples for BAM.",
        about="training",
        panels=[Lines("", "epoch", "cosine", series, marks=((0.0, "no alignment"),))]
        if series
        else (),
        missing="Only DP-SAT and BAM ascend; of DP-SAT it takes a pass more: see dpbam bias RUN."
        if any(g.runs[0].bias for g in groups)
        else NOT_MEASURED,
    )


def flatness(groups: Sequence[Group]) -> Figure:
    """Appendix C's bound: how far L_BAO lies above L_Z."""
    return _single(
        groups, "flatness", "Slack of the flatness bound",
        "L_BAO − L_Z = λ (mean of the norms − norm of the mean): never negative, and small where "
        "minimising BAM's objective also minimises the flatness objective.",
        "L_BAO − L_Z", "non_private_flatness_slack", zero=True,
    )  # fmt: skip


def batch_size(groups: Sequence[Group]) -> Figure:
    """The paper's Figures 5 and 6: bias and cosine against the batch size."""
    methods = list(dict.fromkeys(g.runs[0].method for g in groups))
    panels = [
        Lines(title, "expected batch size", label, _by_batch_size(groups, methods, key),
              log_x=True, zero=key == "bias")
        for key, title, label in (
            ("bias", "Bias", "mean length of the bias vector"),
            ("cosine", "Direction", "mean cosine of ĝ clipped and ĝ"),
        )
    ]  # fmt: skip
    return Figure(
        "batch-size",
        "Effect of the batch size",
        "Averages over training, one point a run. The paper's Figures 5 and 6.",
        about="training",
        panels=[p for p in panels if p.series],
        missing="This needs measured runs of at least two batch sizes: train again with another "
        "--batch-size, and name all runs.",
        same_scale=False,
        wide=True,
    )


def _own_only(groups: Sequence[Group]) -> str:
    """Which groups lack the paper's reading, as a sentence for a caption."""
    lacking = [g.label for g in groups if has(g.runs[0], OWN) and not has(g.runs[0], PLAIN)]
    if not lacking:
        return ""
    whose = " and ".join(lacking)
    return f" {whose}: against its own gradient alone; the plain one would take another pass."


def _by_batch_size(groups: Sequence[Group], methods: list[str], key: str) -> tuple[Series, ...]:
    series = []
    for colour, method in enumerate(methods):
        points: dict[float, list[float]] = {}
        for run in (r for g in groups for r in g.runs if r.method == method and r.bias):
            found = [v for v in numbers(run.bias, best(run), key) if math.isfinite(v)]
            if found:
                points.setdefault(float(run.config["batch_size"]), []).append(mean(found))
        if len(points) > 1:
            sizes = tuple(sorted(points))
            means = tuple(mean(points[s]) for s in sizes)
            series.append(Series(method, colour, sizes, means, style="points"))
    return tuple(series)


def last_part(rows: Rows) -> Rows:
    """The last tenth of the measured steps, one at least."""
    return rows[-max(1, round(LAST_PART * len(rows))) :]


def mean(values: Sequence[float]) -> float:
    """Over what is finite; NaN of nothing."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _single(
    groups: Sequence[Group], name: str, title: str, caption: str, y_label: str, *path: str,
    percent: bool = False, zero: bool = False,
) -> Figure:  # fmt: skip
    series = over_training(groups, *path)
    panel = Lines("", "epoch", y_label, series, percent=percent, zero=zero)
    return Figure(name, title, caption, "training", [panel] if series else (), NOT_MEASURED)


def last_mean(run: Run, *path: str) -> float | None:
    """The mean of a recorded number over the last tenth of the measured steps; None without."""
    value = mean(numbers(last_part(run.bias), *path)) if run.bias else math.nan
    return value if math.isfinite(value) else None
