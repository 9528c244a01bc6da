"""The data sets that everyone has: digits, CIFAR-10, CIFAR-100 and ImageNet32.

digits: scikit-learn's handwritten digits, 1797 grey images of 8 x 8, embedded, no download.

CIFAR: the official binary archives from https://www.cs.toronto.edu/~kriz/cifar.html, which
publishes the md5 sums. Searched in this order, under the path given after the name, else under the
data root: the unpacked folder (or the path itself, if it is that folder); the archive (or the path
itself), which is unpacked into the data root; without a path, a download into the data root. The
python archives hold the same images as pickles, which are never read: unpickling can run code.

ImageNet32: the 1,281,167 and 50,000 images of ImageNet at 32 x 32, in the official ``.npz`` files
``train_data_batch_1.npz`` .. ``_10.npz`` and ``val_data.npz``: 'data' uint8 [N, 3072] and 'labels'
1..1000. They are in Imagenet32_train_npz.zip and Imagenet32_val_npz.zip, from
https://image-net.org/download-images (an account is needed). The images are copied once into arrays
under the data root (4 GB in all), which are memory-mapped. The validation set is the test split, as
in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.arrays import from_arrays
from dpbam.data.base import ArrayImages, Concatenated, DataError, Pixels, require
from dpbam.data.dataset import DataSet
from dpbam.data.fetch import download, extract, verify
from dpbam.data.npz import NpzFile
from dpbam.data.sources import Options, Splits, Table
from dpbam.data.split import held_out

_PIXELS = 3 * 32 * 32
_HOME = "https://www.cs.toronto.edu/~kriz"
_INK_LEVELS = 16  # scikit-learn counts ink in 0..16
_IMAGENET32_CLASSES = 1000
_IMAGENET32_FILES = {
    "train": tuple(f"train_data_batch_{k}.npz" for k in range(1, 11)),
    "test": ("val_data.npz",),
}
# those that the zips unpack to
_IMAGENET32_FOLDERS = {"train": "Imagenet32_train_npz", "test": "Imagenet32_val_npz"}
_IMAGENET32_WAY_OUT = (
    "unpack Imagenet32_train_npz.zip and Imagenet32_val_npz.zip (from "
    "https://image-net.org/download-images) into it"
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CLASSES_10 = _words("airplane automobile bird cat deer dog frog horse ship truck")

CLASSES_100 = _words(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
)

SUPERCLASSES_100 = _words(
    """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things
    large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
    non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
    """
)


@dataclass(frozen=True)
class CifarRelease:
    """One of the two sets: its archive, the files in it, and their format.

    Attributes:
        url: of the archive.
        md5: its published checksum.
        folder: the folder inside the archive.
        files: from split to file names.
        label_bytes: before each image; of two, the first is the superclass.
        class_names: in the order of the labels.
    """

    url: str
    md5: str
    folder: str
    files: dict[str, tuple[str, ...]]
    label_bytes: int
    class_names: tuple[str, ...]

    @property
    def archive(self) -> str:
        """The archive's file name."""
        return self.url.rpartition("/")[2]

    @property
    def names(self) -> list[str]:
        """All file names."""
        return [name for group in self.files.values() for name in group]

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in ``folder``."""
        return [name for name in self.names if not (folder / name).is_file()]


RELEASES = {
    "cifar10": CifarRelease(
        f"{_HOME}/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test": ("test_batch.bin",)},
        label_bytes=1,
        class_names=CLASSES_10,
    ),
    "cifar100": CifarRelease(
        f"{_HOME}/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train": ("train.bin",), "test": ("test.bin",)},
        label_bytes=2,
        class_names=CLASSES_100,
    ),
}


def open_cifar(name: str, argument: str, options: Options) -> Splits:
    """The splits of "cifar10" or "cifar100"; the latter has the column ``superclass``."""
    release = RELEASES[name]
    folder = _locate(name, argument, options)
    missing = release.missing(folder)
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}: unpack {release.archive}")
    return {split: _list(name, split, folder) for split in release.files}


def _list(name: str, split: str, folder: Path) -> Table:
    release = RELEASES[name]
    batches = [read_batch(folder / file, release.label_bytes) for file in release.files[split]]
    labels = np.concatenate([labels for _, labels in batches])  # [N, label_bytes]
    columns: dict[str, NDArray[Any]] = {}
    if release.label_bytes == 2:
        names = np.array(SUPERCLASSES_100)
        if labels[:, 0].max() >= len(names):
            raise DataError(f"{folder} has superclasses outside 0..19: it is damaged")
        columns["superclass"] = names[labels[:, 0]]
    return Table(
        name=f"{name}/{split}",
        labels=labels[:, -1],
        open_images=lambda: Concatenated([ArrayImages(pixels) for pixels, _ in batches]),
        columns=columns,
        class_names=release.class_names,
        task="single-label",
    )


def _locate(name: str, argument: str, options: Options) -> Path:
    """The folder that has files of the set; unpack or download the archive if needed."""
    release = RELEASES[name]
    base = Path(argument).expanduser() if argument else options.folder
    for folder in (base / release.folder, base):
        if len(release.missing(folder)) < len(release.names):
            return folder
    for path in (base / release.archive, base):
        if path.is_file() and path.name == release.archive:
            verify(path, release.md5)
            return _unpack(release, path, options)
    if argument or not options.download:
        raise DataError(
            f"no {name} in {base}: put {release.archive} (from {release.url}) or the folder "
            f"{release.folder} there"
        )
    path = download(release.url, release.md5, base, progress=options.progress)
    return _unpack(release, path, options)


def _unpack(release: CifarRelease, archive: Path, options: Options) -> Path:
    folder = options.folder / release.folder
    if release.missing(folder):
        extract(archive, [f"{release.folder}/{name}" for name in release.names], folder)
    return folder


def read_batch(path: Path, label_bytes: int) -> tuple[Pixels, NDArray[np.int64]]:
    """Pixels [N, 3, 32, 32] and labels [N, label_bytes] of one file.

    A record is its label bytes, then 3072 pixels: the red, the green and the blue channel.
    """
    raw = np.fromfile(path, np.uint8)
    size = label_bytes + _PIXELS
    if raw.size == 0 or raw.size % size:
        raise DataError(
            f"{path} has {raw.size} bytes, which is not a whole number of records of {size}: "
            "it may be truncated, unpack the archive again"
        )
    records = raw.reshape(-1, size)
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return pixels, records[:, :label_bytes].astype(np.int64)


def open_digits(argument: str, options: Options) -> Splits:
    """Return a fixed stratified split: 80% to train, 20% to test."""
    train, test = _split_digits()
    return {"train": train, "test": test}


@cache  # parsed once per process: a data set cannot be changed, so that all callers may share it
def _split_digits() -> tuple[DataSet, DataSet]:
    raw = require("sklearn.datasets", "the data set digits").load_digits()
    pixels = (raw.images * (255 / _INK_LEVELS)).round().astype(np.uint8)
    pixels.setflags(write=False)
    train, test = held_out(from_arrays(pixels, raw.target, name="digits"))
    return replace(train, name="digits/train"), replace(test, name="digits/test")


def open_imagenet32(argument: str, options: Options) -> Splits:
    """Find the files in the path given, else in ``imagenet32`` under the data root."""
    folder = Path(argument).expanduser() if argument else options.folder / "imagenet32"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: {_IMAGENET32_WAY_OUT}")
    return {split: _list_imagenet32(split, folder, options) for split in _IMAGENET32_FILES}


def _list_imagenet32(split: str, folder: Path, options: Options) -> Table:
    unpacked = folder / _IMAGENET32_FOLDERS[split]
    base = unpacked if unpacked.is_dir() else folder
    missing = [name for name in _IMAGENET32_FILES[split] if not (base / name).is_file()]
    if missing:
        raise DataError(f"{base} lacks {', '.join(missing)}: {_IMAGENET32_WAY_OUT}")
    files = [NpzFile(base / name, options.folder) for name in _IMAGENET32_FILES[split]]
    return Table(
        name=f"imagenet32/{split}",
        labels=np.concatenate([read_labels(file) for file in files]) - 1,  # 1..1000 -> 0..999
        open_images=lambda: Concatenated([
            ArrayImages(file.map_array("data").reshape(-1, 3, 32, 32)) for file in files
        ]),
        class_names=_imagenet32_class_names(folder / "map_clsloc.txt"),
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
    if labels.min() < 1 or labels.max() > _IMAGENET32_CLASSES:
        raise DataError(
            f"{file.path} has labels outside 1..{_IMAGENET32_CLASSES}: it is not an official file"
        )
    return labels.astype(np.int64)


def _imagenet32_class_names(path: Path) -> tuple[str, ...]:
    """Names from the official map_clsloc.txt ("n02119789 1 kit_fox"), else the numbers."""
    names = {k: str(k) for k in range(1, _IMAGENET32_CLASSES + 1)}
    if path.is_file():
        rows = [line.split() for line in path.read_text().splitlines()]
        names |= {int(row[1]): row[2] for row in rows if len(row) == 3 and row[1].isdigit()}
    return tuple(names[k] for k in range(1, _IMAGENET32_CLASSES + 1))
