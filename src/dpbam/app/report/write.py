"""From run folders to files: the page, and figures with their data beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from dpbam.app.report.catalogue import BUILDERS, build
from dpbam.app.report.figure import Figure
from dpbam.app.report.groups import groups
from dpbam.app.report.html import render, report_figures
from dpbam.app.report.records import ReportError, read_runs
from dpbam.app.runs.run import RunError

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
    with _damage_told(runs):
        read = read_runs(runs)
        page = render(
            read, publishable=publishable, public_test_data=public_test_data, title=title,
            written=datetime.now(),
        )  # fmt: skip
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace")  # half a character, in a hostile name
    if figures is not None:
        if publishable:
            read = [run.publishable(public_test_data=public_test_data) for run in read]
        with _damage_told(runs):
            sections = report_figures(
                groups(read), publishable=publishable, public_test_data=public_test_data
            )
            write_figures([f for fs in sections.values() for f in fs if f.panels], figures)
    return path


def write_figures(figures: Sequence[Figure], folder: PathLike) -> list[Path]:
    """Each figure as ``name.pdf`` and ``name.csv``; the paths."""
    from dpbam.app.report import plots

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        written.append(plots.save(figure, folder / f"{figure.name}.pdf"))
        table = folder / f"{figure.name}.csv"
        table.write_text(figure.to_csv(), encoding="utf-8", errors="replace")
        written.append(table)
    return written


def draw(name: str, runs: Sequence[PathLike], out: PathLike) -> Path:
    """Draw one figure alone; ``out`` ends in .pdf, .svg or .png, or in .csv for its data.

    Raises:
        ReportError: if there is no such figure, or nothing to draw.

    Example: the paper's Figure 1 needs no run.
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw("clipping", [], f"{folder}/clipping.svg").name
        'clipping.svg'
    """
    if name in BUILDERS and name != "clipping" and not runs:
        raise ReportError(f"name the runs to draw {name!r} of")
    with _damage_told(runs):
        return _drawn(build(name, groups(read_runs(runs))), Path(out))


def _drawn(figure: Figure, path: Path) -> Path:
    """As a table, or as a picture."""
    if path.suffix.lower() == ".csv":
        if not figure.panels:
            raise ReportError(f"there is no data for {figure.name!r}: {figure.missing}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(figure.to_csv(), encoding="utf-8", errors="replace")
        return path
    from dpbam.app.report import plots

    return plots.save(figure, path)


@contextmanager
def _damage_told(runs: Sequence[PathLike]) -> Iterator[None]:
    """A file may be whole JSON and yet not be what a run writes: that is damage, and no bug."""
    try:
        yield
    except (ReportError, RunError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        where = ", ".join(str(run) for run in runs)
        said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ReportError(
            f"a file in {where} lacks a field, or has one of the wrong kind ({said}): restore it "
            "from a backup; DPBAM_TRACEBACK=1 shows where it was read"
        ) from error
