"""``dpbam report``: one HTML page about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.output import console, examples

EXAMPLES = examples(
    "dpbam report runs/digits",
    "dpbam report runs/both --out comparison.html --figures figures",
    "dpbam report runs/digits --publishable --public-test-data --out public.html",
)


def run(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page. By default in the run's folder, or here for several."),
    ] = None,
    publishable: Annotated[
        bool, typer.Option("--publishable", help="Leave out everything that is not private.")
    ] = False,
    public_test_data: Annotated[
        bool,
        typer.Option(
            "--public-test-data", help="The test records are not sensitive: keep accuracy."
        ),
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="A folder for each figure as PDF and CSV.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
) -> None:
    """Write one self-contained HTML page about one run, or several side by side.

    Privacy statement, accuracy, clipping bias, norms, configuration. Panels that show the training
    data without noise are marked; --publishable leaves them out, and their data.
    """
    from dpbam.app.report import write_report

    folders = [path for path in runs if path.is_dir() or len(runs) == 1]  # of runs/*, the folders
    page = write_report(
        folders, out or _place(folders, publishable), publishable=publishable,
        public_test_data=public_test_data, title=title, figures=figures,
    )  # fmt: skip
    print(page)
    if not publishable:
        note = "For the operator only; --publishable writes a page that may be published."
        console(stderr=True).print(note, markup=False, soft_wrap=True)


def _place(folders: list[Path], publishable: bool) -> Path:
    """Of one run, a page for the operator goes where nobody publishes from."""
    name = "report-publishable.html" if publishable else "report.html"
    if len(folders) != 1:
        return Path(name)
    secret = not publishable and (folders[0] / "config.toml").exists()
    return folders[0] / "non-private" / name if secret else folders[0] / name
