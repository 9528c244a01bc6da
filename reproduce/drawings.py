"""The paper's own drawings: Figures 1 and 7 (vectors), 4 (alignment), 5 and 6 (batch size)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dpbam.app.report.charts import Numbers, Series, lines, quantity, text
from dpbam.app.report.figure import COLOURS, Figure, Panel, Row, Spec, mean, rounded
from dpbam.app.report.groups import Group, numbers
from dpbam.app.report.training_figures import (
    NOT_MEASURED,
    PLAIN,
    Reading,
    best,
    has,
    last_part,
    measured,
)

Point = tuple[float, float]

ROLES = {
    "gradient": "#2f6fb5", "clipped": "#35a3cf", "bias": "#d0443a", "magnitude": "#d2801c",
    "direction": "#a8489a", "sample": "#7d8894", "cut": "currentColor",
}  # fmt: skip
HEAD = 11.0  # pixels
LABEL_SIZE, LABEL_GAP = 11, 8  # of an axis, pixels: its font, and what is between label and axis
NARROW, WIDE = frozenset(" '!(),-./:;IJ[\\]fijlt|"), frozenset("#%&+<=>@MW^mw~")
TRAIL = 60  # most points of it


class Arrow(NamedTuple):
    """One vector.

    ``role`` is one of :data:`ROLES`. ``side`` is where its label is, as seen along the arrow:
    "left", "right" or "end". An arrow that is drawn ``again``, enlarged, is not in the CSV file.
    """

    label: str
    role: str
    start: Point
    end: Point
    side: str = "end"
    again: bool = False


class Scene(NamedTuple):
    """What one panel shows, x and y to the same scale.

    Attributes:
        title: of the panel.
        arrows: the vectors.
        circle: radius of a circle around the origin (the clipping norm); 0 for none.
        trail: earlier positions of the clipped gradient's tip, oldest first.
        colour: of the trail, an index into the palette.
        notes: short facts, three per line.
    """

    title: str
    arrows: Sequence[Arrow]
    circle: float = 0.0
    trail: Sequence[Point] = ()
    colour: int = 0
    notes: Sequence[str] = ()


def with_zero_line(panel: Panel) -> Panel:
    """Return the panel of dots with a dashed line at zero, and room for its names in any font."""
    at_zero = {"x": {"datum": 0, "type": "quantitative"}, "y": {"value": 0},
               "y2": {"value": "height"}, "yOffset": {"value": 0},
               "color": {"value": "currentColor"}}  # fmt: skip
    dashed = {"type": "rule", "strokeDash": [5, 4], "opacity": 0.6}
    line = {"data": {"values": [{}]}, "mark": dashed, "encoding": at_zero}
    # the reader's font may be wider than the one that Vega measures when it draws the file
    room = max((text_width(row["category"]) for row in panel.rows), default=0.0)
    axis = {"labelLimit": 400, "minExtent": math.ceil(LABEL_SIZE * room) + LABEL_GAP}
    names = {**panel.view["encoding"]["y"], "axis": axis}
    view = {
        **panel.view,
        "encoding": {**panel.view["encoding"], "y": names},
        "layer": [*panel.view["layer"], line],
    }
    return replace(panel, view=view)


def text_width(words: str) -> float:
    """Return the width of a text in DejaVu Sans, one of the widest fonts, in font sizes, or more.

    Example:
        >>> round(text_width("ill"), 2), round(text_width("MLP, 8x8"), 2)
        (1.2, 5.38)
    """
    return sum(0.4 if c in NARROW else 1.0 if c in WIDE else 0.8 if c.isupper() else 0.66
               for c in words)  # fmt: skip


def arrow_panels(scenes: Sequence[Scene]) -> list[Panel]:
    """Every scene as a panel, all to one scale."""
    if not scenes:
        return []
    points = [point for scene in scenes for point in _points(scene)]
    (left, right), (bottom, top) = ((min(v), max(v)) for v in zip(*points, strict=True))
    room = 0.1 * max(right - left, top - bottom)  # for labels
    across, upwards = [left - room, right + room], [bottom - room, top + room]
    side = 430 if len(scenes) == 1 else 320
    unit = side / max(across[1] - across[0], upwards[1] - upwards[0])
    return [_panel(scene, across, upwards, unit) for scene in scenes]


def _points(scene: Scene) -> list[Point]:
    """Everything that must be seen."""
    edge = [(-scene.circle, -scene.circle), (scene.circle, scene.circle)]
    return [*edge, *scene.trail, *(point for a in scene.arrows for point in (a.start, a.end))]


def _panel(scene: Scene, across: list[float], upwards: list[float], unit: float) -> Panel:
    height = unit * (upwards[1] - upwards[0])
    roles = {"domain": list(ROLES), "range": list(ROLES.values())}
    view = {
        "width": unit * (across[1] - across[0]),
        "height": height,
        "data": {"values": _values(scene, unit)},
        "encoding": {
            "x": quantity("x_from", scale={"domain": across, "nice": False}, axis=None),
            "y": quantity("y_from", scale={"domain": upwards, "nice": False}, axis=None),
            "color": text("role", scale=roles, legend=None),
        },
        "layer": [*_vectors(), *_circle(scene), *_trail(scene), *_notes(scene, height)],
    }
    rows = [_row(scene, arrow) for arrow in scene.arrows if not arrow.again]
    return Panel(scene.title, tuple(rows[0]), rows, view)


def _row(scene: Scene, arrow: Arrow) -> Row:
    (x0, y0), (x1, y1) = arrow.start, arrow.end
    return {"panel": scene.title, "vector": arrow.role, "x_from": x0, "y_from": y0, "x_to": x1,
            "y_to": y1}  # fmt: skip


def _vectors() -> list[Spec]:
    """Shafts, heads and labels of the arrows."""
    head = {"type": "point", "shape": "M0,0L-0.42,1L0.42,1Z", "filled": True, "opacity": 1}
    label = {"type": "text", "fontSize": 13, "fontWeight": "bold"}
    shape = {"angle": quantity("angle", scale=None), "size": quantity("size", scale=None)}
    return [
        {"mark": {"type": "rule", "strokeWidth": 2.5},
         "encoding": {"x2": {"field": "x2"}, "y2": {"field": "y2"}}},
        {"mark": head,
         "encoding": {"x": quantity("x_to"), "y": quantity("y_to"), **shape,
                      "tooltip": [text("role"), quantity("length")]}},
        {"mark": label,
         "encoding": {"x": quantity("label_x"), "y": quantity("label_y"), "text": text("label")}},
    ]  # fmt: skip


def _values(scene: Scene, unit: float) -> list[Row]:
    """The arrows; those of the CSV file have its columns."""
    values = []
    for arrow in scene.arrows:
        row: Row = {"role": arrow.role, "label": arrow.label}
        row |= {name: rounded(value) for name, value in _geometry(arrow, unit).items()}
        listed = {} if arrow.again else {"panel": scene.title, "vector": arrow.role}
        values.append(row | listed)
    return values


def _geometry(arrow: Arrow, unit: float) -> dict[str, float]:
    """Shaft, head and label of an arrow; ``unit`` pixels are one of the plane's units."""
    (x0, y0), (x1, y1) = arrow.start, arrow.end
    length = math.dist(arrow.start, arrow.end)
    ux, uy = ((x1 - x0) / length, (y1 - y0) / length) if length else (0.0, 0.0)
    head = min(HEAD, 0.6 * length * unit)
    label_x, label_y = _label_place(arrow, (ux, uy), unit)
    return {
        "x_from": x0, "y_from": y0, "x_to": x1, "y_to": y1, "length": length,
        "x2": x1 - ux * 0.8 * head / unit, "y2": y1 - uy * 0.8 * head / unit,
        "size": (2 * head) ** 2, "angle": math.degrees(math.atan2(ux, uy)),
        "label_x": label_x, "label_y": label_y,
    }  # fmt: skip


def _label_place(arrow: Arrow, along: Point, unit: float) -> Point:
    """Next to the arrow, or beyond its end."""
    (x0, y0), (x1, y1), (ux, uy) = arrow.start, arrow.end, along
    half_width = 8 + 3.5 * len(arrow.label)  # half the label, pixels
    if arrow.side == "end":
        return (x1 + ux * half_width / unit, y1 + uy * 12 / unit)
    sign = 1 if arrow.side == "left" else -1
    x, y = x0 + 0.6 * (x1 - x0), y0 + 0.6 * (y1 - y0)
    return (x - uy * sign * half_width / unit, y + ux * sign * 12 / unit)


def _notes(scene: Scene, height: float) -> list[Spec]:
    """Facts below the panel."""
    return [
        {
            "data": {"values": [{"note": "  ·  ".join(scene.notes[k : k + 3])}]},
            "mark": {"type": "text", "align": "left", "fontSize": 12},
            "encoding": {"x": {"value": 0}, "y": {"value": height + 14 + 6 * k},
                         "text": text("note"), "color": {"value": "currentColor"}},
        }
        for k in range(0, len(scene.notes), 3)
    ]  # fmt: skip


def _circle(scene: Scene) -> list[Spec]:
    if not scene.circle:
        return []
    angles = {"start": 0, "stop": 2 * math.pi + 0.1, "step": math.pi / 48, "as": "t"}
    return [{
        "data": {"sequence": angles},
        "transform": [{"calculate": f"{scene.circle} * cos(datum.t)", "as": "x"},
                      {"calculate": f"{scene.circle} * sin(datum.t)", "as": "y"}],
        "mark": {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1, "opacity": 0.6},
        "encoding": {"x": quantity("x"), "y": quantity("y"), "order": quantity("t"),
                     "color": {"value": "currentColor"}},
    }]  # fmt: skip


def _trail(scene: Scene) -> list[Spec]:
    if not scene.trail:
        return []
    shown = scene.trail[:: math.ceil(len(scene.trail) / TRAIL)]
    colour = COLOURS[scene.colour % len(COLOURS)]
    return [{
        "data": {"values": [{"x": rounded(x), "y": rounded(y)} for x, y in shown]},
        "mark": {"type": "circle", "size": 18, "opacity": 0.35},
        "encoding": {"x": quantity("x"), "y": quantity("y"), "color": {"value": colour}},
    }]  # fmt: skip


G1: Point = (1.22, 2.0)
G2: Point = (-0.97, 0.24)
C = 1.0
NOTHING = 1e-6  # of |ĝ|: no bias to decompose
SHORT = 0.25  # of |ĝ|: a g_clip below it is hard to see next to ĝ
CORNER, ENLARGED = (0.5, 0.2), 0.42  # where it is drawn again, and how long
ORIGIN: Point = (0.0, 0.0)


def clipping(groups: Sequence[Group] = ()) -> Figure:
    """Two gradients, the clipping norm, both means and the bias between them; takes no run."""
    return Figure(
        "clipping",
        "What clipping does",
        "Two gradients, clipped to length C, and the means before and after: the difference is a "
        "bias that no averaging removes. Where C exceeds both lengths, nothing is clipped and "
        "there is no bias. The paper's Figure 1.",
        "public",
        arrow_panels([clipped_at(C)]),
    )


def clipped_at(c: float) -> Scene:
    """Return the two gradients clipped to length ``c``."""
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
    return Scene("", arrows, circle=c, notes=notes)


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


#: The paper's Figure 4.
alignment = measured(
    "alignment", "Alignment of the ascent step",
    "Cosine of the direction that the method ascends along with the current batch gradient, SAM's "
    "direction: the previous private gradient for DP-SAT, the mean over samples for BAM.",
    Reading("", "cosine", "non_private_alignment", marks=((0.0, "no alignment"),)),
    otherwise="Only DP-SAT and BAM ascend; DP-SAT needs one more pass to measure it: see dpbam "
    "bias RUN.",
)  # fmt: skip

BY_BATCH_SIZE = {
    "bias": ("Bias", "mean length of the bias vector"),
    "cosine": ("Direction", "mean cosine of ĝ clipped and ĝ"),
}


def batch_size(groups: Sequence[Group]) -> Figure:
    """The paper's Figures 5 and 6: bias and cosine against the batch size."""
    panels = [
        lines(title, "expected batch size", label, series, zero=key == "bias", log_x=True)
        for key, (title, label) in BY_BATCH_SIZE.items()
        if (series := _by_batch_size(groups, key))
    ]
    return Figure(
        "batch-size",
        "Effect of the batch size",
        "Averages over training, one point per run. The paper's Figures 5 and 6.",
        "training",
        panels,
        "This needs measured runs of at least two batch sizes: train again with another "
        "--batch-size, and name all runs.",
    )


def _by_batch_size(groups: Sequence[Group], key: str) -> list[Series]:
    """One curve per method: the mean over training and runs at each batch size."""
    series = []
    for colour, method in enumerate(dict.fromkeys(g.runs[0].method for g in groups)):
        points: dict[float, list[float]] = {}
        for run in (r for g in groups for r in g.runs if r.method == method and r.bias):
            value = mean(numbers(run.bias, best(run), key))
            if math.isfinite(value):
                points.setdefault(float(str(run.config["batch_size"])), []).append(value)
        if len(points) > 1:
            sizes = tuple(sorted(points))
            means = tuple(mean(points[size]) for size in sizes)
            series.append(Series(method, colour, sizes, means, style="points"))
    return series
