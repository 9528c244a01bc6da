"""Figures of the report by name: what :data:`dpbam.catalogue.FIGURES` lists, built."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from dpbam._names import did_you_mean
from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import Group
from dpbam.app.report.meaning import meaning
from dpbam.app.report.records import ReportError, unit_of
from dpbam.catalogue import FIGURES, load


def sections() -> dict[str, list[str]]:
    """Return the names of the figures by section of the report, in its order."""
    names_by_section: dict[str, list[str]] = {}
    for name, entry in FIGURES.items():
        names_by_section.setdefault(entry.section, []).append(name)
    return names_by_section


def build(name: str, groups: Sequence[Group]) -> Figure:
    """Return the figure ``name`` of the runs in ``groups``, with what it means for them.

    Raises:
        ReportError: if there is no such figure.

    Example:
        >>> build("biass", [])
        Traceback (most recent call last):
        dpbam.app.report.records.ReportError: there is no figure 'biass': did you mean 'bias'?
    """
    if name not in FIGURES:
        raise ReportError(f"there is no figure {name!r}: {did_you_mean(name, FIGURES)}")
    entry = FIGURES[name]
    figure: Figure = entry.load()(groups)
    if figure.panels and entry.sentence:
        figure = replace(figure, meaning=meaning(load(entry.sentence), groups))
    return in_units(figure, unit_of([run for group in groups for run in group.runs]))


def in_units(figure: Figure, units: str) -> Figure:
    """Return the figure with its words for what is clipped and counted: patients, not samples."""
    if units == "samples":
        return figure

    def worded(text: str) -> str:
        text = text.replace("samples", units).replace("per-sample", f"per-{units[:-1]}")
        return re.sub(r"\b(a|no) sample\b", rf"\1 {units[:-1]}", text)

    panels = [replace(p, view=json.loads(worded(json.dumps(p.view)))) for p in figure.panels]
    return replace(
        figure, title=worded(figure.title), caption=worded(figure.caption), panels=panels
    )
