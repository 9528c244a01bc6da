"""Draws a figure with matplotlib: PDF, SVG or PNG for a paper. Same data as on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import FuncFormatter, LogFormatter, PercentFormatter, ScalarFormatter

from dpbam.app.report.figure import Figure
from dpbam.app.report.panels import Arrows, Dots, Lines, Matrix, Series
from dpbam.app.report.records import ReportError

COLOURS = ("#2a62a6", "#c65a1f", "#20826a", "#7b54a6", "#9a7b1c", "#b13658", "#3a8ba8", "#6a7079")
ROLES = {
    "gradient": "#1d4e89", "clipped": "#3f97c9", "bias": "#c0362c", "magnitude": "#d2801c",
    "direction": "#8a2f6b", "sample": "#5a6675", "cut": "#17202b",
}  # fmt: skip
INK, MUTED, RULE, AMBER = "#17202b", "#5a6675", "#dde2e8", "#7a4700"
STYLE: Any = {
    "font.size": 8.5, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "ytick.left": False, "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "text.color": INK, "legend.frameon": False, "lines.linewidth": 1.4,
    "text.parse_math": False,  # a class may be called "$"
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "dpbam",
}  # fmt: skip
FORMATS = (".pdf", ".svg", ".png")
_DATES = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}


def save(figure: Figure, path: str | Path) -> Path:
    """Draw ``figure`` into a file; its ending says how.

    Raises:
        ReportError: if the ending is none of pdf, svg and png, or there is nothing to draw.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ReportError(f"{path} must end in .pdf, .svg or .png, the formats of a figure")
    if not figure.panels:
        raise ReportError(f"there is nothing to draw for {figure.name!r}: {figure.missing}")
    with matplotlib.rc_context(STYLE):
        sheet = _sheet(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.savefig(path, dpi=200, metadata=_DATES[path.suffix.lower()])
    return path


def _sheet(figure: Figure) -> Any:
    panels = _same_bounds(figure.panels)
    count = len(panels)
    columns = min(count, 2 if isinstance(figure.panels[0], Matrix | Dots) else 3)
    rows = math.ceil(count / columns)
    width, height = _panel_size(figure.panels[0], alone=count == 1)
    sheet = Sheet(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    grid = sheet.subplots(rows, columns, squeeze=False).ravel()
    first = panels[0]
    shared = figure.same_scale and isinstance(first, Lines)
    for k, axes in enumerate(grid):
        if k >= count:
            axes.set_axis_off()
            continue
        _draw(axes, panels[k])
        if shared and k:
            axes.sharey(grid[0])
    for axes in grid[:count] if shared else ():
        axes.autoscale(axis="y")
        if first.zero:
            _from_zero(axes)
    if figure.mark:
        sheet.supxlabel(figure.mark, x=0.99, ha="right", fontsize=7, color=AMBER, weight="bold")
    return sheet


def _same_bounds(panels: Sequence[Any]) -> list[Any]:
    """Vectors of all panels to one scale."""
    if not isinstance(panels[0], Arrows):
        return list(panels)
    edges = zip(*(panel.bounds for panel in panels), strict=True)
    bounds = tuple(pick(edge) for pick, edge in zip((min, min, max, max), edges, strict=True))
    return [replace(panel, bounds=bounds) for panel in panels]


def _from_zero(axes: Any) -> None:
    """The y axis from zero, with air above what is drawn."""
    axes.set_ylim(bottom=0, top=1.08 * max(axes.dataLim.ymax, 1e-12))


def _panel_size(panel: Any, *, alone: bool) -> tuple[float, float]:
    """Inches."""
    if isinstance(panel, Dots):
        return 4.2, 1.0 + 0.24 * len(panel.categories)
    if isinstance(panel, Matrix):
        return 4.2, (4.2 if panel.square else 1.1 + 0.14 * len(panel.row_names))
    return (4.8, 3.2) if alone else (3.3, 2.7)


def _draw(axes: Any, panel: Any) -> None:
    if panel.title:
        axes.set_title(panel.title)
    kinds: dict[type[Any], Any] = {Lines: _lines, Dots: _dots, Matrix: _matrix, Arrows: _arrows}
    kinds[type(panel)](axes, panel)


def _lines(axes: Any, panel: Lines) -> None:
    for s in panel.series:
        _curve(axes, s)
    for value, text in panel.marks:
        axes.axhline(value, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(text, (0, value), xycoords=("axes fraction", "data"), fontsize=7,
                      color=MUTED, xytext=(3, 2), textcoords="offset points")  # fmt: skip
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter(base=2))  # in plain text
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(LogFormatter())
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if panel.zero:
        _from_zero(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7.5)


def _curve(axes: Any, s: Series) -> None:
    colour = COLOURS[s.colour]
    if s.low:
        label = s.label if s.style == "band" else None
        axes.fill_between(s.x, s.low, s.high, color=colour, alpha=0.18, linewidth=0, label=label)
    if not s.y:
        return
    faint = s.style == "faint"
    axes.plot(
        s.x, s.y, color=colour, label=None if faint else s.label,
        alpha=0.3 if faint else 1.0, linewidth=0.8 if faint else 1.4,
        linestyle="--" if s.style == "dashed" else "-", marker="o" if s.style == "points" else None,
        markersize=4,
    )  # fmt: skip


def _dots(axes: Any, panel: Dots) -> None:
    rows = range(len(panel.categories))
    for k, s in enumerate(panel.series):
        shift = 0.2 * (k - (len(panel.series) - 1) / 2)
        y = [row + shift for row in rows]
        low = [max(0.0, v - a) for v, a in zip(s.values, s.low, strict=True)]
        high = [max(0.0, b - v) for v, b in zip(s.values, s.high, strict=True)]
        axes.errorbar(s.values, y, xerr=(low, high), fmt="o", markersize=3.5, elinewidth=1,
                      color=COLOURS[s.colour], label=s.label)  # fmt: skip
    axes.set_yticks(list(rows), panel.categories)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(panel.x_label)
    if panel.percent:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(panel.series) > 1:
        axes.legend(fontsize=7.5)


def _matrix(axes: Any, panel: Matrix) -> None:
    axes.imshow(panel.shades, cmap="Blues", vmin=0, vmax=1.15,
                aspect="equal" if panel.square else "auto")  # fmt: skip
    axes.grid(visible=False)
    _ticks(axes.set_yticks, panel.row_names, 40)
    _ticks(axes.set_xticks, panel.column_names, 40 if panel.square else 8)
    if panel.square:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set(xlabel=panel.column_label, ylabel=panel.row_label)
    if panel.square and len(panel.row_names) <= 20:
        for i, row in enumerate(panel.values):
            for j, value in enumerate(row):
                dark = panel.shades[i][j] > 0.55
                axes.text(j, i, f"{value:g}", ha="center", va="center", fontsize=6,
                          color="white" if dark else INK)  # fmt: skip


def _ticks(place: Any, names: Sequence[str], most: int) -> None:
    step = math.ceil(len(names) / most)
    place(range(0, len(names), step), names[::step])


def _arrows(axes: Any, panel: Arrows) -> None:
    left, bottom, right, top = panel.bounds
    axes.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    axes.set_axis_off()
    if panel.circle:
        axes.add_patch(matplotlib.patches.Circle((0, 0), panel.circle, fill=False, color=MUTED,
                                                 linestyle=(0, (4, 3)), linewidth=0.8))  # fmt: skip
    if panel.trail:
        x, y = zip(*panel.trail, strict=True)
        axes.scatter(x, y, s=5, color=COLOURS[panel.colour], alpha=0.25, linewidth=0)
    for a in panel.arrows:
        colour = ROLES[a.role]
        axes.annotate("", a.end, a.start, arrowprops={"arrowstyle": "-|>", "color": colour,
                      "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0})  # fmt: skip
        _arrow_label(axes, a, colour)
    axes.plot([0], [0], "o", color=INK, markersize=4)
    lines = "\n".join(
        "    ".join(f"{name} {value}" for name, value in panel.notes[k : k + 3])
        for k in range(0, len(panel.notes), 3)
    )
    axes.text(0.5, -0.02, lines, transform=axes.transAxes, ha="center", va="top", fontsize=7)


def _arrow_label(axes: Any, a: Any, colour: str) -> None:
    """Beside the middle of the arrow, or at its end; to the left or right as seen along it."""
    dx, dy = a.end[0] - a.start[0], a.end[1] - a.start[1]
    length = math.hypot(dx, dy) or 1.0
    ux, uy = dx / length, dy / length
    if a.side == "end":
        at, offset = a.end, (8 * ux, 8 * uy)
    else:
        sign = 1 if a.side == "left" else -1
        at = ((a.start[0] + a.end[0]) / 2, (a.start[1] + a.end[1]) / 2)
        offset = (-7 * uy * sign, 9 * ux * sign)
    beside = "left" if offset[0] > 3 else "right" if offset[0] < -3 else "center"
    axes.annotate(a.label, at, xytext=offset, textcoords="offset points", color=colour,
                  weight="bold", ha=beside, va="center")  # fmt: skip
