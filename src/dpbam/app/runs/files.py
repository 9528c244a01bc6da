"""Files that survive a crash: whole or not there at all, and locks that die with their process."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpbam import _jsonl
from dpbam._jsonl import sync_folder
from dpbam.app.runs.result import RunError


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


def disk_error(path: Path, error: OSError) -> RunError:
    """What to tell the operator about a file that cannot be written."""
    hint = "free some space, then resume" if error.errno == errno.ENOSPC else "see to it, and retry"
    return RunError(f"{path} cannot be written ({error.strerror or error}): {hint}")


def write_json(path: Path, values: Any) -> None:
    """Plain values as JSON, atomically."""
    write_atomic(path, json.dumps(plain(values), indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        RunError: if it is not there, or not a JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # lists within lists within lists
        raise RunError(f"{path} is damaged ({error}): restore it from a backup") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def append_json_line(path: Path, values: dict[str, Any]) -> None:
    """Append a line; on return it survives the end of the process."""
    try:
        _jsonl.append(path, plain(values))
    except OSError as error:
        raise disk_error(path, error) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of all whole lines; a torn last one is left out."""
    return _jsonl.read(path, error=RunError)


def keep_json_lines(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Drop the lines of steps after ``last_step``, which a resumed run takes again."""
    if not path.exists():
        return []
    kept = [line for line in read_json_lines(path) if line["step"] <= last_step]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null and the word "infinite"."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "infinite"
    return value


@contextmanager
def locked(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock file at ``path``. The system frees it when its process ends, however it ends.

    Args:
        path: the lock file, created if missing.
        busy: what to say if another process holds it; None waits for it.

    Raises:
        RunError: with ``busy``.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(path, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise RunError(str(busy)) from None
        yield
    finally:
        os.close(handle)  # which frees the lock
