"""The kinds of panel: curves, dots with intervals, grids of cells. Each is a Vega-Lite view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dpbam.app.report.figure import Panel, Row, Spec

Numbers = tuple[float, ...]
FADED: Spec = {"condition": {"param": "chosen", "value": 1}, "value": 0.1}
FAINT: Spec = {"condition": {"param": "chosen", "value": 0.35}, "value": 0.05}
#: Along x, with the wheel while Ctrl is held: the wheel alone scrolls the page.
ZOOM: Spec = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey]"},
    "bind": "scales",
}


class Series(NamedTuple):
    """One curve, or one value per category.

    Attributes:
        label: its name.
        colour: index into the palette.
        x: positions, rising; or names of categories.
        y: values, NaN where there is none; empty for a band alone.
        low: lower edge of a band or an interval, or empty.
        high: its upper edge, or empty.
        style: "line", "points" (markers on the line) or "seed" (one run of a group, drawn faintly).
        group: the name in the legend; the label if empty.
    """

    label: str
    colour: int
    x: Sequence[Any]
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    style: str = "line"
    group: str = ""

    def rows(self, title: str, x: str = "x", y: str = "y") -> list[Row]:
        """One row per point."""
        common = {"panel": title, "series": self.label, "group": self.group or self.label,
                  "colour": self.colour, "style": self.style}  # fmt: skip
        columns = {x: self.x, y: self.y, "low": self.low, "high": self.high}
        present = {name: values for name, values in columns.items() if values}
        points = zip(*present.values(), strict=True)
        return [common | dict(zip(present, point, strict=True)) for point in points]


def lines(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, percent: bool = False,
    zero: bool = False, log_x: bool = False, log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (), diagonal: bool = False,
) -> Panel:  # fmt: skip
    """Curves over a common x axis.

    Args:
        title: of the panel; empty where the figure's own title is enough.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        series: the curves.
        percent: y is a share, shown in percent.
        zero: the y axis begins at zero.
        log_x: x on a logarithmic scale, with ticks at the values that there are.
        log_y: y on a logarithmic scale.
        marks: horizontal lines, (value, name).
        diagonal: a dashed line from (0, 0) to (1, 1).
    """
    ticks = {"values": sorted({x for s in series for x in s.x})} if log_x else {"tickCount": 8}
    x = quantity("x", title=x_label, scale=_scale(log_x), axis={**ticks, "grid": False})
    axis = {"tickCount": 6, **({"format": "~%"} if percent else {})}
    y = quantity("y", title=y_label, scale=_scale(log_y, zero), axis=axis)
    tooltip = [text("series", title="curve"), quantity("x", title=x_label),
               quantity("y", title=y_label, format=".3~%" if percent else ".4~g")]  # fmt: skip
    layers = [*_curves(series, y, tooltip), *(layer for m in marks for layer in _across(*m))]
    if diagonal:
        layers.append(_diagonal(0.0, 1.0, y))
    rows = [row for s in series for row in s.rows(title)]
    columns = ("panel", "series", "x", "y", "low", "high")
    return Panel(title, columns, rows, {"encoding": {"x": x}, "layer": layers})


def _curves(series: Sequence[Series], y: Spec, tooltip: list[Spec]) -> list[Spec]:
    """Lines; faint lines of seeds, markers and bands where there are some; points to point at."""
    main, each = "datum.style != 'seed'", text("series")
    styles = {s.style for s in series}
    layers = [{**_layer("line", main, y=y, detail=each, opacity=FADED), "params": [ZOOM]}]
    if "seed" in styles:
        thin = {"opacity": FAINT, "strokeWidth": {"value": 1}}
        layers.append(_layer("line", "datum.style == 'seed'", y=y, detail=each, **thin))
    if "points" in styles:
        layers.append(_layer("circle", "datum.style == 'points'", y=y, size={"value": 45}))
    if any(s.low for s in series):
        band = {"y": {**y, "field": "low"}, "y2": {"field": "high"}, "opacity": {"value": 0.2}}
        layers.append(_layer("area", main, detail=each, **band))
    unseen = {"size": {"value": 90}, "opacity": {"value": 0}}
    return [*layers, _layer("circle", main, y=y, tooltip=tooltip, **unseen)]


def _across(value: float, name: str) -> list[Spec]:
    """A dashed line across the panel with its name."""
    shared = {"y": {"datum": value, "type": "quantitative"}, "color": {"value": "currentColor"}}
    dashed = {"type": "rule", "strokeDash": [5, 4], "opacity": 0.6}
    named = {"type": "text", "align": "left", "dy": -6, "text": name}
    once: Spec = {"data": {"values": [{}]}}
    across = {"x": {"value": 0}, "x2": {"value": "width"}}
    return [
        {**once, "mark": dashed, "encoding": {**shared, **across}},
        {**once, "mark": named, "encoding": {**shared, "x": {"value": 4}}},
    ]


def dots(title: str, x_label: str, series: Sequence[Series], *, percent: bool = True) -> Panel:
    """One value per category with its interval, if there are any, categories from the top."""
    bounds = ("low", "high") if any(math.isfinite(v) for s in series for v in s.low) else ()
    form = {"format": "~%"} if percent else {}
    x = {"title": x_label, "scale": {"zero": False, "padding": 8}, "axis": {**form, "tickCount": 6}}
    tooltip = [text("series", title="run"), text("category"),
               *(quantity(name, **form) for name in ("value", *bounds))]  # fmt: skip
    ends = {"x": quantity("low", **x), "x2": {"field": "high"}}
    view = {
        "width": 330,
        "height": {"step": 22 if len(series) == 1 else 13},
        "encoding": {
            "y": text("category", sort=None, title=None),
            "yOffset": text("series", sort=None),
            "opacity": FADED,
        },
        "layer": [
            *([{"mark": {"type": "rule", "strokeWidth": 2}, "encoding": ends}] if bounds else []),
            {"mark": {"type": "circle", "size": 60},
             "encoding": {"x": quantity("value", **x), "tooltip": tooltip}},
        ],
    }  # fmt: skip
    rows = [row for s in series for row in s.rows(title, "category", "value")]
    return Panel(title, ("panel", "series", "category", "value", "low", "high"), rows, view)


def forest(
    title: str, x_label: str, rows: Sequence[Row], colours: Sequence[str], useful: Sequence[bool]
) -> Panel:
    """Differences with their intervals, one line each from the top, and a dashed line at zero.

    The axis has room for the useful rows: one diverged training would leave the others no width to
    be read in. A triangle at the edge points to what lies outside, with its value.

    Args:
        title: of the panel.
        x_label: what is different, with its unit.
        rows: "setting", "difference", "low" and "high" each; NaN bounds draw no interval.
        colours: of the rows.
        useful: which rows decide how far the axis reaches; if none does, all do.
    """
    least, most = _reach([row for row, use in zip(rows, useful, strict=True) if use] or rows)
    reach: Spec = {"domain": [least, most], "nice": False, "clamp": True}
    x: Spec = {"title": x_label, "scale": reach, "axis": {"tickCount": 6}}
    scale = {"domain": [row["setting"] for row in rows], "range": list(colours)}
    # one seed has no interval, and a tooltip would show its bounds as null
    bounds = ("low", "high") if any(math.isfinite(row["low"]) for row in rows) else ()
    tooltip = [
        text("setting"),
        *(quantity(k, format="+.3~g") for k in ("difference", *bounds)),
    ]
    dashed = {"type": "rule", "strokeDash": [5, 4], "opacity": 0.6}
    at_zero = {"x": {"datum": 0, "type": "quantitative"}, "color": {"value": "currentColor"}}
    height = {"y": {"value": 0}, "y2": {"value": "height"}}
    zero = {"data": {"values": [{}]}, "mark": dashed, "encoding": {**at_zero, **height}}
    ends = {"x": quantity("low", **x), "x2": {"field": "high"}}
    names = text("setting", sort=None, title=None, axis={"labelFontSize": 13, "ticks": False})
    middle = {"x": quantity("difference", **x), "tooltip": tooltip}
    layers: list[Spec] = [
        {"mark": {"type": "rule", "strokeWidth": 3}, "encoding": ends},
        {
            **_layer("circle", f"datum.difference >= {least} && datum.difference <= {most}"),
            "mark": {"type": "circle", "size": 140, "opacity": 1},
            "encoding": middle,
        },
        zero,
    ]
    sides = (("left", "low", f"< {least}", least, 9), ("right", "high", f"> {most}", most, -9))
    for side, bound, beyond, edge, inwards in sides:
        at_edge: Spec = {"x": {"datum": edge, "type": "quantitative"}, "tooltip": tooltip}
        arrow = {"type": "point", "shape": f"triangle-{side}", "size": 160, "filled": True,
                 "opacity": 1, "xOffset": inwards}  # fmt: skip
        value = {"type": "text", "align": side, "dx": 2 * inwards, "fontSize": 12}
        outside = f"datum.difference {beyond}"
        layers += [
            {**_layer("point", f"{outside} || datum.{bound} {beyond}", **at_edge), "mark": arrow},
            {**_layer("text", outside, **at_edge, text=quantity("difference", format="+.3~g")),
             "mark": value},
        ]  # fmt: skip
    view = {
        "width": 820,
        "height": {"step": 44},
        "encoding": {"y": names, "color": text("setting", scale=scale, legend=None)},
        "layer": layers,
    }
    columns = ("panel", "setting", "difference", "low", "high", "seeds")
    return Panel(title, columns, [{"panel": title, **row} for row in rows], view)


def _reach(rows: Sequence[Row]) -> tuple[float, float]:
    """Return where the axis of a forest plot begins and ends: zero and all intervals, and space."""
    values = [row[name] for row in rows for name in ("difference", "low", "high")]
    values = [0.0, *(value for value in values if math.isfinite(value))]
    space = 0.06 * ((max(values) - min(values)) or 1.0)
    return round(min(values) - space, 6), round(max(values) + space, 6)


def scatter(title: str, x_label: str, y_label: str, series: Series) -> Panel:
    """Points, and a dashed diagonal on which both values are equal."""
    low, high = (f(v for v in (*series.x, *series.y)) for f in (min, max))
    x, y = quantity("x", title=x_label), quantity("y", title=y_label)
    for channel in (x, y):
        channel |= {"scale": {"zero": False}, "axis": {"grid": False}}
    tooltip = [quantity("x", title=x_label), quantity("y", title=y_label, format=".4~g")]
    view = {
        "height": 300,
        "encoding": {"x": x, "y": y},
        "layer": [
            {"mark": {"type": "circle", "size": 25, "opacity": 0.5},
             "encoding": {"tooltip": tooltip}},
            _diagonal(low, high, y),
        ],
    }  # fmt: skip
    return Panel(title, ("panel", "series", "x", "y"), series.rows(title), view)


def _diagonal(low: float, high: float, y: Spec) -> Spec:
    """A dashed line on which x and y are equal."""
    ends = [{"x": value, "y": value} for value in (low, high)]
    mark = {"type": "line", "strokeDash": [5, 4], "opacity": 0.6}
    ink = {"color": {"value": "currentColor"}}
    return {"data": {"values": ends}, "mark": mark, "encoding": {"y": y, **ink}}


Cell = tuple[str, str, float]  # row, column, value


def grid(
    title: str, row_label: str, cells: Sequence[Cell], value: str, *, root: bool = False
) -> Panel:
    """Cells over moments of training, rows from the top, shaded by their value.

    Args:
        title: of the panel.
        row_label: what rows are.
        cells: (row, column, value).
        value: what the numbers are.
        root: shades follow the square root, so that small shares show.
    """
    height = max(60, 15 * len({row for row, _, _ in cells}))
    scale = {"scheme": "blues", "type": "sqrt" if root else "linear", "domainMin": 0, "clamp": True}
    legend = {"title": value, "orient": "right", "gradientLength": min(120, height - 10)}
    shade = quantity("value", scale=scale, legend=legend)
    view = {"width": 330, "height": height, **_cells(row_label, "epoch", value, shade)}
    return Panel(title, ("panel", "row", "column", "value"), _cell_rows(title, cells), view)


def confusion_matrix(title: str, cells: Sequence[Cell]) -> Panel:
    """Counts by true and predicted class, shaded by their share of the row."""
    name = "share of the row"
    legend = {"title": name, "orient": "right", "format": "~%", "gradientLength": 120}
    shade = quantity("share", scale={"scheme": "blues", "domain": [0, 1]}, legend=legend)
    view = _cells("true class", "predicted class", "records", shade)
    view["encoding"]["x"]["axis"]["labelAngle"] = -90
    count = len({row for row, _, _ in cells})
    if count <= 20:
        ink = {"condition": {"test": "datum.share > 0.55", "value": "white"}, "value": "#17202b"}
        # the number lies above the cell and would hide its values from the pointer
        tooltip = view["layer"][0]["encoding"]["tooltip"]
        numbers = {"text": quantity("value"), "color": ink, "tooltip": tooltip}
        view["layer"].append({"mark": {"type": "text", "fontSize": 10}, "encoding": numbers})
    total = {"joinaggregate": [{"op": "sum", "field": "value", "as": "total"}], "groupby": ["row"]}
    share = {"calculate": "datum.value / max(datum.total, 1)", "as": "share"}
    side = min(48, max(5, 420 // count)) * count
    view |= {"transform": [total, share], "width": side, "height": side}
    return Panel(title, ("panel", "row", "column", "value"), _cell_rows(title, cells), view)


def _cells(row_label: str, column_label: str, value: str, shade: Spec) -> Spec:
    names = {"labelOverlap": True, "labelAngle": 0, "ticks": False}
    tooltip = [text("row", title=row_label), text("column", title=column_label),
               quantity("value", title=value, format=".4~g")]  # fmt: skip
    return {
        "encoding": {
            "x": text(
                "column", sort=None, title=column_label, axis={**names, "labelSeparation": 6}
            ),
            "y": text("row", sort=None, title=row_label, axis=names),
        },
        "layer": [{"mark": "rect", "encoding": {"color": shade, "tooltip": tooltip}}],
    }


def _cell_rows(title: str, cells: Sequence[Cell]) -> list[Row]:
    return [{"panel": title, "row": row, "column": col, "value": v} for row, col, v in cells]


def _layer(mark: str, condition: str, **encoding: Spec | list[Spec]) -> Spec:
    return {"mark": mark, "transform": [{"filter": condition}], "encoding": encoding}


def _scale(log: bool, zero: bool = False) -> Spec:
    return {"type": "log", "nice": False, "padding": 8} if log else {"zero": zero}


def quantity(field: str, **more: Any) -> Spec:
    """A channel of numbers."""
    return {"field": field, "type": "quantitative", **more}


def text(field: str, **more: Any) -> Spec:
    """A channel of names."""
    return {"field": field, "type": "nominal", **more}
