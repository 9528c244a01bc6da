"""ImageNet32: ImageNet's 1,281,167 and 50,000 images at 32 x 32, in the official batch files.

The files (``train_data_batch_1`` .. ``_10``, ``val_data``) are pickles of 'data' uint8 [N, 3072]
and 'labels' 1..1000. They come from https://image-net.org/download-images (an account is needed),
as Imagenet32_train.zip and Imagenet32_val.zip. Each is converted once into arrays under the data
root (4 GB in all), which are memory-mapped. Validation serves as the test split, as in the paper.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import ArrayImages, Concatenated, DataError
from dpbam.data.dataset import DataSet
from dpbam.data.mapped import mapped
from dpbam.data.pickles import load_batch
from dpbam.data.sources import Openers, Options

_CLASSES = 1000
_PIXELS = 3 * 32 * 32
_FILES = {
    "train": tuple(f"train_data_batch_{k}" for k in range(1, 11)),
    "test": ("val_data",),
}


def open_imagenet32(argument: str, options: Options) -> Openers:
    """Find the batch files in the path given, else in ``imagenet32`` under the data root."""
    folder = Path(argument).expanduser() if argument else options.folder / "imagenet32"
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}: unpack Imagenet32_train.zip and Imagenet32_val.zip "
            "(from https://image-net.org/download-images) into it"
        )
    return {split: partial(_load, split, folder, options) for split in _FILES}


def _load(split: str, folder: Path, options: Options) -> DataSet:
    missing = [name for name in _FILES[split] if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}: unpack Imagenet32_train.zip and "
            "Imagenet32_val.zip (from https://image-net.org/download-images) into it"
        )
    parts = [_convert(folder / name, options.folder) for name in _FILES[split]]
    return DataSet(
        name=f"imagenet32/{split}",
        images=Concatenated([ArrayImages(pixels) for pixels, _ in parts]),
        labels=np.concatenate([labels for _, labels in parts]) - 1,  # 1..1000 -> 0..999
        class_names=_class_names(folder / "map_clsloc.txt"),
    )


def _convert(path: Path, root: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The pixels [N, 3, 32, 32] and labels of one batch file; unpickled at most once."""
    batch = _Batch(path)
    pixels = mapped(path, "data", root, lambda to: _save(to, batch.read()[0]))
    labels = mapped(path, "labels", root, lambda to: _save(to, batch.read()[1]))
    return pixels, labels


class _Batch:
    """A batch file, read when it is asked for and then kept until both its parts are converted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if self._content is None:
            self._content = _read(self._path)
        return self._content


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    batch = load_batch(path)
    data, labels = np.asarray(batch.get("data")), np.asarray(batch.get("labels"))
    good = data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == _PIXELS
    if not good or labels.shape != data.shape[:1] or labels.dtype.kind not in "iu":
        raise DataError(f"{path} does not hold uint8 data [N, {_PIXELS}] with a label each")
    if labels.min() < 1 or labels.max() > _CLASSES:
        raise DataError(f"{path} has labels outside 1..{_CLASSES}: it is not an official file")
    return data.reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _save(path: Path, array: NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def _class_names(path: Path) -> tuple[str, ...]:
    """From the official map_clsloc.txt ("n02119789 1 kit_fox") if it is there, else the numbers."""
    names = {k: str(k) for k in range(1, _CLASSES + 1)}
    if path.is_file():
        rows = [line.split() for line in path.read_text().splitlines()]
        names |= {int(row[1]): row[2] for row in rows if len(row) == 3 and row[1].isdigit()}
    return tuple(names[k] for k in range(1, _CLASSES + 1))
