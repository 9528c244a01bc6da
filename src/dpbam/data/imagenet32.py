"""ImageNet32: the 1,281,167 and 50,000 images of ImageNet at 32 x 32.

Reads the official ``.npz`` files, ``train_data_batch_1.npz`` .. ``_10.npz`` and ``val_data.npz``:
'data' uint8 [N, 3072] and 'labels' 1..1000. They are in Imagenet32_train_npz.zip and
Imagenet32_val_npz.zip, from https://image-net.org/download-images (an account is needed). The
images are copied once into arrays under the data root (4 GB in all), which are memory-mapped. The
validation set is the test split, as in the paper.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import ArrayImages, Concatenated, DataError
from dpbam.data.npz import NpzFile
from dpbam.data.sources import Options, Splits, Table

_CLASSES = 1000
_PIXELS = 3 * 32 * 32
_FILES = {
    "train": tuple(f"train_data_batch_{k}.npz" for k in range(1, 11)),
    "test": ("val_data.npz",),
}
_UNPACKED = {"train": "Imagenet32_train_npz", "test": "Imagenet32_val_npz"}  # the zips' folders
_WAY_OUT = (
    "unpack Imagenet32_train_npz.zip and Imagenet32_val_npz.zip (from "
    "https://image-net.org/download-images) into it"
)


def open_imagenet32(argument: str, options: Options) -> Splits:
    """Find the files in the path given, else in ``imagenet32`` under the data root."""
    folder = Path(argument).expanduser() if argument else options.folder / "imagenet32"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: {_WAY_OUT}")
    return {split: _list(split, folder, options) for split in _FILES}


def _list(split: str, folder: Path, options: Options) -> Table:
    unpacked = folder / _UNPACKED[split]
    base = unpacked if unpacked.is_dir() else folder
    missing = [name for name in _FILES[split] if not (base / name).is_file()]
    if missing:
        raise DataError(f"{base} lacks {', '.join(missing)}: {_WAY_OUT}")
    files = [NpzFile(base / name, options.folder) for name in _FILES[split]]
    return Table(
        name=f"imagenet32/{split}",
        labels=np.concatenate([read_labels(file) for file in files]) - 1,  # 1..1000 -> 0..999
        open_images=lambda: Concatenated([
            ArrayImages(file.map_array("data").reshape(-1, 3, 32, 32)) for file in files
        ]),
        class_names=_class_names(folder / "map_clsloc.txt"),
        task="single-label",
    )  # fmt: skip


def read_labels(file: NpzFile) -> NDArray[np.int64]:
    """Return the labels [N] of one file, if it has one for each of its images [N, 3072]."""
    absent = [name for name in ("data", "labels") if name not in file.names]
    if absent:
        raise DataError(f"{file.path} has no {absent[0]!r}: it is not an official file")
    labels = file.read("labels")
    good = labels.ndim == 1 and labels.size and labels.dtype.kind in "iu"
    if not good or file.header("data") != ((labels.size, _PIXELS), np.dtype(np.uint8)):
        raise DataError(f"{file.path} does not hold uint8 data [N, {_PIXELS}] with a label each")
    if labels.min() < 1 or labels.max() > _CLASSES:
        raise DataError(f"{file.path} has labels outside 1..{_CLASSES}: it is not an official file")
    return labels.astype(np.int64)


def _class_names(path: Path) -> tuple[str, ...]:
    """Names from the official map_clsloc.txt ("n02119789 1 kit_fox"), else the numbers."""
    names = {k: str(k) for k in range(1, _CLASSES + 1)}
    if path.is_file():
        rows = [line.split() for line in path.read_text().splitlines()]
        names |= {int(row[1]): row[2] for row in rows if len(row) == 3 and row[1].isdigit()}
    return tuple(names[k] for k in range(1, _CLASSES + 1))
