"""CIFAR-10 and CIFAR-100 in the official binary and python archives.

Home page: https://www.cs.toronto.edu/~kriz/cifar.html, from where the md5 sums are. A download
takes the binary archive, which needs no unpickling. Looked for in this order, under the path given
after the name, else under the data root:

1. the unpacked folder, binary then python (or the path itself, if it is such a folder);
2. the archive, binary then python (or the path itself), unpacked into the data root;
3. without a path: a download into the data root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data import cifar_names
from dpbam.data.base import ArrayImages, Concatenated, DataError, Pixels
from dpbam.data.dataset import DataSet
from dpbam.data.fetch import Archive, extract, obtain, verify
from dpbam.data.pickles import load_batch
from dpbam.data.sources import Openers, Options

_PIXELS = 3 * 32 * 32
_HOME = "https://www.cs.toronto.edu/~kriz"

Labels = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Layout:
    """One archive: what it is called, what is in it, and how a file of it is read."""

    archive: Archive
    folder: str
    files: dict[str, tuple[str, ...]]  # split -> file names
    read: Callable[[Path], tuple[Pixels, Labels]]

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in ``folder``."""
        names = [name for group in self.files.values() for name in group]
        return [name for name in names if not (folder / name).is_file()]


def open_cifar10(argument: str, options: Options) -> Openers:
    """CIFAR-10: 50,000 and 10,000 colour images of 32 x 32 in 10 classes."""
    return _open("cifar10", argument, options)


def open_cifar100(argument: str, options: Options) -> Openers:
    """CIFAR-100: the same in 100 classes, with the column ``superclass`` (20 of them)."""
    return _open("cifar100", argument, options)


def _open(name: str, argument: str, options: Options) -> Openers:
    layout, folder = _locate(LAYOUTS[name], argument, options, name)
    missing = layout.missing(folder)
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}: unpack {layout.archive.filename}")
    return {split: partial(_load, name, split, layout, folder) for split in layout.files}


def _load(name: str, split: str, layout: Layout, folder: Path) -> DataSet:
    parts = [layout.read(folder / file) for file in layout.files[split]]
    labels = {key: np.concatenate([part[1][key] for part in parts]) for key in parts[0][1]}
    columns: dict[str, NDArray[Any]] = {}
    if "coarse" in labels:
        names = np.array(cifar_names.CIFAR100_SUPERCLASSES)
        if labels["coarse"].min() < 0 or labels["coarse"].max() >= len(names):
            raise DataError(f"{folder} has superclasses outside 0..19: it is damaged")
        columns["superclass"] = names[labels["coarse"]]
    return DataSet(
        name=f"{name}/{split}",
        images=Concatenated([ArrayImages(pixels) for pixels, _ in parts]),
        labels=labels["fine"],
        class_names=cifar_names.CIFAR100 if columns else cifar_names.CIFAR10,
        columns=columns,
    )


def _locate(
    layouts: tuple[Layout, ...], argument: str, options: Options, name: str
) -> tuple[Layout, Path]:
    """The layout that is there and the folder it is in; unpack or download it if need be."""
    base = Path(argument).expanduser() if argument else options.folder
    for layout in layouts:
        for folder in (base / layout.folder, base):
            if folder.is_dir() and len(layout.missing(folder)) < len(
                sum(layout.files.values(), ())
            ):
                return layout, folder
    for layout in layouts:
        for path in (base / layout.archive.filename, base):
            if path.is_file() and path.name == layout.archive.filename:
                verify(path, layout.archive, remedy="it is truncated or not the official file")
                return layout, _unpack(layout, path, options)
    binary = layouts[0]
    if argument or not options.download:
        raise DataError(
            f"no {name} in {base}: put {binary.archive.filename} (from {binary.archive.url}) or "
            f"the folder {binary.folder} there"
        )
    path = obtain(binary.archive, base, progress=options.progress)
    return binary, _unpack(binary, path, options)


def _unpack(layout: Layout, archive: Path, options: Options) -> Path:
    folder = options.folder / layout.folder
    if layout.missing(folder):
        names = [name for group in layout.files.values() for name in group]
        extract(archive, [f"{layout.folder}/{name}" for name in names], folder)
    return folder


def _read_binary(path: Path, *, label_bytes: int) -> tuple[Pixels, Labels]:
    """Records of label bytes (the fine label last) and 3072 pixels, red then green then blue."""
    raw = np.fromfile(path, np.uint8)
    size = label_bytes + _PIXELS
    if raw.size == 0 or raw.size % size:
        raise DataError(
            f"{path} has {raw.size} bytes, which is not a whole number of records of {size}: "
            "it may be truncated, unpack the archive again"
        )
    records = raw.reshape(-1, size)
    labels = {"fine": records[:, label_bytes - 1].astype(np.int64)}
    if label_bytes == 2:
        labels["coarse"] = records[:, 0].astype(np.int64)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def _read_python(path: Path, *, keys: dict[str, str]) -> tuple[Pixels, Labels]:
    """A pickled dict with ``data`` uint8 [N, 3072] and lists of labels."""
    batch = load_batch(path)
    absent = [key for key in ("data", *keys.values()) if key not in batch]
    if absent:
        raise DataError(f"{path} has no {absent[0]!r}: it is not an official batch file")
    data = np.asarray(batch["data"])
    labels = {kind: np.asarray(batch[key]) for kind, key in keys.items()}
    good = data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == _PIXELS
    if not good or any(y.shape != data.shape[:1] or y.dtype.kind != "i" for y in labels.values()):
        raise DataError(f"{path} does not hold uint8 data [N, {_PIXELS}] with a label each")
    return data.reshape(-1, 3, 32, 32), labels


def _archive(filename: str, md5: str) -> Archive:
    return Archive(filename, f"{_HOME}/{filename}", md5)


_BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "cifar10": (
        Layout(
            _archive("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
            "cifar-10-batches-bin",
            {"train": tuple(f"{b}.bin" for b in _BATCHES), "test": ("test_batch.bin",)},
            partial(_read_binary, label_bytes=1),
        ),
        Layout(
            _archive("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
            "cifar-10-batches-py",
            {"train": _BATCHES, "test": ("test_batch",)},
            partial(_read_python, keys={"fine": "labels"}),
        ),
    ),
    "cifar100": (
        Layout(
            _archive("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
            "cifar-100-binary",
            {"train": ("train.bin",), "test": ("test.bin",)},
            partial(_read_binary, label_bytes=2),
        ),
        Layout(
            _archive("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
            "cifar-100-python",
            {"train": ("train",), "test": ("test",)},
            partial(_read_python, keys={"fine": "fine_labels", "coarse": "coarse_labels"}),
        ),
    ),
}
