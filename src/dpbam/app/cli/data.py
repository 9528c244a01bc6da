"""``dpbam data``: which data sets there are, fetching them, checking one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.output import Json, option, print_json, say, table
from dpbam.data import DataError, DataSet, data_root, list_sources, load_pair
from dpbam.data import check as find_problems

Spec = Annotated[str, typer.Argument(metavar="DATA", help="A name, a path, or module:function.")]
Root = Annotated[Path | None, option("Where downloads live (or set DPBAM_DATA).")]
ImageSize = Annotated[int | None, option("Side to resize a folder's images to.")]
Channels = Annotated[int | None, option("1 (grey) or 3 (RGB) to convert them to.")]
Unit = Annotated[str | None, option("Column of the unit of privacy, e.g. patient.")]


def list_(json: Json = False) -> None:
    """List every kind of data set, and how to ask for it.

    Examples:
        $ dpbam data list
        $ dpbam data list --json
    """
    sources = list_sources()
    if json:
        keys = ("name", "spec", "summary", "downloads")
        print_json([{key: getattr(info, key) for key in keys} for info in sources])
        return
    rows = [(s.spec, s.summary, "yes" if s.downloads else "") for s in sources]
    say(table(("--data", "what it is", "fetched"), rows, left=3))
    say(f"Downloads live in {data_root()}; DPBAM_DATA changes that.")


def fetch(name: Spec, root: Root = None) -> None:
    """Download a data set, if it is not there, and check its checksum.

    Examples:
        $ dpbam data fetch cifar10
        $ dpbam data fetch hf:mnist
    """
    pair = load_pair(name, root=root, progress=sys.stderr.isatty())
    for part in pair:
        print(_describe(part))


def check(
    data: Spec,
    root: Root = None,
    image_size: ImageSize = None,
    channels: Channels = None,
    unit: Unit = None,
    json: Json = False,
) -> None:
    """Read every image of a data set and list what is wrong with it; exit code 2 if anything is.

    What it prints is about private records: for the operator, not for publication.

    Examples:
        $ dpbam data check digits
        $ dpbam data check ./scans --unit patient --json
    """
    try:
        train, test = load_pair(
            data, root=root, image_size=image_size, channels=channels, unit=unit, download=False
        )
    except DataError as error:
        problems = [str(error)]
    else:
        problems = find_problems(train, test, unit=unit)
    if json:
        print_json({"data": data, "problems": problems})
    else:
        for problem in problems:
            print(f"- {problem}")
        print(f"{data}: {_count(len(problems))}")
    if problems:
        raise typer.Exit(2)


def _describe(part: DataSet) -> str:
    channels, height, width = part.shape
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
    return f"{part.name}: {len(part)} {kind} images {height}x{width}, {part.num_classes} classes"


def _count(problems: int) -> str:
    if not problems:
        return "no problems found"
    return f"{problems} problem{'s' if problems > 1 else ''}"


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "fetch": fetch, "check": check}
