"""Downloads with checksums, and files written whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dpbam.data.base import DataError
from dpbam.data.sources import Progress

_BLOCK = 2**20
_TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class Archive:
    """A file the data set's own home page offers, with the checksum published there."""

    filename: str
    url: str
    md5: str


def obtain(archive: Archive, folder: Path, *, progress: Progress | None = None) -> Path:
    """The archive's path in ``folder``, downloaded if it is not there, its checksum checked."""
    path = folder / archive.filename
    if not path.exists():
        with atomic(path) as temporary:
            _download(archive, temporary, path, progress)
            verify(temporary, archive, remedy="the download is damaged, try again")
        return path
    verify(path, archive, remedy="it is damaged or not the official file, so remove it and fetch")
    return path


def verify(path: Path, archive: Archive, *, remedy: str) -> None:
    """Refuse a file whose md5 is not the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != archive.md5:
        raise DataError(
            f"{archive.filename} in {path.parent} has md5 {found}, not {archive.md5}: {remedy}"
        )


def extract(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Write the named members of a tar archive flat into ``folder``: all of them, or nothing.

    Only these are read, and only as plain files, so a path or a link in the archive leads nowhere.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with tarfile.open(archive) as tar:
            for member in members:
                _extract_one(tar, member, temporary / Path(member).name, archive)
        if not folder.exists():  # otherwise another process was quicker
            temporary.rename(folder)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): it may be truncated") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; on success it becomes ``path``, on failure it goes.

    The file is readable by its owner alone: it may hold private data.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise DataError(f"cannot write to {path.parent}: {error.strerror}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _download(archive: Archive, to: Path, final: Path, progress: Progress | None) -> None:
    try:
        with urllib.request.urlopen(archive.url, timeout=_TIMEOUT) as reply, to.open("wb") as file:
            length = reply.headers.get("Content-Length")
            _copy(reply, file, int(length) if length else None, progress)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot download {archive.url} ({error}): get {archive.filename} by other means and "
            f"put it into {final.parent}"
        ) from error


def _copy(source: IO[bytes], to: IO[bytes], total: int | None, progress: Progress | None) -> None:
    done = 0
    while block := source.read(_BLOCK):
        to.write(block)
        done += len(block)
        if progress:
            progress(done, total)


def _extract_one(tar: tarfile.TarFile, member: str, to: Path, archive: Path) -> None:
    try:
        source = tar.extractfile(member)
    except KeyError:
        source = None
    if source is None:
        raise DataError(f"{archive} has no file {member}: it is not the official archive")
    with source, to.open("wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)
