"""A figure: panels side by side, defined once for the page, for pictures and for CSV files.

A panel is a table and a Vega-Lite view of it (https://vega.github.io/vega-lite/docs), plain data
both. Text and axes have ``currentColor``: the page's own colour, light or dark; black in a file.
Nothing is loaded: data are in the specification, and vl-convert may open no address.

==================  ===========================================================================
about               may be published
==================  ===========================================================================
"training"          no: facts about the training data that no noise protects
"test"              only if the test records are not sensitive: epsilon does not cover them
"public"            yes: public facts, or what was released with noise
==================  ===========================================================================
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpbam.app.report.records import ReportError
from dpbam.app.runs.escaping import cell

Row = dict[str, Any]
Spec = dict[str, Any]

MARKS = {
    "training": "not protected by privacy: do not share",
    "test": "test records: publish only if public",
    "public": "",
}
MOST_POINTS = 300  # drawn per curve; CSV has them all
COLOURS = ("#3b78c4", "#d2691e", "#2a9474", "#9166c4", "#b08d1e", "#cc4a6e", "#3f9fc0", "#848b95")
AMBER = "#b87414"
GUIDE: Spec = {
    "labelColor": "currentColor", "titleColor": "currentColor", "labelFontSize": 11,
    "titleFontSize": 12, "titleFontWeight": "normal", "titleOpacity": 0.8, "labelOpacity": 0.8,
}  # fmt: skip
CONFIG: Spec = {
    "background": "white",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {**GUIDE, "gridColor": "#8a94a0", "gridOpacity": 0.25, "domain": False,
             "tickColor": "#8a94a0", "tickOpacity": 0.4, "labelLimit": 220},
    "legend": {**GUIDE, "orient": "top", "labelLimit": 320, "symbolOpacity": 1,
               "symbolStrokeWidth": 3},
    "title": {"color": "currentColor", "fontSize": 13, "anchor": "start", "limit": 440},
    "text": {"color": "currentColor"},
    "mark": {"aria": False},
}  # fmt: skip
#: A click on a name in the legend fades the others.
CHOSEN: Spec = {
    "name": "chosen",
    "select": {"type": "point", "fields": ["group"]},
    "bind": "legend",
}


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        title: above it.
        columns: of the CSV file.
        rows: the table; a row may have further keys that only the drawing needs. Curves have
            "series", "group" (the name in the legend) and "colour" (an index into the palette).
        view: how it is drawn, in Vega-Lite.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    view: Spec


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Attributes:
        name: as ``dpbam plot`` takes it, also the stem of its files.
        title: a few words.
        caption: what is drawn and how to read it.
        about: "training", "test" or "public": whose data it shows without noise.
        panels: side by side, all of one kind; empty where there is nothing to draw.
        missing: why there is nothing to draw, and what to do about it.
        expected: whether runs of this task could have it; if not, the page does not miss it.
        scales: which are "shared" between panels or "independent", where not as usual.
        meaning: what it shows of these runs, a sentence per setting; empty if nothing was computed.
    """

    name: str
    title: str
    caption: str
    about: str
    panels: Sequence[Panel] = ()
    missing: str = ""
    scales: Spec = field(default_factory=dict)
    expected: bool = True
    meaning: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """What is written on the picture; empty where it may be published."""
        return MARKS[self.about]

    def spec(self) -> Spec:
        """The Vega-Lite specification, for the page and for every file."""
        width = {1: 410, 2: 440, 4: 440}.get(len(self.panels), 290)
        colour = _colour(self.panels)
        views = [_drawn(panel, k, width, colour) for k, panel in enumerate(self.panels)]
        spoken = filter(None, [self.title, *map(_spoken, self.panels), self.mark])
        return {
            "description": ". ".join(spoken),
            "config": CONFIG,
            "title": {"text": self.mark, "orient": "bottom", "anchor": "end", "fontSize": 11,
                      "color": AMBER},
            "columns": 3 if views[0]["width"] <= 320 else 2,
            "spacing": 36,
            "concat": views,
            "resolve": {"scale": self.scales},
            "usermeta": {"mark": self.mark, "columns": self.panels[0].columns},
        }  # fmt: skip

    def to_csv(self) -> str:
        """Every number of the figure, one row per point, not thinned, with its mark.

        Example:
            >>> rows = [{"panel": "", "series": "BAM", "x": 1.0, "y": math.nan}]
            >>> panel = Panel("", ("panel", "series", "x", "y"), rows, {})
            >>> print(Figure("accuracy", "", "", "test", [panel]).to_csv())
            # test records: publish only if public
            panel,series,x,y
            ,BAM,1.0,
            <BLANKLINE>
        """
        out = io.StringIO()
        out.write(f"# {self.mark}\n" if self.mark else "")
        writer = csv.writer(out, lineterminator="\n")
        for k, panel in enumerate(self.panels):
            writer.writerows([panel.columns] if k == 0 else [])
            writer.writerows([_cell(row.get(name)) for name in panel.columns] for row in panel.rows)
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write the picture (.svg, .png or .pdf) or the data (.csv).

        Raises:
            ReportError: if the ending is another one, or there is nothing to draw.
        """
        path = Path(path)
        ending = path.suffix.lower()
        if ending not in (".svg", ".png", ".pdf", ".csv"):
            raise ReportError(f"{path} must end in .pdf, .svg or .png, or in .csv for the data")
        if not self.panels:
            raise ReportError(f"there is no data for {self.name!r}: {self.missing}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if ending == ".csv":
            path.write_text(self.to_csv(), encoding="utf-8", errors="replace")
        else:
            path.write_bytes(picture(self.spec(), ending))
        return path


def picture(spec: Spec, ending: str) -> bytes:
    """A specification as the content of an .svg, .png or .pdf file; no address is opened."""
    import vl_convert

    if ending == ".svg":
        return _renumbered(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])).encode()
    if ending == ".png":
        return vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[])
    return vl_convert.vegalite_to_pdf(spec, allowed_base_urls=[])


def _renumbered(svg: str) -> str:
    """Numbers of clip paths and gradients from 0: Vega continues its count in the next picture."""
    names: dict[str, str] = {}
    return re.sub(
        r'(?<=id=")(clip|gradient_)\d+|(?<=url\(#)(clip|gradient_)\d+',
        lambda match: names.setdefault(match[0], f"{match[1] or match[2]}{len(names)}"),
        svg,
    )


def _drawn(panel: Panel, k: int, width: int, colour: Spec | None) -> Spec:
    """The k-th panel's view with its data, the colours of the groups, and names of its own."""
    first, *others = panel.view["layer"]
    params = [{**p, "name": f"{p['name']}{k}"} for p in first.get("params", ())]
    if colour and k == 0:
        params.append(CHOSEN)
    return {
        "title": panel.title,
        "width": width,
        "height": 240,
        "data": {
            "values": [{k: rounded(v) for k, v in row.items()} for row in thinned(panel.rows)]
        },
        **panel.view,
        "encoding": panel.view["encoding"] | ({"color": colour} if colour else {}),
        "layer": [{**first, "params": params}, *others],
    }


def _spoken(panel: Panel) -> str:
    """For a screen reader: the title, and where every curve ends."""
    rows = [row for row in panel.rows if "y" in row and row["style"] != "seed"]
    ends = {row["series"]: row["y"] for row in rows if math.isfinite(row["y"])}
    spoken = [panel.title, *(f"{name} ends at {y:.3g}" for name, y in ends.items())]
    return ", ".join(filter(None, spoken))


def _colour(panels: Sequence[Panel]) -> Spec | None:
    """The groups' colours, the same in all panels; a legend where a panel has several."""
    groups = [{row["group"]: row["colour"] for row in p.rows if "group" in row} for p in panels]
    palette = {name: COLOURS[k % len(COLOURS)] for colours in groups for name, k in colours.items()}
    legend = {"title": None, "columns": 3} if any(len(colours) > 1 for colours in groups) else None
    scale = {"domain": list(palette), "range": list(palette.values())}
    return (
        {"field": "group", "type": "nominal", "scale": scale, "legend": legend} if palette else None
    )


def thinned(rows: Sequence[Row], most: int = MOST_POINTS) -> list[Row]:
    """At most ``most`` points of every curve, each the mean of equally many neighbours.

    Example:
        >>> rows = [{"series": "a", "x": float(k), "y": 2.0 * k + 1} for k in range(4)]
        >>> [row["y"] for row in thinned(rows, 2)]
        [2.0, 6.0]
    """
    curves: dict[Any, list[Row]] = {}
    for row in rows:
        curves.setdefault(row.get("series"), []).append(row)
    return [
        point
        for series, curve in curves.items()
        for point in (curve if series is None else _buckets(curve, math.ceil(len(curve) / most)))
    ]


def _buckets(curve: Sequence[Row], size: int) -> Iterable[Row]:
    if size <= 1:
        return curve
    parts = [curve[k : k + size] for k in range(0, len(curve), size)]
    means = [k for k in ("x", "y", "low", "high") if k in curve[0]]
    return [{**bucket[0], **{k: mean(row[k] for row in bucket) for k in means}} for bucket in parts]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return cell(value)
    return "" if rounded(value) is None else value


def rounded(value: Any) -> Any:
    """Five significant digits of a number, None if it is not finite; other values as they are."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
