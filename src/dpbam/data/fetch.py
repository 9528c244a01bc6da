"""Download an archive and unpack it; write a file completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dpbam.data.base import DataError, require

_BLOCK = 2**20
_TIMEOUT = 60.0  # seconds without a byte


def download(url: str, md5: str, folder: Path, *, progress: bool = False) -> Path:
    """Download a file into ``folder`` with pooch, which checks its md5 before it appears there.

    Args:
        url: its last part becomes the file's name.
        md5: the published checksum.
        folder: is created if needed.
        progress: show a progress bar on standard error.
    """
    pooch = require("pooch", "a download")
    _make_folder(folder)
    if progress:
        _share_bars_among_threads()
    pooch.get_logger().setLevel("WARNING")
    name = url.rpartition("/")[2]
    downloader = pooch.HTTPDownloader(progressbar=progress, chunk_size=_BLOCK, timeout=_TIMEOUT)
    try:
        return Path(pooch.retrieve(url, f"md5:{md5}", name, folder, downloader=downloader))
    except (OSError, ValueError) as error:  # the exceptions of requests are OSErrors
        raise DataError(
            f"cannot download {url} ({error}): get {name} by other means and put it into {folder}"
        ) from error


def _share_bars_among_threads() -> None:
    """Give tqdm a lock of threads, unless it has one.

    Its own is one of processes too, which would fix the way in which the caller starts processes.
    """
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):
        tqdm.set_lock(threading.RLock())


def verify(path: Path, md5: str) -> None:
    """Refuse a file whose md5 is not the published one."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    if digest != md5:
        raise DataError(
            f"{path} has md5 {digest}, not {md5}: it is truncated or not the official file, so "
            "remove it and fetch it again"
        )


def extract(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Write the named members of a tar archive flat into ``folder``: all of them, or none.

    Other members are not read, and links are not followed, so the archive cannot write elsewhere.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with tarfile.open(archive) as tar:
            for member in members:
                _extract_one(tar, member, temporary / Path(member).name, archive)
        if not folder.exists():  # otherwise another process was faster
            temporary.rename(folder)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive} cannot be unpacked ({error}): it may be truncated") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract_one(tar: tarfile.TarFile, member: str, to: Path, archive: Path) -> None:
    try:
        source = tar.extractfile(member)
    except KeyError:
        source = None
    if source is None:
        raise DataError(f"{archive} has no file {member}: it is not the official archive")
    with source, to.open("wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; on success it becomes ``path``.

    Only the owner can read the file, since it may hold private data.
    """
    _make_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror}") from error
