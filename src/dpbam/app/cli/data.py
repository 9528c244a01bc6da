"""``dpbam data``: which data sets there are, fetching them, checking one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dpbam.app.cli.output import Json, facts, option, print_json, printable, say, table
from dpbam.data import DataSet, data_root, list_sources, load_pair
from dpbam.data import check as find_problems
from dpbam.data.registry import inspect
from dpbam.data.sources import Options
from dpbam.data.summary import summary

_SPLITS = {"train": "to train on", "test": "to test"}
_SHOWN = 50  # problems
_MOST = 12  # classes, sizes or columns in a line

Spec = Annotated[str, typer.Argument(metavar="DATA", help="A name, a path, or module:function.")]
Root = Annotated[Path | None, option("Where downloads live (or set DPBAM_DATA).")]
ImageSize = Annotated[int | None, option("Side to resize a folder's images to.")]
Channels = Annotated[int | None, option("1 (grey) or 3 (RGB) to convert them to.")]
Task = Annotated[
    str | None, option("single-label, multi-label, regression or segmentation [from the labels].")
]
LabelColumn = Annotated[
    list[str] | None, option("A column of labels.csv that holds labels; repeatable.")
]
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
    task: Task = None,
    label_column: LabelColumn = None,
    json: Json = False,
) -> None:
    """Read every image of a data set; list what it holds and all that is wrong with it.

    Exit code 2 if anything is. What it prints is about private records: for the operator, not for
    publication.

    Examples:
        $ dpbam data check digits
        $ dpbam data check ./scans --unit patient --json
    """
    options = Options(
        root=root, image_size=image_size, channels=channels, unit=unit, download=False, task=task,
        label_columns=label_column or (),
    )  # fmt: skip
    findings, parts = inspect(data, options)
    problems = findings.problems
    if "train" in parts:
        unit = unit or parts["train"].unit
        problems = problems + find_problems(parts["train"], parts.get("test"), unit=unit)
    found = summary(parts, findings, unit)
    if json:
        print_json({"data": data, "problems": problems, "summary": found})
    else:
        if found:
            say(facts(_shown(found)))
        for problem in problems[:_SHOWN]:
            say(f"- {printable(problem)}")
        if len(problems) > _SHOWN:
            say(f"- and {len(problems) - _SHOWN} more, which --json lists")
        say(f"{data}: {_count(len(problems))}")
    if problems:
        raise typer.Exit(2)


def _shown(found: dict[str, Any]) -> dict[str, object]:
    """Return the summary in words."""
    splits = [f"{count} {_SPLITS[split]}" for split, count in found["images"].items()]
    rows: dict[str, object] = {"images": f"{', '.join(splits)}; {found['kind']}"}
    if len(found["sizes"]) > 1:
        rows["sizes"] = _listed([f"{size} ({n})" for size, n in found["sizes"].items()])
    rows["task"] = found["task"]
    if found["classes"]:
        each = [f"{name} ({sum(n.values())})" for name, n in found["classes"].items()]
        rows["classes"] = f"{len(each)}: {_listed(each)}"
    if units := found.get("units"):
        counts = [f"{units[split]} {_SPLITS[split]}" for split in found["images"]]
        most = f"{units['fewest_images']} to {units['most_images']} images each"
        rows[f"{units['column']}s"] = f"{', '.join(counts)}; {most}"
    if found["columns"]:
        rows["columns"] = _listed([f"{n} ({k} values)" for n, k in found["columns"].items()])
    rows["memory"] = f"{found['bytes_of_pixels'] / 2**20:.1f} MiB of pixels, {found['read']}"
    if found["notes"]:
        rows["notes"] = "; ".join(found["notes"])
    return rows


def _listed(items: list[str]) -> str:
    more = f", and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return ", ".join(items[:_MOST]) + more


def _describe(part: DataSet) -> str:
    channels, height, width = part.shape
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
    return f"{part.name}: {len(part)} {kind} images {height}x{width}, {part.num_classes} classes"


def _count(problems: int) -> str:
    if not problems:
        return "no problems found"
    return f"{problems} problem{'s' if problems > 1 else ''}"


COMMANDS: dict[str, Callable[..., None]] = {"list": list_, "fetch": fetch, "check": check}
