"""The kinds of panel that a figure has: plain data, each with its rows for CSV.

==================  ======================================  =======================================
panel               draws                                   used for
==================  ======================================  =======================================
:class:`Lines`      curves over x, with bands and marks     accuracy, bias, norms, alignment
:class:`Dots`       one value a category, with an interval  accuracy by class and by sub-group
:class:`Matrix`     a grid of shaded cells                  confusion, layers over time
:class:`Arrows`     vectors in the plane, to scale          the paper's Figures 1 and 7
==================  ======================================  =======================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

MOST_POINTS = 300  # of one curve on the page; CSV and PDF have them all

Numbers = tuple[float, ...]
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        label: written at the curve's end; empty for none.
        colour: index into the palette.
        x: positions, rising.
        y: values; NaN where there is none.
        low: lower edge of a band around the curve, or empty.
        high: its upper edge, or empty.
        style: "line", "dashed", "faint" (one seed among several), "band" (the band alone) or
            "points" (markers joined by a line).
    """

    label: str
    colour: int
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    style: str = "line"

    def thinned(self, most: int = MOST_POINTS) -> Series:
        """At most ``most`` points, each the mean of equally many neighbours.

        Example:
            >>> Series("a", 0, (0.0, 1.0, 2.0, 3.0), (1.0, 3.0, 5.0, 7.0)).thinned(2).y
            (2.0, 6.0)
        """
        size = math.ceil(len(self.x) / most)
        if size <= 1:
            return self
        x, y, low, high = (_bucket_means(v, size) for v in (self.x, self.y, self.low, self.high))
        return Series(self.label, self.colour, x, y, low, high, self.style)


@dataclass(frozen=True)
class Lines:
    """Curves over a common x axis.

    Attributes:
        title: of the panel; empty where the figure's own title says it.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        series: the curves.
        percent: y is a share, shown in percent.
        zero: the y axis begins at zero.
        log_x: x on a logarithmic scale.
        log_y: y on a logarithmic scale.
        marks: horizontal lines, (value, label).
    """

    kind: ClassVar[str] = "lines"
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    percent: bool = False
    zero: bool = False
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = ()

    header: ClassVar[Row] = ("panel", "series", "x", "y", "low", "high")

    def rows(self) -> Iterable[Row]:
        """One row a point."""
        for s in self.series:
            for i, x in enumerate(s.x):
                band = (s.low[i], s.high[i]) if s.low else ("", "")
                yield (self.title, s.label, x, s.y[i] if s.y else "", *band)

    def thinned(self) -> Lines:
        """With fewer points a curve, for the page."""
        return Lines(**{**self.__dict__, "series": tuple(s.thinned() for s in self.series)})


@dataclass(frozen=True)
class DotSeries:
    """One value a category, with the ends of its interval."""

    label: str
    colour: int
    values: Numbers
    low: Numbers
    high: Numbers


@dataclass(frozen=True)
class Dots:
    """Values by category, one row a category.

    Attributes:
        title: of the panel.
        x_label: what the values are.
        categories: names of the rows, from the top.
        series: the values, a colour each.
        percent: values are shares, shown in percent.
    """

    kind: ClassVar[str] = "dots"
    title: str
    x_label: str
    categories: tuple[str, ...]
    series: tuple[DotSeries, ...]
    percent: bool = True

    header: ClassVar[Row] = ("panel", "series", "category", "value", "low", "high")

    def rows(self) -> Iterable[Row]:
        """One row a value."""
        for s in self.series:
            for i, category in enumerate(self.categories):
                yield (self.title, s.label, category, s.values[i], s.low[i], s.high[i])

    def thinned(self) -> Dots:
        """Itself: there are few."""
        return self


@dataclass(frozen=True)
class Matrix:
    """A grid of cells, shaded by ``shades`` (0..1) and labelled with ``values``.

    Attributes:
        title: of the panel.
        row_label: what rows are.
        column_label: what columns are.
        row_names: names of the rows, from the top.
        column_names: names of the columns.
        values: [rows][columns], the numbers.
        shades: [rows][columns], how strong the colour is.
        unit: what a number counts, for the label that pops up.
        square: cells are square, as in a confusion matrix.
    """

    kind: ClassVar[str] = "matrix"
    title: str
    row_label: str
    column_label: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    values: tuple[Numbers, ...]
    shades: tuple[Numbers, ...]
    unit: str = ""
    square: bool = True

    header: ClassVar[Row] = ("panel", "row", "column", "value")

    def rows(self) -> Iterable[Row]:
        """One row a cell."""
        for name, values in zip(self.row_names, self.values, strict=True):
            for column, value in zip(self.column_names, values, strict=True):
                yield (self.title, name, column, value)

    def thinned(self) -> Matrix:
        """Itself: whoever builds it chooses how many columns there are."""
        return self


@dataclass(frozen=True)
class Arrow:
    """One vector from ``start`` to ``end``.

    Attributes:
        role: "gradient", "clipped", "bias", "magnitude", "direction" or "sample": its colour.
        side: where its label goes, as seen along the arrow: "left", "right" or "end".
        again: it shows another arrow once more, enlarged, and is no data of its own.
    """

    label: str
    role: str
    start: tuple[float, float]
    end: tuple[float, float]
    side: str = "end"
    again: bool = False


@dataclass(frozen=True)
class Arrows:
    """Vectors in the plane, x and y to the same scale.

    Attributes:
        title: of the panel.
        arrows: what is drawn.
        circle: radius of a circle around the origin (the clipping norm); 0 for none.
        trail: earlier positions of the clipped gradient's tip, oldest first.
        colour: of the trail, an index into the palette.
        notes: short facts below the drawing, (name, value).
        bounds: (left, bottom, right, top) of what must be seen.
    """

    kind: ClassVar[str] = "arrows"
    title: str
    arrows: tuple[Arrow, ...]
    circle: float = 0.0
    trail: tuple[tuple[float, float], ...] = ()
    colour: int = 0
    notes: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    header: ClassVar[Row] = ("panel", "vector", "x_from", "y_from", "x_to", "y_to")

    def rows(self) -> Iterable[Row]:
        """One row a vector."""
        for arrow in self.arrows:
            if not arrow.again:
                yield (self.title, arrow.role, *arrow.start, *arrow.end)

    def thinned(self) -> Arrows:
        """With a shorter trail."""
        step = max(1, math.ceil(len(self.trail) / 60))
        return Arrows(**{**self.__dict__, "trail": self.trail[::step]})


Panel = Lines | Dots | Matrix | Arrows


def _bucket_means(values: Numbers, size: int) -> Numbers:
    """Means of ``size`` neighbours, over those that are numbers."""
    means = []
    for start in range(0, len(values), size):
        finite = [v for v in values[start : start + size] if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return tuple(means)
