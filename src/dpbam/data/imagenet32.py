"""ImageNet32: the 1,281,167 and 50,000 images of ImageNet at 32 x 32.

Reads the official ``.npz`` files, ``train_data_batch_1.npz`` .. ``_10.npz`` and ``val_data.npz``:
'data' uint8 [N, 3072] and 'labels' 1..1000. They are in Imagenet32_train_npz.zip and
Imagenet32_val_npz.zip, from https://image-net.org/download-images (an account is needed). The
images are copied once into arrays under the data root (4 GB in all), which are memory-mapped. The
validation set is the test split, as in the paper.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import ArrayImages, Concatenated, DataError, Pixels
from dpbam.data.dataset import DataSet
from dpbam.data.npz import NpzFile
from dpbam.data.sources import Openers, Options

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


def open_imagenet32(argument: str, options: Options) -> Openers:
    """Find the files in the path given, else in ``imagenet32`` under the data root."""
    folder = Path(argument).expanduser() if argument else options.folder / "imagenet32"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: {_WAY_OUT}")
    return {split: partial(_load, split, folder, options) for split in _FILES}


def _load(split: str, folder: Path, options: Options) -> DataSet:
    unpacked = folder / _UNPACKED[split]
    base = unpacked if unpacked.is_dir() else folder
    missing = [name for name in _FILES[split] if not (base / name).is_file()]
    if missing:
        raise DataError(f"{base} lacks {', '.join(missing)}: {_WAY_OUT}")
    parts = [read_part(NpzFile(base / name, options.folder)) for name in _FILES[split]]
    return DataSet(
        name=f"imagenet32/{split}",
        images=Concatenated([ArrayImages(pixels) for pixels, _ in parts]),
        labels=np.concatenate([labels for _, labels in parts]) - 1,  # 1..1000 -> 0..999
        class_names=_class_names(folder / "map_clsloc.txt"),
    )


def read_part(file: NpzFile) -> tuple[Pixels, NDArray[np.int64]]:
    """Return the pixels [N, 3, 32, 32] and labels [N] of one file."""
    absent = [name for name in ("data", "labels") if name not in file.names]
    if absent:
        raise DataError(f"{file.path} has no {absent[0]!r}: it is not an official file")
    labels = file.read("labels")
    good = labels.ndim == 1 and labels.size and labels.dtype.kind in "iu"
    if not good or file.header("data") != ((labels.size, _PIXELS), np.dtype(np.uint8)):
        raise DataError(f"{file.path} does not hold uint8 data [N, {_PIXELS}] with a label each")
    if labels.min() < 1 or labels.max() > _CLASSES:
        raise DataError(f"{file.path} has labels outside 1..{_CLASSES}: it is not an official file")
    return file.mapped("data").reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _class_names(path: Path) -> tuple[str, ...]:
    """Names from the official map_clsloc.txt ("n02119789 1 kit_fox"), else the numbers."""
    names = {k: str(k) for k in range(1, _CLASSES + 1)}
    if path.is_file():
        rows = [line.split() for line in path.read_text().splitlines()]
        names |= {int(row[1]): row[2] for row in rows if len(row) == 3 and row[1].isdigit()}
    return tuple(names[k] for k in range(1, _CLASSES + 1))
