"""Arrays too large for memory, kept once as ``.npy`` under the data root and memory-mapped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import DataError
from dpbam.data.fetch import atomic


def mapped(source: Path, part: str, folder: Path, write: Callable[[Path], None]) -> NDArray[Any]:
    """The array ``part`` of ``source``, memory-mapped from ``folder / "converted"``.

    Args:
        source: the file it comes from; the copy is made anew when its size or time changes.
        part: which of the source's arrays.
        folder: the data root.
        write: writes the array as ``.npy`` to the path it is given; called if there is no copy.
    """
    try:
        stat = source.stat()
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror}") from error
    identity = f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns} {part}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = folder / "converted" / f"{source.name}-{part}-{key}.npy"
    if not path.exists():
        with atomic(path) as temporary:
            try:
                write(temporary)
            except OSError as error:
                raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
