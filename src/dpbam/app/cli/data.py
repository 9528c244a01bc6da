"""``dpbam data``: which data sets there are, fetching them, checking your own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dpbam.app.cli.flags import settings_as_flags
from dpbam.app.cli.output import Json, facts, option, print_json, printable, say, table
from dpbam.app.runs.config import RunConfig
from dpbam.catalogue import SOURCES, Arguments
from dpbam.data import DataSet, data_root, load_pair
from dpbam.data import check as find_problems
from dpbam.data.base import counted
from dpbam.data.checking import Summary, summarise
from dpbam.data.registry import inspect
from dpbam.data.sources import Options

_SPLITS = {"train": "to train on", "test": "to test"}
_SHOWN = 50  # problems
_MOST = 12  # classes, sizes or columns in a line

Spec = Annotated[str, typer.Argument(metavar="DATA", help="A name, a path, or module:function.")]
Root = Annotated[Path | None, option("Where downloads live (or set DPBAM_DATA).")]
_FLAGS = {"image_size", "channels", "dicom_window", "task", "label_columns", "unit"}  # of a run


def list_(json: Json = False) -> None:
    """List every kind of data set, and how to ask for it.

    Examples:
        $ dpbam data list
        $ dpbam data list --json
    """
    sources = list(SOURCES.values())
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
    for dataset in pair:
        print(_describe(dataset))


def check(data: Spec, flags: Arguments, root: Root = None, json: Json = False) -> None:
    """Read every image of a data set; list what it holds and all that is wrong with it.

    Exit code 2 if anything is. What it prints is not protected by privacy: for the operator, do not
    share it.

    Examples:
        $ dpbam data check digits
        $ dpbam data check ./scans --unit patient --json
    """
    findings, parts = inspect(data, Options(root=root, download=False, **flags))
    problems, unit = findings.problems, flags.get("unit")
    if parts:
        first, *other = parts.values()
        unit = unit or first.unit
        problems += find_problems(first, *other, unit=unit)
        problems = list(dict.fromkeys(problems))
    contents = summarise(parts, findings, unit)
    if json:
        values = {} if contents is None else asdict(contents)
        print_json({"data": data, "problems": problems, "summary": values})
    else:
        if contents is not None:
            say(facts(_describe_set(contents)))
        for problem in problems[:_SHOWN]:
            say(f"- {printable(problem)}")
        if len(problems) > _SHOWN:
            say(f"- and {len(problems) - _SHOWN} more, which --json lists")
        say(f"{data}: {counted(len(problems), 'problem') if problems else 'no problems'}")
    if problems:
        raise typer.Exit(2)


def _describe_set(contents: Summary) -> dict[str, object]:
    """Return the summary in words."""
    splits = [f"{count} {_SPLITS[split]}" for split, count in contents.images.items()]
    rows: dict[str, object] = {"images": f"{', '.join(splits)}; {contents.kind}"}
    if len(contents.sizes) > 1:
        rows["sizes"] = _listed([f"{size} ({n})" for size, n in contents.sizes.items()])
    rows["task"] = contents.task or "unknown: the labels cannot be used"
    if contents.classes:
        each = [f"{name} ({sum(n.values())})" for name, n in contents.classes.items()]
        rows["classes"] = f"{len(each)}: {_listed(each)}"
    if units := contents.units:
        counts = [f"{units.count[split]} {_SPLITS[split]}" for split in contents.images]
        most = counted(units.most_images, "image")
        alike = units.most_images == units.fewest_images
        images = most if alike else f"{units.fewest_images} to {most}"
        rows[f"{units.column}s"] = f"{', '.join(counts)}; {images} each"
    if contents.columns:
        rows["columns"] = _listed(
            [f"{name} ({counted(k, 'value')})" for name, k in contents.columns.items()]
        )
    rows["memory"] = f"{contents.bytes_of_pixels / 2**20:.1f} MiB of pixels, {contents.read}"
    if contents.notes:
        rows["notes"] = "; ".join(contents.notes)
    return rows


def _listed(items: list[str]) -> str:
    more = f", and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return ", ".join(items[:_MOST]) + more


def _describe(dataset: DataSet) -> str:
    channels, height, width = dataset.shape
    kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
    images = f"{len(dataset)} {kind} images {height}x{width}"
    return f"{dataset.name}: {images}, {dataset.num_classes} classes"


COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_,
    "fetch": fetch,
    "check": settings_as_flags(leave_out=set(RunConfig.model_fields) - _FLAGS)(check),
}
