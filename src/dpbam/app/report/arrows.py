"""Panels of vectors in the plane: the paper's Figures 1 and 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dpbam.app.report.charts import quantity, text
from dpbam.app.report.figure import COLOURS, Panel, Row, Spec, rounded

Point = tuple[float, float]

ROLES = {
    "gradient": "#2f6fb5", "clipped": "#35a3cf", "bias": "#d0443a", "magnitude": "#d2801c",
    "direction": "#a8489a", "sample": "#7d8894", "cut": "currentColor",
}  # fmt: skip
HEAD = 11.0  # pixels
TRAIL = 60  # most points of it
AT_C = [{"filter": "abs(datum.C - C) < 0.001"}]  # what belongs to the chosen clipping norm


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
        choices: the same scene at other clipping norms, for a slider.
    """

    title: str
    arrows: Sequence[Arrow]
    circle: float = 0.0
    trail: Sequence[Point] = ()
    colour: int = 0
    notes: Sequence[str] = ()
    choices: Sequence[Scene] = ()


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
    """Everything that must be seen, at any clipping norm."""
    every = [a for s in (scene, *scene.choices) for a in s.arrows]
    edge = [(-scene.circle, -scene.circle), (scene.circle, scene.circle)]
    return [*edge, *scene.trail, *(point for a in every for point in (a.start, a.end))]


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


def clipping_norm(scene: Scene) -> Spec:
    """The parameter C, with a slider where there are several to choose from."""
    norms = [s.circle for s in scene.choices]
    if not norms:
        return {"name": "C", "value": scene.circle}
    slider = {"input": "range", "min": norms[0], "max": norms[-1],
              "step": rounded(norms[1] - norms[0]), "name": "clipping norm C "}  # fmt: skip
    return {"name": "C", "value": scene.circle, "bind": slider}


def _vectors() -> list[Spec]:
    """Shafts, heads and labels of the arrows."""
    head = {"type": "point", "shape": "M0,0L-0.42,1L0.42,1Z", "filled": True, "opacity": 1}
    label = {"type": "text", "fontSize": 13, "fontWeight": "bold"}
    shape = {"angle": quantity("angle", scale=None), "size": quantity("size", scale=None)}
    return [
        {"transform": AT_C, "mark": {"type": "rule", "strokeWidth": 2.5},
         "encoding": {"x2": {"field": "x2"}, "y2": {"field": "y2"}}},
        {"transform": AT_C, "mark": head,
         "encoding": {"x": quantity("x_to"), "y": quantity("y_to"), **shape,
                      "tooltip": [text("role"), quantity("length")]}},
        {"transform": AT_C, "mark": label,
         "encoding": {"x": quantity("label_x"), "y": quantity("label_y"), "text": text("label")}},
    ]  # fmt: skip


def _values(scene: Scene, unit: float) -> list[Row]:
    """The arrows at every clipping norm; those of the CSV file have its columns."""
    found = []
    for s in scene.choices or (scene,):
        for arrow in s.arrows:
            row = {"C": s.circle, "role": arrow.role, "label": arrow.label}
            row |= {name: rounded(value) for name, value in _geometry(arrow, unit).items()}
            listed = s.circle == scene.circle and not arrow.again
            found.append(row | {"panel": scene.title, "vector": arrow.role} if listed else row)
    return found


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
    wide = 8 + 3.5 * len(arrow.label)  # half the label, pixels
    if arrow.side == "end":
        return (x1 + ux * wide / unit, y1 + uy * 12 / unit)
    sign = 1 if arrow.side == "left" else -1
    x, y = x0 + 0.6 * (x1 - x0), y0 + 0.6 * (y1 - y0)
    return (x - uy * sign * wide / unit, y + ux * sign * 12 / unit)


def _notes(scene: Scene, height: float) -> list[Spec]:
    """Facts below the panel."""
    return [
        {
            "data": {"values": [{"C": s.circle, "note": "  ·  ".join(s.notes[k : k + 3])}
                                for s in scene.choices or (scene,)]},
            "transform": AT_C,
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
        "transform": [{"calculate": "C * cos(datum.t)", "as": "x"},
                      {"calculate": "C * sin(datum.t)", "as": "y"}],
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
