"""From a data set's name or path to the data set."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpbam._names import did_you_mean
from dpbam.data.base import DataError
from dpbam.data.checking import check
from dpbam.data.dataset import DataSet
from dpbam.data.sources import Openers, Options, Progress, Source
from dpbam.data.split import held_out


@dataclass(frozen=True)
class SourceInfo:
    """One kind of source, for ``dpbam data list``.

    Attributes:
        name: how it is called.
        spec: how to ask for it.
        summary: what it is.
        downloads: whether it can be fetched.
        opener: the module and function that open it, imported when first used.
    """

    name: str
    spec: str
    summary: str
    downloads: bool
    opener: str

    def load(self) -> Source:
        """Import the opener."""
        module, name = self.opener.split(":")
        source: Source = getattr(importlib.import_module(f"dpbam.data.{module}"), name)
        return source


_SOURCES = {
    info.name: info
    for info in (
        SourceInfo(
            "digits",
            "digits",
            "scikit-learn digits, 1,797 grey 8x8 images, 10 classes, embedded",
            False,
            "digits:open_digits",
        ),
        SourceInfo(
            "cifar10",
            "cifar10[:PATH]",
            "CIFAR-10, 60,000 colour 32x32 images, 10 classes",
            True,
            "cifar:open_cifar10",
        ),
        SourceInfo(
            "cifar100",
            "cifar100[:PATH]",
            "CIFAR-100, the same size, 100 classes",
            True,
            "cifar:open_cifar100",
        ),
        SourceInfo(
            "imagenet32",
            "imagenet32[:PATH]",
            "ImageNet at 32x32, 1,331,167 colour images, 1,000 classes, official batch files",
            False,
            "imagenet32:open_imagenet32",
        ),
        SourceInfo(
            "npz",
            "FILE.npz",
            "a MedMNIST file, or any .npz of uint8 images and labels",
            False,
            "npz:open_npz",
        ),
        SourceInfo(
            "folder",
            "FOLDER",
            "images in one folder a class, or with a labels.csv",
            False,
            "folder:open_folder",
        ),
        SourceInfo(
            "hf",
            "hf:NAME or hf:FILE.parquet",
            "a Hugging Face set or local parquet files (needs dpbam[hf])",
            True,
            "huggingface:open_huggingface",
        ),
        SourceInfo(
            "function",
            "MODULE:FUNCTION",
            "your own function of the split, returning (images, labels)",
            False,
            "user:open_user",
        ),
    )
}
_NAMED = ("digits", "cifar10", "cifar100", "imagenet32", "hf")
_RECORD = "record"  # the unit of privacy that needs no column
_LARGEST = 4096


class Splits(NamedTuple):
    """A training and a test set of one source."""

    train: DataSet
    test: DataSet


def list_sources() -> list[SourceInfo]:
    """Every kind of source there is.

    Example:
        >>> [info.name for info in list_sources()][:3]
        ['digits', 'cifar10', 'cifar100']
    """
    return list(_SOURCES.values())


def load(
    spec: str,
    *,
    split: str = "train",
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    unit: str | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> DataSet:
    """Load one split of a data set.

    Args:
        spec: a name, a path, ``hf:...`` or ``module:function``; see :func:`list_sources`.
        split: "train", "test" or "val". A source without a test split gives its validation split
            for it; one without either has a fifth held out by :func:`held_out`, so that train is
            what is left, and "all" is both together.
        root: where downloads live; see :func:`data_root`.
        image_size: what to resize the images of a folder or a Hugging Face set to: (H, W), or one
            number for a square.
        channels: likewise: 1 (grey) or 3 (RGB).
        unit: the column that holds the unit of privacy: a held-out split keeps units whole.
        download: whether a missing archive may be downloaded.
        progress: called with the bytes downloaded so far, and in all (or None).

    Raises:
        DataError: if it cannot be had or used; the message says why and the way out.

    Example:
        >>> load("digits", split="test")
        DataSet('digits/test', 359 images (1, 8, 8), 10 classes)
        >>> load("cifar")
        Traceback (most recent call last):
        dpbam.data.base.DataError: no data set is called 'cifar': did you mean 'cifar10'?
    """
    options = _options(root, image_size, channels, unit, download, progress)
    openers = _with_test(_open(spec, options), options)
    if split not in openers:
        raise DataError(f"{spec} has no split {split!r}: it has {', '.join(openers)}")
    dataset = openers[split]()
    return _fit_to_train_on(dataset) if split == "train" else dataset


def load_pair(
    spec: str,
    *,
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    unit: str | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Splits:
    """Load the training and the test set; the arguments are :func:`load`'s.

    Privacy is promised to the records of ``train``: those that are held out are not trained on.

    Example:
        >>> train, test = load_pair("digits")
        >>> len(train), len(test)
        (1438, 359)
    """
    options = _options(root, image_size, channels, unit, download, progress)
    openers = _with_test(_open(spec, options), options)
    train, test = _fit_to_train_on(openers["train"]()), openers["test"]()
    if test.shape != train.shape:
        raise DataError(
            f"{train.name} has images {train.shape} but {test.name} has {test.shape}: "
            "bring them to one shape"
        )
    if options.unit is not None:
        train.column(options.unit)
    return Splits(train, test)


def check_source(
    spec: str,
    *,
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    unit: str | None = None,
    download: bool = False,
) -> list[str]:
    """:func:`check` both splits of a source; a source that cannot be loaded is its one problem.

    Example:
        >>> check_source("no-such-folder/")
        ["there is no folder or file 'no-such-folder/'"]
    """
    try:
        train, test = load_pair(
            spec, root=root, image_size=image_size, channels=channels, unit=unit, download=download
        )
    except DataError as error:
        return [str(error)]
    return check(train, test, unit=None if unit == _RECORD else unit)


def _options(
    root: str | Path | None,
    image_size: int | tuple[int, int] | None,
    channels: int | None,
    unit: str | None,
    download: bool,
    progress: Progress | None,
) -> Options:
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is not None and not (len(size) == 2 and all(1 <= side <= _LARGEST for side in size)):
        raise DataError(f"image_size must be one or two numbers in 1..{_LARGEST}, got {image_size}")
    if channels not in (None, 1, 3):
        raise DataError(f"channels must be 1 (grey) or 3 (RGB), got {channels!r}")
    return Options(
        root=None if root is None else Path(root),
        image_size=size,
        channels=channels,
        unit=None if unit == _RECORD else unit,
        download=download,
        progress=progress,
    )


def _with_test(openers: Openers, options: Options) -> Openers:
    """Add what the source lacks: a test split, from its validation split or held out."""
    if "test" in openers:
        return openers
    if "val" in openers:
        return {**openers, "test": openers["val"]}
    pair = cache(lambda: held_out(openers["train"](), unit=options.unit))
    return {"train": lambda: pair()[0], "test": lambda: pair()[1], "all": openers["train"]}


def _fit_to_train_on(dataset: DataSet) -> DataSet:
    """Refuse a training set with a single class."""
    present = np.unique(dataset.labels)
    if len(present) < 2:
        raise DataError(
            f"{dataset.name} has one class only, {dataset.class_names[present[0]]!r}: "
            "a classifier needs at least two"
        )
    return dataset


def is_function(spec: str) -> bool:
    """Whether a spec reads ``module:function``, code of the user's own.

    Example:
        >>> is_function("my_scans:load"), is_function("hf:cifar10"), is_function("./scans")
        (True, False, False)
    """
    own = re.fullmatch(r"[\w.]+:\w+", spec) is not None
    return own and spec.partition(":")[0] not in _NAMED


def _open(spec: str, options: Options) -> Openers:
    """Find the source that a spec means."""
    name, colon, argument = spec.partition(":")
    if name in _NAMED:
        return _SOURCES[name].load()(argument, options)
    if not spec:
        raise DataError(f"no data set was named: choose {', '.join(_NAMED)}, or give a path")
    path = Path(spec).expanduser()
    if path.suffix == ".npz":
        return _SOURCES["npz"].load()(spec, options)
    if path.is_dir():
        return _SOURCES["folder"].load()(spec, options)
    if path.suffix == ".parquet":
        raise DataError(f"parquet files are read by Hugging Face datasets: say hf:{spec}")
    if path.is_file():
        raise DataError(f"{spec} is a file that no source reads: give a folder or an .npz file")
    if colon and is_function(spec):
        return _SOURCES["function"].load()(spec, options)
    if re.search(r"[/\\]|^[.~]", spec):
        raise DataError(f"there is no folder or file {spec!r}")
    hint = did_you_mean(name.lower(), _NAMED, f"choose {', '.join(_NAMED)}, or give a path")
    raise DataError(f"no data set is called {spec!r}: {hint}")
