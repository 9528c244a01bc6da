"""The report: run folders in, one self-contained HTML page out, and figures for a paper.

A figure is defined once, by a function from runs to its panels (a module per subject); Vega draws
it on the page and vl-convert in files. Importing this package imports neither torch nor vl-convert.
"""

from __future__ import annotations

from dpbam.app.report.html import draw, write_report
from dpbam.app.report.records import ReportError

__all__ = ["ReportError", "draw", "write_report"]
