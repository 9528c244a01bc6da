"""The format of a run folder's files: a number, so that another version can read or refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpbam.app.runs.result import RunError

FORMAT = 2  # docs/formats.md says when it grows
_OLDEST = 1


def check_format(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a file of a format that this version cannot read.

    A file without a number was written before there were numbers, in format 1.

    Raises:
        RunError: naming the file, its format, and which version to use.

    Example:
        >>> check_format(Path("model.json"), {"format": 7})
        Traceback (most recent call last):
        dpbam.app.runs.result.RunError: model.json is of format 7, and this dpbam reads...
    """
    found = values.get("format", 1)
    if isinstance(found, int) and _OLDEST <= found <= FORMAT:
        return
    newer = isinstance(found, int) and found > FORMAT
    way = "use a newer dpbam, or the one that wrote it" if newer else "restore it from a backup"
    raise RunError(
        f"{path} is of format {found!r}, and this dpbam reads formats up to {FORMAT}: {way}"
    )


def current_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration in the words of the current format.

    Format 1 called standard noise "fast".

    Example:
        >>> current_config({"noise": "fast", "lr": 0.1})
        {'noise': 'standard', 'lr': 0.1}
    """
    return {**values, "noise": "standard"} if values.get("noise") == "fast" else dict(values)
