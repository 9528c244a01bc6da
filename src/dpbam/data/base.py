"""Random access to uint8 images in memory, memory-mapped or on disk.

A batch of images is uint8 [B, C, H, W]. Records are read by position and only when they are needed,
so a set may be larger than memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpbam.errors import DPBAMError

Pixels = NDArray[np.uint8]
Indices = NDArray[np.int64]
Window = tuple[float, float]  # centre and width, in the unit of a DICOM file's values

Value = TypeVar("Value")
Result = TypeVar("Result")
_HASH_WHOLE = 2**28  # bytes: sets up to 256 MiB are hashed completely
_HASH_RECORDS = 4096  # of a larger set this many records, evenly spaced
_HASH_DECODED = 256  # this many if every record has to be decoded first
_CHUNK = 2**24  # bytes read at once in walk


class DataError(DPBAMError, ValueError):
    """A data set that cannot be used; the message has the cause, the place and the way out.

    Attributes:
        problems: one sentence each; the message is the first of them.
    """

    def __init__(self, message: str, *further: str) -> None:
        super().__init__(message)
        self.problems = (message, *further)


def for_each(
    function: Callable[[Value, str], Result], items: Mapping[str, Value]
) -> dict[str, Result]:
    """Return ``function(value, name)`` by name; if some fail, one error has all their problems."""
    results: dict[str, Result] = {}
    problems: list[str] = []
    for name, value in items.items():
        try:
            results[name] = function(value, name)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)
    return results


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun, in the singular or plural.

    Example:
        >>> counted(1, "image"), counted(2, "class", "classes")
        ('1 image', '2 classes')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def in_short(error: BaseException) -> str:
    """Return the type and the text of an error of a user's own code, on one line.

    Example:
        >>> in_short(ValueError("no such table"))
        'ValueError: no such table'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def require(module: str, purpose: str) -> Any:
    """Import a package that ``dpbam[app]`` brings; without it, a DataError says what needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(f"{purpose} needs more packages: pip install 'dpbam[app]'") from error


class Images(ABC):
    """Random access to the N images of a set.

    Attributes:
        shape: (N, C, H, W).
        decodes: whether a record has to be decoded (a PNG, say), so that hashing all is slow.
        window: by which DICOM files are shown, in place of each file's own.
    """

    shape: tuple[int, int, int, int]
    decodes: ClassVar[bool] = False
    window: Window | None = None

    @abstractmethod
    def read(self, indices: Indices) -> Pixels:
        """Return a copy of the images at ``indices`` [B], in that order: uint8 [B, C, H, W]."""

    def select(self, indices: Indices) -> Images:
        """Return the images at ``indices`` as a set; nothing is read."""
        return Selected(self, indices)

    def describe(self, index: int) -> str:
        """Return the name of a record in messages: its path if it has one."""
        return f"record {index}"

    @property
    def paths(self) -> Sequence[str]:
        """The file of each record, relative to the set's folder; empty if they have none."""
        return ()

    def identities(self) -> list[bytes]:
        """Return what identifies each record at any position: its path, else its pixels' hash."""
        return [
            hashlib.sha256(image.tobytes()).digest() for _, chunk in self.walk() for image in chunk
        ]

    def manifest(self) -> bytes:
        """Return what differs between two versions of a set without reading it: paths and sizes."""
        return b""

    def digest(self) -> str:
        """Return SHA-256 over the shape and the pixels of every record, read in chunks."""
        digest = hashlib.sha256(repr(self.shape).encode())
        for _, pixels in self.walk():
            digest.update(np.ascontiguousarray(pixels).data)
        return digest.hexdigest()

    def walk(self, indices: Indices | None = None) -> Iterator[tuple[Indices, Pixels]]:
        """Yield all records (or those at ``indices``) in order, in chunks that fit in memory."""
        for positions in self.chunks(indices):
            yield positions, self.read(positions)

    def chunks(self, indices: Indices | None = None) -> Iterator[Indices]:
        """Yield the positions that :meth:`walk` reads at once."""
        todo = np.arange(len(self), dtype=np.int64) if indices is None else indices
        rows = max(1, _CHUNK // int(np.prod(self.shape[1:])))
        for start in range(0, len(todo), rows):
            yield todo[start : start + rows]

    def check_headers(self) -> None:  # noqa: B027  # there are none but of files
        """Raise a DataError if a record's header shows that it cannot be used."""

    def used_bits(self, index: int) -> int | None:
        """Return how many of a file's 16 bits per pixel its largest value needs; None if it has 8.

        A file of 16 bits is scaled by its full range, whatever it uses.
        """
        return None

    def unreadable(self, indices: Indices) -> list[str]:
        """Return the errors of those records that cannot be read."""
        problems: list[str] = []
        for index in indices:
            try:
                self.read(np.array([index], dtype=np.int64))
            except DataError as error:
                problems += error.problems
        return problems

    def hashed_records(self) -> Indices:
        """Return the positions whose pixels the fingerprint covers: all, or evenly spaced ones."""
        n = len(self)
        if not self.decodes and np.prod(self.shape, dtype=np.float64) <= _HASH_WHOLE:
            return np.arange(n, dtype=np.int64)
        count = min(n, _HASH_DECODED if self.decodes else _HASH_RECORDS)
        return np.linspace(0, n - 1, count).round().astype(np.int64)

    def __len__(self) -> int:
        return self.shape[0]


class ArrayImages(Images):
    """Images in an array, in memory or memory-mapped."""

    def __init__(self, array: NDArray[Any]) -> None:
        if array.dtype != np.uint8 or array.ndim != 4:
            raise DataError(
                f"images must be uint8 [N, C, H, W], got {array.dtype} {list(array.shape)}"
            )
        self._array: Pixels = array
        n, c, h, w = array.shape
        self.shape = (n, c, h, w)

    def read(self, indices: Indices) -> Pixels:
        return np.ascontiguousarray(self._array[indices])


class Concatenated(Images):
    """Several sets of images one after another, such as the batch files of a set."""

    def __init__(self, parts: Sequence[Images]) -> None:
        shapes = {images.shape[1:] for images in parts}
        if len(shapes) != 1:
            raise DataError(f"parts of one set must have images of one shape, got {shapes}")
        self._parts = list(parts)
        self._ends = np.cumsum([len(images) for images in parts])
        self.shape = (int(self._ends[-1]), *shapes.pop())

    def read(self, indices: Indices) -> Pixels:
        out = np.empty((len(indices), *self.shape[1:]), np.uint8)
        owner = np.searchsorted(self._ends, indices, side="right")
        for k in np.unique(owner):
            mine = owner == k
            start = self._ends[k] - len(self._parts[k])
            out[mine] = self._parts[k].read(indices[mine] - start)
        return out


class Selected(Images):
    """Some records of another set, by position."""

    def __init__(self, images: Images, indices: Indices) -> None:
        self._images = images
        self._indices = indices
        self.shape = (len(indices), *images.shape[1:])

    def read(self, indices: Indices) -> Pixels:
        return self._images.read(self._indices[indices])

    def describe(self, index: int) -> str:
        return self._images.describe(int(self._indices[index]))
