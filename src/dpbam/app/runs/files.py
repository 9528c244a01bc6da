"""The files of a run folder: written whole or not at all, JSON, their format, and locks.

A file's format is a number, so that another version can read or refuse it.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import JsonValue

from dpbam import _jsonl
from dpbam._jsonl import sync_folder
from dpbam.app.runs.run import RunError

FORMAT = 4  # CONTRIBUTING.md says when it grows


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write the whole file or leave the old one: temporary file, fsync, rename, fsync the folder.

    Raises:
        RunError: if the disk is full or the place cannot be written; then nothing has changed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomic(Path(folder) / "a.txt", "hello")
        ...     [p.name for p in Path(folder).iterdir()]
        ['a.txt']
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error


class DiskError(RunError):
    """A file that cannot be written: ``problem`` is the sentence without the way out."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem}: {hint}")
        self.problem = problem


def disk_error(path: Path, error: OSError) -> DiskError:
    """Return the error for a file that cannot be written."""
    hint = "free some space, then resume" if error.errno == errno.ENOSPC else "fix it, and retry"
    return DiskError(f"{path} cannot be written ({error.strerror or error})", hint)


def write_json(path: Path, values: Any) -> None:
    text = json.dumps(plain(values), indent=2).replace("\x7f", "\\u007f")  # the rest is ASCII
    write_atomic(path, text + "\n")


def read_json(path: Path) -> dict[str, JsonValue]:
    """Read a JSON object; RunError if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # lists within lists within lists
        raise RunError(f"{path} is damaged ({error}): restore it from a backup") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def append_json_line(path: Path, values: Mapping[str, object]) -> None:
    """Append a line; on return it survives the end of the process."""
    try:
        _jsonl.append(path, plain(values))
    except OSError as error:
        raise disk_error(path, error) from error


def read_json_lines(path: Path) -> list[_jsonl.Row]:
    """Return the rows of all whole lines; a torn last one is left out."""
    return _jsonl.read(path, error=RunError)


def plain(value: Any) -> Any:
    """Replace what JSON does not have: NaN by null, infinity by "infinite" or "-infinite".

    :func:`read_number` is the inverse.
    """
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    return value


def read_number(value: object) -> object:
    """Return the number that :func:`plain` has a word for; anything else unchanged.

    Example:
        >>> read_number("-infinite"), read_number(1.5), read_number("many")
        (-inf, 1.5, 'many')
    """
    words = {"infinite": math.inf, "-infinite": -math.inf}
    return words.get(value, value) if isinstance(value, str) else value


@contextmanager
def locked(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock file at ``path``; the system frees it when the process ends, however it does.

    Args:
        path: the lock file, created if missing.
        busy: the RunError if another process holds it; None waits for it.
    """
    # the file stays: if it were removed, a process that waits for it and one that makes it anew
    # could both hold "the" lock. No lock by a file's existence: one would survive a killed process
    lock = FileLock(
        path, mode=0o644, timeout=0 if busy else -1, preserve_lock_file=True, fallback_to_soft=False
    )
    try:
        path.parent.stat()  # a missing folder is an error, not made
        lock.acquire()
    except Timeout:
        raise RunError(str(busy)) from None
    except OSError as error:
        raise disk_error(path, error) from error
    try:
        yield
    finally:
        lock.release()


def check_format(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a file of a format that this version cannot read.

    Example:
        >>> check_format(Path("model.json"), {"format": 7})
        Traceback (most recent call last):
        dpbam.app.runs.run.RunError: model.json is of format 7, and this dpbam reads format 4: ...
    """
    number = values.get("format")
    is_number = type(number) is int and number > 0
    if is_number and number == FORMAT:
        return
    way = "use the dpbam that wrote it" if is_number else "restore it from a backup"
    raise RunError(f"{path} is of format {number!r}, and this dpbam reads format {FORMAT}: {way}")
