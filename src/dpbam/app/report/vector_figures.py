"""The paper's drawings of vectors: Figure 1, from no data, and Figure 7 of a run's own numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpbam.app.report.arrows import Arrow, Point, Scene, arrow_panels, clipping_norm
from dpbam.app.report.bias_figures import NOT_MEASURED, PLAIN, best, has, last_part
from dpbam.app.report.charts import Numbers
from dpbam.app.report.figure import Figure, mean
from dpbam.app.report.groups import Group, numbers

G1: Point = (1.22, 2.0)
G2: Point = (-0.97, 0.24)
C = 1.0
CHOICES = tuple(k / 10 for k in range(2, 25))  # of C, on the page's slider
NOTHING = 1e-6  # of |ĝ|: no bias to decompose
SHORT = 0.25  # of |ĝ|: a g_clip below it is hard to see next to ĝ
CORNER, ENLARGED = (0.5, 0.2), 0.42  # where it is drawn again, and how long
ORIGIN: Point = (0.0, 0.0)


def clipping(groups: Sequence[Group] = ()) -> Figure:
    """Two gradients, the clipping norm, both means and the bias between them; takes no run."""
    scene = _clipped_at(C, tuple(_clipped_at(c) for c in CHOICES))
    return Figure(
        "clipping",
        "What clipping does",
        "Two gradients, clipped to length C, and the means before and after: the difference is a "
        "bias that no averaging removes. Where C exceeds both lengths, nothing is clipped and "
        "there is no bias. The paper's Figure 1.",
        "public",
        arrow_panels([scene]),
        params=[clipping_norm(scene)],
    )


def _clipped_at(c: float, choices: tuple[Scene, ...] = ()) -> Scene:
    k1, k2 = clip(G1, c), clip(G2, c)
    plain, clipped = _middle(G1, G2), _middle(k1, k2)
    arrows = (
        Arrow("g₁", "sample", ORIGIN, G1),
        Arrow("g₂", "sample", ORIGIN, G2),
        Arrow("", "cut", ORIGIN, k1),
        Arrow("", "cut", ORIGIN, k2),
        Arrow("ĝ", "gradient", ORIGIN, plain),
        Arrow("g clip", "clipped", ORIGIN, clipped, side="left"),
        Arrow("bias", "bias", plain, clipped, side="right"),
    )
    bound = sum(max(0.0, math.hypot(*g) - c) for g in (G1, G2)) / 2
    notes = (
        f"|bias| {math.dist(plain, clipped):.2f}",
        f"its bound ½ Σ max(0, |gᵢ| − C) {bound:.2f}",
        f"C {c:g}",
    )
    return Scene("", arrows, circle=c, notes=notes, choices=choices)


def clip(g: Point, c: float) -> Point:
    """g / max(1, |g| / C).

    Example:
        >>> clip((3.0, 4.0), 1.0)
        (0.6, 0.8)
    """
    m = max(1.0, math.hypot(*g) / c)
    return (g[0] / m, g[1] / m)


def _middle(u: Point, v: Point) -> Point:
    return ((u[0] + v[0]) / 2, (u[1] + v[1]) / 2)


def decomposition(groups: Sequence[Group]) -> Figure:
    """The paper's Figure 7 with the run's own numbers. Not to be shared."""
    scenes = [scene for g in groups if (scene := _decomposed(g)) is not None]
    return Figure(
        "decomposition",
        "Decomposition of the bias",
        "The paper's Figure 7, drawn to scale from the last tenth of training: ĝ has length 1, "
        "g_clip = a ĝ + c, and the bias is (a − 1) ĝ, an error of length, plus c, an error of "
        "direction. Dots: where g_clip ended earlier in training. A short g_clip is drawn again, "
        "enlarged. Numbers: also the share of direction in the squared bias, and of noise in the "
        "squared error.",
        "training",
        arrow_panels(scenes),
        "Nothing was clipped, so there is no bias to decompose."
        if any(run.bias for g in groups for run in g.runs)
        else NOT_MEASURED,
        params=[clipping_norm(scene) for scene in scenes[:1]],
    )


def _decomposed(group: Group) -> Scene | None:
    """One group's panel, in units of |ĝ|; x along ĝ, y along c."""
    runs = [run for run in group.runs if run.bias]
    if not runs or not has(runs[0], reading := best(runs[0])):
        return None
    end = [row[reading] for run in runs for row in last_part(run.bias) if row.get(reading)]
    a, c = mean(numbers(end, "a")), mean(_c_ratio(end))
    if not math.hypot(a - 1, c) > NOTHING:  # nothing was clipped, or nothing was left
        return None
    first = [row[reading] for row in runs[0].bias if row.get(reading)]
    trail = zip(numbers(first, "a"), _c_ratio(first), strict=True)
    notes = (
        f"a {a:.2f}",
        f"|c| / |ĝ| {c:.2f}",
        f"|bias| / |ĝ| {math.hypot(a - 1, c):.2f}",
        f"cosine {mean(numbers(end, 'cosine')):.2f}",
        f"direction {mean(numbers(end, 'direction_share')):.0%}",
        f"noise {mean(numbers(end, 'noise_share')):.0%}",
    )
    return Scene(
        group.label if reading == PLAIN else f"{group.label} (against its own gradient)",
        _figure_seven(a, c),
        trail=tuple(p for p in trail if all(map(math.isfinite, p))),
        colour=group.colour,
        notes=notes,
    )


def _figure_seven(a: float, c: float) -> tuple[Arrow, ...]:
    """The paper's drawing; a short g_clip is drawn once more, enlarged, where there is room."""
    short = math.hypot(a, c) < SHORT
    whole = (
        Arrow("ĝ", "gradient", ORIGIN, (1.0, 0.0)),
        Arrow("(a − 1) ĝ", "magnitude", (1.0, 0.0), (a, 0.0), side="left"),
        Arrow("" if short else "c", "direction", (a, 0.0), (a, c), side="right"),
        Arrow("" if short else "g clip", "clipped", ORIGIN, (a, c), side="left"),
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
