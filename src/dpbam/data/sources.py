"""What a source is: a function from its argument and the options to one opener a split."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dpbam.data.dataset import DataSet

Openers = Mapping[str, Callable[[], DataSet]]
"""From split ("train", "test", "val") to the function that opens it, so that only that is read."""

Progress = Callable[[int, int | None], None]
"""Told the bytes downloaded so far, and in all where the server says."""


@dataclass(frozen=True)
class Options:
    """How to load, whatever the source.

    Attributes:
        root: where downloads and converted files live; None: :func:`data_root`'s default.
        image_size: (H, W) to resize image files to; None: they must agree.
        channels: 1 or 3 to convert them to; None: grey if they are.
        unit: the column whose equal values must not straddle a held-out split.
        download: whether a missing archive may be downloaded.
        progress: told how a download is getting on.
    """

    root: Path | None = None
    image_size: tuple[int, int] | None = None
    channels: int | None = None
    unit: str | None = None
    download: bool = True
    progress: Progress | None = None

    @property
    def folder(self) -> Path:
        """``root``, else the environment's DPBAM_DATA, else ``~/.cache/dpbam``."""
        return data_root(self.root)


Source = Callable[[str, Options], Openers]
"""Takes what follows the name in a spec ("" for nothing), or the whole spec of a path."""


def data_root(root: str | Path | None = None) -> Path:
    """Where downloads live: ``root``, else the environment's DPBAM_DATA, else ``~/.cache/dpbam``.

    Example:
        >>> data_root("/data").as_posix()
        '/data'
    """
    chosen = root or os.environ.get("DPBAM_DATA") or Path.home() / ".cache" / "dpbam"
    return Path(chosen).expanduser()
