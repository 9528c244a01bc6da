"""Figures of the bias that clipping causes. All of them are not private.

A row is one line of ``non-private/bias.jsonl``; names are those of
:class:`dpbam.bias.record.BiasRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpbam.report.figure import Figure
from dpbam.report.groups import Group, curves, numbers
from dpbam.report.panels import Arrow, Arrows, Lines, Numbers, Series
from dpbam.report.records import Rows, Run

PLAIN, OWN = "non_private_against_plain", "non_private_against_own"
BEST = "best"
NOT_MEASURED = (
    "The bias was not measured in this run. Train with --measure-bias every=10 to record it."
)
NOTHING = 1e-6  # of |ĝ|: no bias to take apart
SHORT = 0.25  # of |ĝ|: a g_clip below it is hard to see beside ĝ
CORNER, ENLARGED = (0.5, 0.2), 0.42  # where it is drawn again, and how long
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


def decomposition(groups: Sequence[Group]) -> Figure:
    """The paper's Figure 7 with the run's own numbers."""
    return Figure(
        "decomposition",
        "The bias taken apart",
        "The paper's Figure 7, drawn to scale from this training's last tenth: ĝ has length 1, "
        "g_clip = a ĝ + c, and the bias is (a − 1) ĝ, an error of length, plus c, an error of "
        "direction. Dots: where g_clip ended earlier in training. A short g_clip is drawn again, "
        "enlarged. Numbers: also the share of direction in the squared bias, and of noise in the "
        "squared error.",
        about="training",
        panels=[p for g in groups if (p := _decomposed(g)) is not None],
        missing="Nothing was clipped, so there is no bias to take apart."
        if any(run.bias for g in groups for run in g.runs)
        else NOT_MEASURED,
        wide=True,
    )


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
                points.setdefault(float(run.config["batch_size"]), []).append(_mean(found))
        if len(points) > 1:
            sizes = tuple(sorted(points))
            means = tuple(_mean(points[s]) for s in sizes)
            series.append(Series(method, colour, sizes, means, style="points"))
    return tuple(series)


def _decomposed(group: Group) -> Arrows | None:
    """One group's panel, in units of |ĝ|; x along ĝ, y along c."""
    runs = [run for run in group.runs if run.bias]
    if not runs or not has(runs[0], reading := best(runs[0])):
        return None
    end = [row[reading] for run in runs for row in _last(run.bias) if row.get(reading)]
    a, c = _mean(numbers(end, "a")), _mean(_c_ratio(end))
    if not math.hypot(a - 1, c) > NOTHING:  # nothing was clipped, or nothing was left
        return None
    cosine = _mean(numbers(end, "cosine"))
    share, noise_share = _mean(numbers(end, "direction_share")), _mean(numbers(end, "noise_share"))
    first = [row[reading] for row in runs[0].bias if row.get(reading)]
    trail = tuple(zip(numbers(first, "a"), _c_ratio(first), strict=True))
    reach = [p for p in trail if all(map(math.isfinite, p))]
    notes = (
        ("a", f"{a:.2f}"),
        ("|c| / |ĝ|", f"{c:.2f}"),
        ("|bias| / |ĝ|", f"{math.hypot(a - 1, c):.2f}"),
        ("cosine", f"{cosine:.2f}"),
        ("direction", f"{share:.0%}"),
        ("noise", f"{noise_share:.0%}"),
    )
    arrows = _figure_seven(a, c)
    top = 1.12 * max([0.3, *(arrow.end[1] for arrow in arrows), *(p[1] for p in reach)])
    left = min([-0.04, *(p[0] for p in reach)])
    return Arrows(
        group.label if reading == PLAIN else f"{group.label} (against its own gradient)",
        arrows,
        trail=tuple(reach),
        colour=group.colour,
        notes=notes,
        bounds=(left, -0.14, max([1.16, *(p[0] for p in reach)]), top),
    )


def _figure_seven(a: float, c: float) -> tuple[Arrow, ...]:
    """The paper's drawing; a short g_clip is drawn once more, enlarged, where there is room."""
    short = math.hypot(a, c) < SHORT
    whole = (
        Arrow("ĝ", "gradient", (0.0, 0.0), (1.0, 0.0)),
        Arrow("(a − 1) ĝ", "magnitude", (1.0, 0.0), (a, 0.0), side="left"),
        Arrow("" if short else "c", "direction", (a, 0.0), (a, c), side="right"),
        Arrow("" if short else "g clip", "clipped", (0.0, 0.0), (a, c), side="left"),
        Arrow("bias", "bias", (1.0, 0.0), (a, c), side="right"),
    )
    return whole + _enlarged(a, c) if short else whole


def _enlarged(a: float, c: float) -> tuple[Arrow, ...]:
    times = max(2, round(ENLARGED / math.hypot(a, c)))
    x, y = CORNER
    corner, tip = (x + times * a, y), (x + times * a, y + times * c)
    return (
        Arrow("", "gradient", CORNER, corner, again=True),
        Arrow("c", "direction", corner, tip, side="right", again=True),
        Arrow(f"g clip, {times}×", "clipped", CORNER, tip, side="left", again=True),
    )


def _c_ratio(rows: Sequence[dict[str, Any]]) -> Numbers:
    lengths = zip(numbers(rows, "c_norm"), numbers(rows, "reference_norm"), strict=True)
    return tuple(c / r if r else math.nan for c, r in lengths)


def _last(rows: Rows) -> Rows:
    return rows[-max(1, round(LAST_PART * len(rows))) :]


def _mean(values: Sequence[float]) -> float:
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
    value = _mean(numbers(_last(run.bias), *path)) if run.bias else math.nan
    return value if math.isfinite(value) else None
