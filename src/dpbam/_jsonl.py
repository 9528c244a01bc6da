"""Files with one JSON object per line.

A crash in the middle of an append leaves a last line without its line end. :func:`read` leaves that
line out; before more is appended to the file, :func:`repair` removes it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpbam.errors import ArgumentError, DPBAMError

Row = dict[str, Any]
#: what ``json.loads`` raises for bytes that are no JSON, or nested too deeply
INVALID = (ValueError, RecursionError)


def append(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append a line per row. On return they survive the end of the process.

    Raises:
        OSError: if they cannot be written; then the file is as before.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
        >>> append(path, {"step": 1}, {"step": 2})
        >>> read(path)
        [{'step': 1}, {'step': 2}]
    """
    _append(path, rows, sync=False)


def append_durably(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append as :func:`append` does. On return they survive a loss of power, too.

    Who creates the file calls :func:`sync_folder`: its name must be on disk as well.
    """
    _append(path, rows, sync=True)


def _append(path: Path, rows: tuple[Mapping[str, Any], ...], *, sync: bool) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with path.open("ab", buffering=0) as file:
        end, written = file.tell(), 0
        try:
            written = file.write(lines)
            if written != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the disk is full
            if sync:
                os.fsync(file.fileno())
        except OSError:
            # a full disk must not leave half a line for the next row; rows of another process stay
            if os.fstat(file.fileno()).st_size <= end + written:
                file.truncate(end)
            raise


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk itself: a new or renamed file is safe only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, *, error: type[DPBAMError] = ArgumentError) -> list[Row]:
    """Return the rows of all whole lines; a missing file has none.

    Raises:
        error: if a whole line is not a JSON object.
    """
    if not path.exists():
        return []
    lines = enumerate(path.read_bytes().split(b"\n")[:-1], 1)
    return [_row(line, f"{path} line {number}", error) for number, line in lines if line]


def _row(line: bytes, where: str, error: type[DPBAMError]) -> Row:
    try:
        row = json.loads(line)
    except INVALID as reason:
        raise error(f"{where} is not JSON ({reason}): restore the file from a backup") from None
    if not isinstance(row, dict):
        raise error(f"{where} is not an object of names and values: restore the file from a backup")
    return row


def repair(path: Path, is_row: Callable[[bytes], bool]) -> None:
    """Complete or remove a last line without a line end.

    Args:
        path: the file.
        is_row: whether a line is complete but for its line end, which an editor may have removed.
            Such a line is kept; any other is an append that did not finish, and is removed.
    """
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1  # of the last complete line
    if end == len(raw):
        return
    with path.open("r+b") as file:
        if is_row(raw[end:]):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(end)
