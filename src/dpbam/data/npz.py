"""``.npz`` files of images and labels: MedMNIST's and any others.

=============  =========================================  ===================================
split          images                                     labels
=============  =========================================  ===================================
train          train_images, x_train, images, x, data     train_labels, y_train, labels, y, target
val            val_images, x_val, x_valid                 val_labels, y_val, y_valid
test           test_images, x_test                        test_labels, y_test
=============  =========================================  ===================================

Labels are those of any task (:mod:`dpbam.data.labels`); in their place ``train_masks`` (or
``masks``), ``val_masks`` and ``test_masks``, uint8 [N, H, W], hold the masks of a segmentation.

``class_names`` holds the names of the classes. Any other array becomes a column of the split whose
name it starts or ends with (``train_patient``, ``patient_train``), or of the only split
(``patient``). Pickled objects are refused. Images above 1 GiB are copied once into an ``.npy`` file
under the data root, which is memory-mapped.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.arrays import open_array
from dpbam.data.base import DataError, Images
from dpbam.data.dataset import as_column
from dpbam.data.fetch import atomic
from dpbam.data.owners import SINGLE, names_person
from dpbam.data.sources import Options, Splits, Table

_IMAGES = {
    "train": ("train_images", "x_train", "images", "x", "data"),
    "val": ("val_images", "x_val", "x_valid"),
    "test": ("test_images", "x_test"),
}
_LABELS = {
    "train": ("train_labels", "y_train", "labels", "y", "target"),
    "val": ("val_labels", "y_val", "y_valid"),
    "test": ("test_labels", "y_test"),
}
_MASKS = {
    "train": ("train_masks", "masks"),
    "val": ("val_masks",),
    "test": ("test_masks",),
}
_IN_MEMORY = 2**30  # bytes
_MOST_RATIO = 1100  # of unpacked to packed bytes: deflate reaches 1032
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def open_npz(argument: str, options: Options) -> Splits:
    """The splits for which the file has images and labels."""
    file = NpzFile(Path(argument).expanduser(), options.folder)
    labels = _labels(file, options.task)
    splits: dict[str, tuple[str, str]] = {}
    for split in _IMAGES:
        with options.findings.collecting():
            if keys := _keys(file, split, labels):
                splits[split] = keys
    if "train" not in splits and not options.findings.problems:
        raise DataError(
            f"{file.path} has the arrays {', '.join(file.names)}, but training needs images (any "
            f"of {', '.join(_IMAGES['train'])}) and labels (any of {', '.join(labels['train'])})"
        )
    strays = _strays(file, set(splits))
    if strays:
        options.findings.notes.append(f"ignored the arrays {', '.join(strays)}")
    with options.findings.collecting():
        _refuse_ignored_owners(file, strays, options)
    class_names = (
        [str(x) for x in file.read("class_names")] if "class_names" in file.names else None
    )
    return {
        split: Table(
            name=f"{file.path.name}/{split}",
            labels=file.images(labels),
            open_images=partial(_open, file, images, f"{file.path.name}/{split}"),
            columns=_columns(file, split, set(splits), options),
            class_names=class_names,
        )
        for split, (images, labels) in splits.items()
    }


def _open(file: NpzFile, images: str, name: str) -> Images:
    return open_array(file.images(images), name)


def _labels(file: NpzFile, task: str | None) -> dict[str, tuple[str, ...]]:
    """The names under which labels, or masks, are looked for."""
    has_masks = any(name in file.names for name in _MASKS["train"])
    return _MASKS if task == "segmentation" or (task is None and has_masks) else _LABELS


def _keys(file: NpzFile, split: str, names: dict[str, tuple[str, ...]]) -> tuple[str, str] | None:
    """The names of a split's images and labels, or None if it has neither."""
    images = next((name for name in _IMAGES[split] if name in file.names), None)
    labels = next((name for name in names[split] if name in file.names), None)
    if images and labels:
        return images, labels
    if images or labels:
        there, absent = (images, names) if images else (labels, _IMAGES)
        raise DataError(f"{file.path} has {there!r} but not {' or '.join(absent[split])}")
    return None


def _columns(
    file: NpzFile, split: str, splits: set[str], options: Options
) -> dict[str, NDArray[Any]]:
    """Every other array that belongs to this split."""
    columns = {}
    for name in _others(file):
        if column := _column(name, split, splits):
            with options.findings.collecting():
                columns[column] = as_column(file.read(name), f"{name} of {file.path}")
    return columns


def _column(name: str, split: str, splits: set[str]) -> str | None:
    """The column that an array is to a split; None if it belongs to another."""
    column = name.removeprefix(f"{split}_").removesuffix(f"_{split}")
    return column if column != name or splits == {split} else None


def _others(file: NpzFile) -> list[str]:
    """The arrays that are neither images nor labels nor names of classes."""
    tables = (_IMAGES, _LABELS, _MASKS)
    taken = {name for table in tables for group in table.values() for name in group}
    return sorted(set(file.names) - taken - {"class_names"})


def _strays(file: NpzFile, splits: set[str]) -> list[str]:
    """The arrays that belong to no split."""
    return [n for n in _others(file) if not any(_column(n, s, splits) for s in set(_IMAGES))]


def _refuse_ignored_owners(file: NpzFile, strays: Sequence[str], options: Options) -> None:
    """Refuse persons that belong to no split, unless the unit was chosen without them."""
    owners = [name for name in strays if names_person(name)]
    if owners and options.unit is None:
        raise DataError(
            f"{file.path} has the array {owners[0]!r}, which says whose each record is, but not of "
            f"which split: name it train_{owners[0]} (and test_{owners[0]}) and pass --unit "
            f"{shlex.quote(owners[0])}, or pass {SINGLE}"
        )


class NpzFile:
    """The arrays of an ``.npz`` file, read one at a time and never unpickled.

    Args:
        path: the file.
        root: the data root; memory-mapped copies go to its folder ``converted``.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._root = root
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        with self._readable(), zipfile.ZipFile(path) as archive:
            entries = [e for e in archive.infolist() if e.filename.endswith(".npy")]
        for entry in entries:
            if entry.file_size > _MOST_RATIO * min(entry.compress_size, path.stat().st_size):
                raise self._damaged(f"{entry.filename} claims {entry.file_size} bytes")
        self._sizes = {e.filename.removesuffix(".npy"): e.file_size for e in entries}
        self.names = tuple(self._sizes)

    def images(self, name: str) -> NDArray[Any]:
        """Return an array in memory, or memory-mapped if it is large."""
        return self.read(name) if self._sizes[name] <= _IN_MEMORY else self.mapped(name)

    def read(self, name: str) -> NDArray[Any]:
        """Return an array in memory."""
        if self._sizes[name] > _IN_MEMORY:
            raise DataError(f"{name!r} of {self.path} is too large: only images may exceed 1 GiB")
        self.header(name)
        with self._readable(), np.load(self.path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])

    def mapped(self, name: str) -> NDArray[Any]:
        """Return an array memory-mapped; it is copied again when the file's size or time changes.

        An entry of the zip is an ``.npy`` file already.
        """
        self.header(name)
        stat = self.path.stat()
        identity = f"{self.path.resolve()} {stat.st_size} {stat.st_mtime_ns} {name}"
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        copy = self._root / "converted" / f"{self.path.name}-{name}-{key}.npy"
        if not copy.exists():
            with atomic(copy) as temporary:
                self._unpack(name, temporary)
        return np.asarray(np.load(copy, mmap_mode="r", allow_pickle=False))

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return an array's shape and type; refuse objects, and more values than the entry has."""
        with (
            self._readable(),
            zipfile.ZipFile(self.path) as archive,
            archive.open(f"{name}.npy") as file,
        ):
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise self._damaged(f"{name} is an array of format {version}")
            shape, _, dtype = _HEADERS[version](file)
        if dtype.hasobject:
            raise DataError(
                f"{name!r} of {self.path} holds pickled objects, which can run any code when read: "
                "save it as a plain array of numbers or strings"
            )
        if math.prod(shape) * max(1, dtype.itemsize) > self._sizes[name]:
            raise self._damaged(f"{name} claims shape {shape}, more than there is")
        return shape, dtype

    def _unpack(self, name: str, to: Path) -> None:
        try:
            with (
                zipfile.ZipFile(self.path) as archive,
                archive.open(f"{name}.npy") as source,
                to.open("wb") as file,
            ):
                shutil.copyfileobj(source, file, 2**20)
        except OSError as error:
            raise DataError(
                f"cannot write a copy of {self.path}: {error.strerror or error}"
            ) from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise self._damaged(error) from error

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # a damaged archive can fail in any way
            raise self._damaged(error) from error

    def _damaged(self, error: object) -> DataError:
        return DataError(f"{self.path} cannot be read ({error}): it may be truncated or damaged")
