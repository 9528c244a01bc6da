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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.arrays import open_array
from dpbam.data.base import DataError
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
    file, findings = NpzFile(Path(argument).expanduser(), options.folder), options.findings
    masked = any(name in file.names for name in _MASKS["train"])
    masked = options.task == "segmentation" or (options.task is None and masked)
    labels_of = _MASKS if masked else _LABELS
    keys: dict[str, tuple[str, str]] = {}  # of the images and the labels of a split
    for split in _IMAGES:
        images, labels = (
            next((name for name in names[split] if name in file.names), None)
            for names in (_IMAGES, labels_of)
        )
        if images and labels:
            keys[split] = images, labels
        elif images or labels:
            absent = labels_of if images else _IMAGES
            findings.problems.append(
                f"{file.path} has {images or labels!r} but not {' or '.join(absent[split])}"
            )
    if "train" not in keys and not findings.problems:
        raise DataError(
            f"{file.path} has the arrays {', '.join(file.names)}, but training needs images (any "
            f"of {', '.join(_IMAGES['train'])}) and labels (any of {', '.join(labels_of['train'])})"
        )
    columns = _read_columns(file, keys, options)
    class_names = None
    if "class_names" in file.names:
        class_names = [str(name) for name in file.read("class_names")]

    def make_table(split: str, images: str, labels: str) -> Table:
        name = f"{file.path.name}/{split}"
        return Table(
            name=name,
            labels=file.images(labels),
            open_images=lambda: open_array(file.images(images), name),
            columns=columns[split],
            class_names=class_names,
        )

    return {split: make_table(split, *names) for split, names in keys.items()}


def _read_columns(
    file: NpzFile, splits: Collection[str], options: Options
) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the columns by split: every other array, by the split in its name or the only one.

    Arrays that belong to no split are noted; persons among them are refused, unless the unit was
    chosen without them.
    """
    tables = (_IMAGES, _LABELS, _MASKS)
    taken = {name for table in tables for group in table.values() for name in group}
    columns: dict[str, dict[str, NDArray[Any]]] = {split: {} for split in splits}
    strays, only = [], list(splits) if len(splits) == 1 else []
    for name in sorted(set(file.names) - taken - {"class_names"}):
        column = {s: name.removeprefix(f"{s}_").removesuffix(f"_{s}") for s in _IMAGES}
        owners = only or [split for split in _IMAGES if column[split] != name]
        if not owners:
            strays.append(name)
        for split in owners:
            if split in columns:
                with options.findings.collecting():
                    values = as_column(file.read(name), f"{name} of {file.path}")
                    columns[split][column[split]] = values
    if strays:
        options.findings.notes.append(f"ignored the arrays {', '.join(strays)}")
    persons = [name for name in strays if names_person(name)]
    if persons and options.unit is None:
        options.findings.problems.append(
            f"{file.path} has the array {persons[0]!r}, which says whose each record is, but not "
            f"of which split: name it train_{persons[0]} (and test_{persons[0]}) and pass --unit "
            f"{shlex.quote(persons[0])}, or pass {SINGLE}"
        )
    return columns


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
                raise self._damage(f"{entry.filename} claims {entry.file_size} bytes")
        self._sizes = {e.filename.removesuffix(".npy"): e.file_size for e in entries}
        self.names = tuple(self._sizes)

    def images(self, name: str) -> NDArray[Any]:
        """Return an array in memory, or memory-mapped if it is large."""
        return self.read(name) if self._sizes[name] <= _IN_MEMORY else self.map_array(name)

    def read(self, name: str) -> NDArray[Any]:
        """Return an array in memory."""
        if self._sizes[name] > _IN_MEMORY:
            raise DataError(f"{name!r} of {self.path} is too large: only images may exceed 1 GiB")
        self.header(name)
        with self._readable(), np.load(self.path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])

    def map_array(self, name: str) -> NDArray[Any]:
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
                raise self._damage(f"{name} is an array of format {version}")
            shape, _, dtype = _HEADERS[version](file)
        if dtype.hasobject:
            raise DataError(
                f"{name!r} of {self.path} holds pickled objects, which can run any code when read: "
                "save it as a plain array of numbers or strings"
            )
        if math.prod(shape) * max(1, dtype.itemsize) > self._sizes[name]:
            raise self._damage(f"{name} claims shape {shape}, more than there is")
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
            raise self._damage(error) from error

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # a damaged archive can fail in any way
            raise self._damage(error) from error

    def _damage(self, error: object) -> DataError:
        return DataError(f"{self.path} cannot be read ({error}): it may be truncated or damaged")
