"""``dpbam report`` and ``dpbam plot``: a page about runs, and one figure alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.output import note, option, say
from dpbam.catalogue import FIGURES
from dpbam.errors import ArgumentError

_NAMES = ", ".join(FIGURES)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None,
        option("The page. By default in the run's folder, or here for several."),
    ] = None,
    publishable: Annotated[
        bool, option("Leave out everything that privacy does not protect.", "--publishable")
    ] = False,
    public_test_data: Annotated[
        bool,
        option("The test records are not sensitive: keep accuracy.", "--public-test-data"),
    ] = False,
    figures: Annotated[Path | None, option("A folder for each figure as PDF and CSV.")] = None,
    title: Annotated[str | None, option("The page's title.")] = None,
) -> None:
    """Write one self-contained HTML page about one run, or several side by side.

    Privacy statement, accuracy, clipping bias, norms, configuration. Panels that show the training
    data without noise are marked; --publishable leaves them out, and their data. A statement that
    the run's ledger or its other files contradict is refused.

    Examples:
        $ dpbam report runs/digits
        $ dpbam report runs/both --out comparison.html --figures figures
        $ dpbam report runs/digits --publishable --public-test-data --out public.html
    """
    from dpbam.app.report import write_report

    folders = _folders(runs)
    page = write_report(
        folders, out or _place(folders, publishable), publishable=publishable,
        public_test_data=public_test_data, title=title, figures=figures,
    )  # fmt: skip
    say(str(page))
    if not publishable:
        note("For the operator only; --publishable writes a page that may be published.")


def plot(
    figure: Annotated[
        str | None, typer.Argument(metavar="FIGURE", help=f"One of {_NAMES}.")
    ] = None,
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders.")
    ] = None,
    out: Annotated[Path | None, option("A .pdf, .svg, .png, or .csv for the data.")] = None,
) -> None:
    """Draw one figure of one run or several, or write its data.

    A figure that shows data without noise is marked on the picture.

    Examples:
        $ dpbam plot accuracy runs/digits --out accuracy.pdf
        $ dpbam plot bias runs/both --out bias.csv
    """
    if figure is None:
        raise ArgumentError(f"plot needs the name of a figure, one of {_NAMES}")
    if out is None:
        raise ArgumentError("plot needs --out, the file: a .pdf, .svg or .png, or .csv for data")
    from dpbam.app.report import draw

    say(str(draw(figure, _folders(runs or []), out)))


def _folders(paths: list[Path]) -> list[Path]:
    """Of several paths, as ``runs/*`` gives them, keep the folders."""
    return [path for path in paths if path.is_dir() or len(paths) == 1]


def _place(folders: list[Path], publishable: bool) -> Path:
    """Return the page's path; the operator's page of one run is not where runs are published."""
    name = "report-publishable.html" if publishable else "report.html"
    if len(folders) != 1:
        return Path(name)
    secret = not publishable and (folders[0] / "config.toml").exists()
    return folders[0] / "non-private" / name if secret else folders[0] / name
