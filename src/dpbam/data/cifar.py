"""CIFAR-10 and CIFAR-100 in the official binary archives.

From https://www.cs.toronto.edu/~kriz/cifar.html, which publishes the md5 sums. Searched in this
order, under the path given after the name, else under the data root:

1. the unpacked folder (or the path itself, if it is that folder);
2. the archive (or the path itself), which is unpacked into the data root;
3. without a path: a download into the data root.

The python archives hold the same images as pickles, which are never read: unpickling can run code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import ArrayImages, Concatenated, DataError, Pixels
from dpbam.data.fetch import download, extract, verify
from dpbam.data.sources import Options, Splits, Table

_PIXELS = 3 * 32 * 32
_HOME = "https://www.cs.toronto.edu/~kriz"


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
