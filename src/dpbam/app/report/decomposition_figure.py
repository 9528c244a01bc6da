"""The paper's Figure 7 with a run's own numbers: the bias as length and direction. Not private."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpbam.app.report.bias_figures import NOT_MEASURED, PLAIN, best, has, last_part, mean
from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group, numbers
from dpbam.app.report.panels import Arrow, Arrows, Numbers

NOTHING = 1e-6  # of |ĝ|: no bias to take apart
SHORT = 0.25  # of |ĝ|: a g_clip below it is hard to see beside ĝ
CORNER, ENLARGED = (0.5, 0.2), 0.42  # where it is drawn again, and how long


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


def _decomposed(group: Group) -> Arrows | None:
    """One group's panel, in units of |ĝ|; x along ĝ, y along c."""
    runs = [run for run in group.runs if run.bias]
    if not runs or not has(runs[0], reading := best(runs[0])):
        return None
    end = [row[reading] for run in runs for row in last_part(run.bias) if row.get(reading)]
    a, c = mean(numbers(end, "a")), mean(_c_ratio(end))
    if not math.hypot(a - 1, c) > NOTHING:  # nothing was clipped, or nothing was left
        return None
    cosine = mean(numbers(end, "cosine"))
    share, noise_share = mean(numbers(end, "direction_share")), mean(numbers(end, "noise_share"))
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
