"""One self-contained HTML page: styles, scripts and data in the file, nothing from the network.

Text from outside (run names, class names, settings) goes through jinja2's autoescape; data go
through its ``tojson``, which writes ``<``, ``>``, ``&`` and ``'`` as escapes, so that no name can
end the script that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpbam._version import __version__
from dpbam.report.catalogue import SECTIONS
from dpbam.report.figure import Figure
from dpbam.report.records import Group, Run, groups
from dpbam.report.statement import view
from dpbam.report.tables import Table, configuration, facts_table, summary


def report_figures(all_groups: Sequence[Group], *, publishable: bool) -> dict[str, list[Figure]]:
    """Section -> figures, those without data included."""
    built = {
        section: [build(all_groups) for build in builders.values()]
        for section, builders in SECTIONS.items()
    }
    if not publishable:
        return built
    public = {s: [f for f in figures if not f.non_private] for s, figures in built.items()}
    return {section: figures for section, figures in public.items() if figures}


def render(
    runs: Sequence[Run], *, publishable: bool = False, title: str | None = None,
    written: datetime | None = None,
) -> str:  # fmt: skip
    """The page of one run or of several.

    Args:
        runs: at least one, as :func:`dpbam.report.records.read_run` gives them.
        publishable: leave out everything that is not private, data included.
        title: the page's title.
        written: a date to print; None prints none.
    """
    if publishable:
        runs = [run.publishable() for run in runs]
    all_groups = groups(runs)
    built = report_figures(all_groups, publishable=publishable)
    page = _environment().get_template("report.html.j2")
    return page.render(
        version=__version__,
        written=f"{written:%d %B %Y, %H:%M}" if written else "",
        title=title or _title(runs),
        lead=_lead(runs, all_groups),
        publishable=publishable,
        runs=runs,
        warnings=[],
        statements=[view(run, run.name, g.colour) for g in all_groups for run in g.runs],
        sections=[_section(name, figures) for name, figures in built.items()],
        figures={f.name: f.to_page() for fs in built.values() for f in fs if f.panels},
        summary=_table(summary(all_groups, publishable=publishable)),
        configuration=_table(configuration(runs, publishable=publishable)),
        environment=_environment_table(runs),
    )


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
    if len(runs) == 1:
        return f"{runs[0].method} on {_data(runs[0])}"
    methods = list(dict.fromkeys(run.method for run in runs))
    return f"{', '.join(methods[:-1])} and {methods[-1]}" if len(methods) > 1 else methods[0]


def _data(run: Run) -> str:
    """The data set's name; of a path only its last part."""
    return str(run.config.get("data", "data")).rstrip("/").rpartition("/")[2]


def _lead(runs: Sequence[Run], all_groups: Sequence[Group]) -> str:
    if len(runs) == 1:
        return f"Run {runs[0].name}: {runs[0].config.get('model', 'a model')}."
    return f"{len(runs)} runs of {len(all_groups)} settings."


def _environment_table(runs: Sequence[Run]) -> Markup | None:
    found = [dict(run.statement.get("environment") or {}) for run in runs]
    return _table(facts_table(runs, found)) if any(found) else None


def _table(table: Table) -> Markup:
    text = _environment().get_template("table.html.j2").render(**table.__dict__)
    return Markup(text)  # its cells were escaped by the template


def _environment() -> Environment:
    loader = PackageLoader("dpbam.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
