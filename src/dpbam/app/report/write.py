"""From run folders to files: the page, and figures with their data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from dpbam.app.report.groups import groups
from dpbam.app.report.html import build, render, report_figures
from dpbam.app.report.records import ReportError, Run, read_runs
from dpbam.app.runs.run import RunError
from dpbam.catalogue import FIGURES

PathLike = str | Path


def write_report(
    runs: Sequence[PathLike], out: PathLike, *, publishable: bool = False,
    public_test_data: bool = False, title: str | None = None, figures: PathLike | None = None,
) -> Path:  # fmt: skip
    """Write one self-contained HTML page about one run or several.

    Args:
        runs: run folders, or folders of runs, such as a comparison.
        out: the page, or a folder to put ``report.html`` into.
        publishable: leave out everything about the training data that no noise protects, and,
            unless ``public_test_data``, what is about the test records.
        public_test_data: the test records are not sensitive.
        title: the page's title; None makes one.
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
