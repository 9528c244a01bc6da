"""What a figure is, apart from how it is drawn: plain data, for the page, for matplotlib, for CSV.

A :class:`Figure` is a row of panels of one kind, see :mod:`dpbam.app.report.panels`.

A figure says whose data it is ``about``; whoever draws it must put its mark on the picture:

==================  ===========================================================================
about               may be published
==================  ===========================================================================
"training"          no: facts about the training data that no noise protects
"test"              only if the test records are not sensitive: epsilon does not cover them
"nobody"            yes: public facts, or what was released with noise
==================  ===========================================================================
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpbam.app.report.panels import Panel

MARKS = {
    "training": "not private: operator only",
    "test": "test records: publish only if public",
    "nobody": "",
}


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Attributes:
        name: as ``dpbam plot`` takes it, also the stem of its files.
        title: a few words.
        caption: what is drawn and how to read it.
        about: "training", "test" or "nobody": whose data it shows without noise.
        panels: side by side, all of one kind; empty where there is nothing to draw.
        missing: why there is nothing to draw, and what to do about it.
        same_scale: panels share the y axis.
        wide: takes the whole width of the page.
    """

    name: str
    title: str
    caption: str
    about: str
    panels: Sequence[Panel] = ()
    missing: str = ""
    same_scale: bool = True
    wide: bool = False

    @property
    def mark(self) -> str:
        """What to write on the picture; empty where it may be published."""
        return MARKS[self.about]

    def to_csv(self) -> str:
        """Every number of the figure, one row a point, not thinned, with its mark.

        Example:
            >>> from dpbam.app.report.panels import Lines, Series
            >>> panel = Lines("", "epoch", "accuracy", (Series("BAM", 0, (1.0,), (0.5,)),))
            >>> print(Figure("accuracy", "", "", "test", (panel,)).to_csv())
            # test records: publish only if public
            panel,series,x,y,low,high
            ,BAM,1.0,0.5,,
            <BLANKLINE>
        """
        out = io.StringIO()
        if self.mark:
            out.write(f"# {self.mark}\n")
        if self.panels:
            write = csv.writer(out, lineterminator="\n").writerow
            write(self.panels[0].header)
            for panel in self.panels:
                for row in panel.rows():
                    write([_plain(value) for value in row])
        return out.getvalue()

    def to_page(self) -> dict[str, Any]:
        """For the page's script: thinned, five significant digits, no NaN."""
        panels = [{"kind": p.kind, **asdict(p.thinned())} for p in self.panels]
        head = {"name": self.name, "title": self.title, "mark": self.mark}
        page = _rounded({**head, "same_scale": self.same_scale, "panels": panels})
        assert isinstance(page, dict)
        return page


def _plain(value: Any) -> Any:
    return "" if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: Any) -> Any:
    """Five significant digits; what JSON has no word for becomes null."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
