"""What every source of data takes, the options, and what it returns: one opener per split."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dpbam._names import did_you_mean
from dpbam.data.base import DataError, Window
from dpbam.data.dataset import TASKS, DataSet

Openers = Mapping[str, Callable[[], DataSet]]
"""From split ("train", "test", "val") to the function that reads it: only what is used is read."""

_RECORD = "record"  # the unit of privacy that needs no column
_LARGEST = 4096


@dataclass
class Findings:
    """What is collected while a data set is loaded.

    Attributes:
        problems: one sentence each.
        thorough: whether everything is looked at, as ``dpbam data check`` does: the headers of all
            image files, and images of other sizes as well.
        sizes: (H, W) of the image files whose headers were read.
    """

    problems: list[str] = field(default_factory=list)
    thorough: bool = False
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Options:
    """How to load a data set; the arguments of :func:`dpbam.data.load`.

    With ``findings``, records that cannot be used are left out and their problems collected, so
    that one pass over a set finds all of them.
    """

    root: str | Path | None = None
    image_size: int | tuple[int, int] | None = None
    channels: int | None = None
    unit: str | None = None
    download: bool = True
    progress: bool = False
    task: str | None = None
    label_columns: Sequence[str] = ()
    findings: Findings | None = None
    dicom_window: Window | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, *TASKS):
            raise DataError(f"task {self.task!r} is unknown: {did_you_mean(self.task, TASKS)}")
        size = self.size
        if size is not None and not (len(size) == 2 and all(1 <= s <= _LARGEST for s in size)):
            raise DataError(
                f"image_size must be one or two numbers in 1..{_LARGEST}, got {self.image_size}"
            )
        if self.channels not in (None, 1, 3):
            raise DataError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels!r}")
        centre, width = self.dicom_window or (0.0, 1.0)
        if not (math.isfinite(centre) and 1 <= width < math.inf):
            raise DataError(
                f"dicom_window must be a centre and a width of at least 1, got {centre:g}:{width:g}"
            )

    @property
    def size(self) -> tuple[int, int] | None:
        """``image_size`` as (H, W)."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @property
    def unit_column(self) -> str | None:
        """The column of the unit of privacy; None if every record is a unit."""
        return None if self.unit == _RECORD else self.unit

    @property
    def thorough(self) -> bool:
        """Whether a set is checked, not loaded for use."""
        return self.findings is not None and self.findings.thorough

    @property
    def failed(self) -> bool:
        """Whether a set that is loaded for use has problems, so that the rest need not be read."""
        return self.findings is not None and bool(self.findings.problems) and not self.thorough

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect a DataError among the findings; without them, let it pass."""
        try:
            yield
        except DataError as error:
            if self.findings is None:
                raise
            self.findings.problems += error.problems

    @property
    def folder(self) -> Path:
        """The data root."""
        return data_root(self.root)


def data_root(root: str | Path | None = None) -> Path:
    """Where downloads live: ``root``, else the environment's DPBAM_DATA, else ``~/.cache/dpbam``.

    Example:
        >>> data_root("/data").as_posix()
        '/data'
    """
    chosen = root or os.environ.get("DPBAM_DATA") or Path.home() / ".cache" / "dpbam"
    return Path(chosen).expanduser()
