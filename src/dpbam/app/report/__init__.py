"""The report: run folders in, one self-contained HTML page out, and figures for a paper.

What is drawn (:mod:`.figure`, and a module a subject) is apart from how it is drawn: by the page's
own script, or by matplotlib. Importing this package imports neither torch nor matplotlib.
"""

from __future__ import annotations

from dpbam.app.report.catalogue import BUILDERS
from dpbam.app.report.records import ReportError
from dpbam.app.report.write import draw, write_report

#: Names of all figures, as ``dpbam plot`` takes them.
FIGURES = tuple(BUILDERS)

__all__ = ["FIGURES", "ReportError", "draw", "write_report"]
