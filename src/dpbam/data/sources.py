"""What a source of data takes, the options, and what it returns: one table per split."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dpbam._names import did_you_mean
from dpbam.data.base import DataError, Images, Window
from dpbam.data.dataset import TASKS, DataSet

_LARGEST = 4096


@dataclass
class Findings:
    """What is collected while a data set is loaded, so that one pass finds all of it.

    Attributes:
        problems: one sentence each.
        notes: remarks for the operator, such as what was ignored.
        thorough: whether everything is looked at, as ``dpbam data check`` does: the headers of all
            image files, and images of other sizes as well.
        sizes: (H, W) of the image files whose headers were read.
        cut_short: whether the list of records could not be read to its end, so that no count of
            them would be right.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    thorough: bool = False
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    cut_short: bool = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the problems of a DataError instead of raising it."""
        try:
            yield
        except DataError as error:
            self.problems += error.problems

    @property
    def failed(self) -> bool:
        """Whether a set is loaded for use and has problems, so that no image need be opened."""
        return bool(self.problems) and not self.thorough

    def stop(self) -> None:
        """Raise the problems so far, unless everything is looked at."""
        if self.failed:
            raise DataError(*self.problems)


@dataclass(frozen=True)
class Options:
    """How to load a data set; the arguments of :func:`dpbam.data.load`.

    Records that cannot be used are left out, and their problems collected in ``findings``; who
    loads the set raises them together.
    """

    root: str | Path | None = None
    image_size: int | tuple[int, int] | None = None
    channels: int | None = None
    unit: str | None = None
    download: bool = True
    progress: bool = False
    task: str | None = None
    label_columns: Sequence[str] = ()
    dicom_window: Window | None = None
    findings: Findings = field(default_factory=Findings)

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
    def resizes(self) -> bool:
        """Whether images of other sizes are resized; in a check, so that all can be read."""
        return self.size is not None or self.findings.thorough

    @property
    def folder(self) -> Path:
        """The data root."""
        return data_root(self.root)


@dataclass(frozen=True)
class Table:
    """One split of a source: what is known of its records before an image is decoded.

    Attributes:
        name: to display, such as ``scans/train``.
        labels: of each record as the source has them: numbers or texts [N] or [N, L], or masks
            [N, H, W]. None: they are ``open_masks``, or cannot be read (while a set is checked).
        open_images: returns the images; called only where no table of the source has a problem.
        open_masks: likewise of masks in files; None: the labels are in ``labels``.
        columns: further facts about each record, [N] each.
        class_names: the classes in their order, where the source fixes them.
        task: what the labels mean, where the source fixes it.
        unit: whom privacy is promised to, where the source knows it.
        places: where each record is to be found, for messages; empty: its number.
    """

    name: str
    labels: NDArray[Any] | None
    open_images: Callable[[], Images]
    open_masks: Callable[[], Images] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    class_names: Sequence[str] | None = None
    task: str | None = None
    unit: str | None = None
    places: Sequence[str] = ()

    def place(self, index: int) -> str:
        """Return where a record is to be found: its line in a file, its path or its number."""
        return self.places[index] if self.places else f"record {index}"


Splits = Mapping[str, Table | DataSet]
"""What a source returns: "train", and "test" or "val" if it has them; a DataSet stays as it is."""


def data_root(root: str | Path | None = None) -> Path:
    """Where downloads live: ``root``, else the environment's DPBAM_DATA, else ``~/.cache/dpbam``.

    Example:
        >>> data_root("/data").as_posix()
        '/data'
    """
    chosen = root or os.environ.get("DPBAM_DATA") or Path.home() / ".cache" / "dpbam"
    return Path(chosen).expanduser()
