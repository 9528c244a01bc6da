"""From run folders to one self-contained HTML page, or to a figure's file.

Styles, script and data are in the page, nothing comes from the network. Text from outside (run
names, class names, settings) goes through jinja2's autoescape; data go through its ``tojson``,
which writes ``<``, ``>``, ``&`` and ``'`` as escapes, so that no name can end the script that holds
it. The page's policy allows one script, by its hash.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpbam._names import did_you_mean
from dpbam._version import __version__
from dpbam.app.report.figure import MARKS, Figure
from dpbam.app.report.groups import Group, groups, meaning
from dpbam.app.report.records import ReportError, Run, read_runs, unit_of
from dpbam.app.report.statement import headline, privacy
from dpbam.app.report.tables import results, shown, side_by_side
from dpbam.app.runs.meaning import used_settings
from dpbam.app.runs.run import RunError
from dpbam.catalogue import FIGURES, load

PathLike = str | Path


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


def report_figures(
    all_groups: Sequence[Group], *, publishable: bool = False, public_test_data: bool = False
) -> dict[str, list[Figure]]:
    """Section -> figures, those without data included; the options are those of :func:`render`."""
    built = {}
    for section, names in sections().items():
        figures = [build(name, all_groups) for name in names]
        if public_test_data:
            figures = [replace(f, about="public") if f.about == "test" else f for f in figures]
        built[section] = [f for f in figures if f.about == "public" or not publishable]
    return {section: figures for section, figures in built.items() if figures}


def render(
    runs: Sequence[Run], *, publishable: bool = False, public_test_data: bool = False,
    title: str | None = None, written: datetime | None = None,
) -> str:  # fmt: skip
    """The page of one run or of several.

    Args:
        runs: at least one, as :func:`dpbam.app.report.records.read_run` gives them.
        publishable: leave out everything that privacy does not protect, data included.
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
    opening = _take_opening(built)
    environment = side_by_side(all_groups, lambda run: run.environment)
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template("report.html.j2").render(
        version=__version__,
        written=f"{written.day} {written:%B %Y, %H:%M}" if written else "",
        title=title or _title(runs),
        lead=_lead(runs, all_groups),
        marks=MARKS,
        publishable=publishable,
        public_test_data=public_test_data,
        privacy=privacy(all_groups),
        headline=headline(runs[0]) if len(runs) == 1 else None,
        results=results(all_groups) if len(runs) > 1 else None,
        opening=opening,
        sections=[
            {"id": name.lower().replace(" ", "-"), "title": name, "figures": with_panels}
            for name, figures in built.items()
            if (with_panels := [figure for figure in figures if figure.panels])
        ],
        missing=[f for figures in built.values() for f in figures if not f.panels and f.expected],
        figures={f.name: f.spec() for fs in (opening, *built.values()) for f in fs if f.panels},
        configuration=side_by_side(
            all_groups, lambda run: used_settings(run.config, private=run.private)
        ),
        environment=environment if environment.rows else None,
        script=Markup(script),  # ours and the library's; no text from outside is in it
        script_hash=Markup(f"sha256-{digest}"),
    )  # fmt: skip


def _take_opening(built: dict[str, list[Figure]]) -> list[Figure]:
    """Take out of its section the figure that the page opens with, if there is one.

    That is the forest plot of a comparison, else the metric over training.
    """
    quality = built.get("Quality", [])
    for name in ("differences", "accuracy"):
        opening = [figure for figure in quality if figure.name == name and figure.panels]
        if opening:
            built["Quality"] = [figure for figure in quality if figure.name != name]
            return opening
    return []


def _title(runs: Sequence[Run]) -> str:
    *others, last = dict.fromkeys(run.method for run in runs)
    methods = f"{', '.join(others)} and {last}" if others else last
    if len(others) > 3:
        methods = f"{len(others) + 1} methods"
    data = list(dict.fromkeys(run.data for run in runs))
    return f"{methods} on {data[0]}" if len(data) == 1 else methods


def _lead(runs: Sequence[Run], all_groups: Sequence[Group]) -> str:
    if len(runs) > 1:
        lead = f"{len(runs)} runs of {len(all_groups)} settings, side by side."
        if len(all_groups) < len(runs):
            lead += (
                " Numbers are means over seeds, with 95% t intervals in brackets; thin lines are "
                "runs that differ in their seed alone, thick ones their means."
            )
        return lead
    config = runs[0].config
    parts = {"model": "", "epochs": " epochs", "batch_size": f" {unit_of(runs)} per batch"}
    facts = [f"{shown(config[k])}{unit}" for k, unit in parts.items() if k in config]
    name = runs[0].name.removeprefix("run ")
    return f"Run {name}: {', '.join(facts)}."


@functools.cache
def _script() -> str:
    """Vega, Vega-Lite and Vega-Embed with the page's few lines, bundled from installed files."""
    import vl_convert

    return vl_convert.javascript_bundle(_environment().get_template("page.js").render())


def _environment() -> Environment:
    loader = PackageLoader("dpbam.app.report")
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_without_controls,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def _without_controls(value: object) -> object:
    """Return text of the data's without escape bytes and overrides of direction."""
    if type(value) is not str:  # a Markup is ours
        return value
    return "".join(
        "\ufffd" if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs") else c
        for c in value
    )


def write_report(
    runs: Sequence[PathLike], out: PathLike, *, publishable: bool = False,
    public_test_data: bool = False, title: str | None = None, figures: PathLike | None = None,
) -> Path:  # fmt: skip
    """Write one self-contained HTML page about one run or several.

    Args:
        runs: run folders, or folders of runs, such as a comparison.
        out: the page, or a folder to put ``report.html`` into.
        publishable: as of :func:`render`.
        public_test_data: likewise.
        title: likewise.
        figures: a folder for each figure as PDF and its data as CSV; None writes none.

    Returns:
        The page's path.

    Raises:
        ReportError: if a folder is no run, or has nothing that may be published yet.
    """
    if not runs:
        raise ReportError("name at least one run folder")
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / "report.html"
    with _damage_reported(runs):
        read = read_runs(runs)
        page = render(
            read, publishable=publishable, public_test_data=public_test_data, title=title,
            written=datetime.now(),
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")  # lone surrogates in a name
        if figures is not None:
            _write_figures(read, Path(figures), publishable, public_test_data)
    return path


def _write_figures(
    runs: Sequence[Run], folder: Path, publishable: bool, public_test_data: bool
) -> None:
    """Each figure as ``name.pdf`` and ``name.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    if publishable:
        runs = [run.publishable(public_test_data=public_test_data) for run in runs]
    built = report_figures(groups(runs), publishable=publishable, public_test_data=public_test_data)
    for figure in (f for figures in built.values() for f in figures if f.panels):
        figure.save(folder / f"{figure.name}.pdf")
        figure.save(folder / f"{figure.name}.csv")


def draw(name: str, runs: Sequence[PathLike], out: PathLike) -> Path:
    """Draw one figure alone; ``out`` ends in .svg, .png or .pdf, or in .csv for its data.

    Raises:
        ReportError: if there is no such figure, or nothing to draw.
    """
    if name in FIGURES and not runs:
        raise ReportError(f"name the runs to draw {name!r} of")
    with _damage_reported(runs):
        return build(name, groups(read_runs(runs))).save(out)


@contextmanager
def _damage_reported(runs: Sequence[PathLike]) -> Iterator[None]:
    """A file may be valid JSON and yet not what a run writes: report damage, not a bug."""
    try:
        yield
    except (ReportError, RunError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        where = ", ".join(str(run) for run in runs)
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ReportError(
            f"a file in {where} lacks a field, or has one of the wrong kind ({cause}): restore it "
            "from a backup; DPBAM_TRACEBACK=1 shows where it was read"
        ) from error
