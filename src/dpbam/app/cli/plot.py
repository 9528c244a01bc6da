"""``dpbam plot``: one figure alone, for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.output import examples

EXAMPLES = examples(
    "dpbam plot accuracy runs/digits --out accuracy.pdf",
    "dpbam plot bias runs/both --out bias.csv",
    "dpbam plot clipping --out figure-1.svg",
)
_NAMES = (
    "accuracy, classes, confusion, groups, bias, decomposition, direction, noise, relative-bias, "
    "alignment, batch-size, norms, histogram, clip-share, loss, layers, flatness, released-norms, "
    "released-clipping; or clipping, without a run"
)


def run(
    figure: Annotated[str, typer.Argument(metavar="FIGURE", help=f"One of {_NAMES}.")],
    out: Annotated[Path, typer.Option(help="A .pdf, .svg, .png, or .csv for the data.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders.")
    ] = None,
) -> None:
    """Draw one figure of one run or several, or write its data.

    A figure that shows data without noise is marked on the picture.
    """
    from dpbam.app.report import draw

    print(draw(figure, [path for path in runs or [] if path.is_dir() or len(runs or []) == 1], out))
