"""One self-contained HTML page: styles, scripts and data in the file, nothing from the network.

Text from outside (run names, class names, settings) goes through jinja2's autoescape; data go
through its ``tojson``, which writes ``<``, ``>``, ``&`` and ``'`` as escapes, so that no name can
end the script that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpbam._version import __version__
from dpbam.app.report.catalogue import SECTIONS
from dpbam.app.report.figure import MARKS, Figure
from dpbam.app.report.groups import Group, groups
from dpbam.app.report.records import Run
from dpbam.app.report.statement import privacy
from dpbam.app.report.tables import Table, results, shown, side_by_side


def report_figures(
    all_groups: Sequence[Group], *, publishable: bool = False, public_test_data: bool = False
) -> dict[str, list[Figure]]:
    """Section -> figures, those without data included.

    Args:
        all_groups: the runs.
        publishable: only figures that may be published.
        public_test_data: what is about the test records may be.
    """
    built = {
        section: [build(all_groups) for build in builders.values()]
        for section, builders in SECTIONS.items()
    }
    for section, figures in built.items():
        if public_test_data:
            figures = [replace(f, about="nobody") if f.about == "test" else f for f in figures]
        if publishable:
            figures = [f for f in figures if f.about == "nobody"]
        built[section] = figures
    return {section: figures for section, figures in built.items() if figures}


def render(
    runs: Sequence[Run], *, publishable: bool = False, public_test_data: bool = False,
    title: str | None = None, written: datetime | None = None,
) -> str:  # fmt: skip
    """The page of one run or of several.

    Args:
        runs: at least one, as :func:`dpbam.app.report.records.read_run` gives them.
        publishable: leave out everything that is not private, data included.
        public_test_data: the test records are not sensitive, so that accuracy may be published.
        title: the page's title.
        written: a date to print; None prints none.

    Raises:
        ReportError: if a run that has not finished is to be published.
    """
    if publishable:
        runs = [run.publishable(public_test_data=public_test_data) for run in runs]
    all_groups = groups(runs)
    built = report_figures(all_groups, publishable=publishable, public_test_data=public_test_data)
    statement = privacy(all_groups)
    return _environment().get_template("report.html.j2").render(
        version=__version__,
        written=f"{written.day} {written:%B %Y, %H:%M}" if written else "",
        title=title or _title(runs),
        lead=_lead(runs, all_groups),
        marks=MARKS,
        publishable=publishable,
        public_test_data=public_test_data,
        privacy=statement,
        privacy_table=_table(statement.table) if statement.table else "",
        results=_table(results(all_groups)) if len(runs) > 1 else "",
        sections=[_section(name, figures) for name, figures in built.items()],
        figures={f.name: f.to_page() for fs in built.values() for f in fs if f.panels},
        several=len(all_groups) > 1,
        configuration=_table(side_by_side(all_groups, lambda run: run.config)),
        environment=_table(side_by_side(all_groups, lambda run: run.environment))
        if any(run.environment for run in runs)
        else "",
    )  # fmt: skip


def _section(name: str, figures: list[Figure]) -> dict[str, Any]:
    return {
        "id": name.lower().replace(" ", "-"),
        "title": name,
        "figures": _laid_out([f for f in figures if f.panels]),
        "missing": [f for f in figures if not f.panels],
    }


def _laid_out(figures: list[Figure]) -> list[tuple[Figure, bool]]:
    """Figures with whether they take the whole width: a half one without a neighbour does, too."""
    laid: list[tuple[Figure, bool]] = []
    waiting: Figure | None = None
    for figure in figures:
        if figure.wide:
            laid += [(waiting, True)] if waiting else []
            laid.append((figure, True))
            waiting = None
        elif waiting:
            laid += [(waiting, False), (figure, False)]
            waiting = None
        else:
            waiting = figure
    return [*laid, (waiting, True)] if waiting else laid


def _title(runs: Sequence[Run]) -> str:
    *others, last = dict.fromkeys(run.method for run in runs)
    methods = f"{', '.join(others)} and {last}" if others else last
    data = list(dict.fromkeys(run.data for run in runs))
    return f"{methods} on {data[0]}" if len(data) == 1 else methods


def _lead(runs: Sequence[Run], all_groups: Sequence[Group]) -> str:
    if len(runs) > 1:
        said = f"{len(runs)} runs of {len(all_groups)} settings, side by side."
        if len(all_groups) < len(runs):
            said += " Thin lines are runs that differ in their seed alone, thick ones their means."
        return said
    config = runs[0].config
    parts = {"model": "", "epochs": " epochs", "batch_size": " samples a batch"}
    facts = [f"{shown(config[k])}{unit}" for k, unit in parts.items() if k in config]
    return f"{runs[0].name}: {', '.join(facts)}."


def _table(table: Table) -> Markup:
    text = _environment().get_template("table.html.j2").render(**table.__dict__)
    return Markup(text)  # its cells were escaped by the template


def _environment() -> Environment:
    loader = PackageLoader("dpbam.app.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
