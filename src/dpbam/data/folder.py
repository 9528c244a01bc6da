"""A folder of images: one folder a class, or a ``labels.csv`` that says what each file is.

========================================  ====================================================
``train/CLASS/x.png`` (``test/``,         the splits as they are; without ``test`` and ``val``
``val/``)                                 a part of ``train`` is held out
``CLASS/x.png``                           a part is held out
``CLASS/A/B/x.png``                       A and B become the columns ``folder1`` and ``folder2``
``labels.csv``                            columns ``file`` and ``label``, ``split`` where wanted;
                                          the others (``patient``, ``sex``, ...) become columns
========================================  ====================================================

Ignored, and counted in the notes: hidden files, files that are not images by their suffix, and
links that lead outside the folder. Linked folders are not entered. One file under two names
(another spelling, a symbolic or a hard link) is refused: it would be two records.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.arrays import class_order
from dpbam.data.base import DataError
from dpbam.data.dataset import DataSet
from dpbam.data.decode import SUFFIXES, FileImages, common_format, opened
from dpbam.data.labels_csv import read_labels
from dpbam.data.same_file import OneRecordPerFile
from dpbam.data.sources import Openers, Options

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Record:
    """One image: its path under the folder, its class, its split, its columns."""

    path: str
    label: str
    split: str
    columns: dict[str, str]


@dataclass
class Listing:
    """All that was found in a folder."""

    records: list[Record] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()

    def leave_out(self, count: int, what: str) -> None:
        """Note what was ignored."""
        if count:
            self.notes += (f"ignored {count} {what}",)


def open_folder(argument: str, options: Options) -> Openers:
    """The splits of an image folder."""
    root = Path(argument).expanduser().resolve()
    table = root / "labels.csv"
    listing = _from_csv(root, table) if table.is_file() else _from_tree(root)
    if not listing.records:
        suffixes = " ".join(sorted(SUFFIXES))
        raise DataError(f"there are no images in {argument} (looked for CLASS/x with {suffixes})")
    found = {record.split for record in listing.records}
    if "train" not in found:
        raise DataError(f"{argument} has {' and '.join(sorted(found))} images but none to train on")
    call = root.name or "folder"
    images = _images(root, [record.path for record in listing.records], options)
    return {
        split: partial(_load, f"{call}/{split}" if len(found) > 1 else call, split, listing, images)
        for split in sorted(found)
    }


def _images(root: Path, paths: list[str], options: Options) -> FileImages:
    """All images of all splits, in one format."""
    size, channels = common_format(
        lambda index: opened(root / paths[index]), len(paths), options, str(root)
    )
    return FileImages(root, paths, size, channels, resize=options.image_size is not None)


def _load(name: str, split: str, listing: Listing, images: FileImages) -> DataSet:
    chosen = np.array([k for k, r in enumerate(listing.records) if r.split == split], np.int64)
    records = [listing.records[k] for k in chosen]
    number = {label: k for k, label in enumerate(class_order(listing.classes))}
    return DataSet(
        name=name,
        images=images.select(chosen),
        labels=np.array([number[record.label] for record in records], dtype=np.int64),
        class_names=tuple(number),
        columns=_columns(records),
        notes=listing.notes,
    )


def _columns(records: Sequence[Record]) -> dict[str, NDArray[Any]]:
    """The records' columns as arrays; "" where a record has none."""
    names = sorted({name for record in records for name in record.columns})
    return {name: np.array([r.columns.get(name, "") for r in records]) for name in names}


def _from_tree(root: Path) -> Listing:
    """Classes from folder names."""
    listing, files = Listing(), OneRecordPerFile(root)
    has_splits = (root / "train").is_dir()
    paths, listing.notes = find_images(root)
    for path in paths:
        split, parts = _split_of(path, has_splits)
        if split is None or len(parts) < 2:
            continue
        files.add(root / path, path)
        levels = {f"folder{k}": level for k, level in enumerate(parts[1:-1], start=1)}
        listing.records.append(Record(path, parts[0], split, levels))
    listing.leave_out(len(paths) - len(listing.records), "images outside a class folder")
    tops = [root / split for split in _SPLITS if (root / split).is_dir()] if has_splits else [root]
    for top in tops:  # a class folder without images is a class all the same
        listing.classes |= {p.name for p in top.iterdir() if _is_class(p)}
    return listing


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _from_csv(root: Path, table: Path) -> Listing:
    """Classes and columns from ``labels.csv``; the split from its column, else from the path."""
    listing, files = Listing(), OneRecordPerFile(table)
    has_splits = (root / "train").is_dir()
    for line, row in read_labels(table):
        spelling, label = row.pop("file"), row.pop("label")
        path = PurePosixPath(spelling).as_posix()
        real = (root / path).resolve()
        if not real.is_relative_to(root):
            raise DataError(f"line {line} of {table} names {path}, which is outside the folder")
        if not real.is_file():
            raise DataError(f"line {line} of {table} names {path}, which does not exist")
        files.add(real, spelling, line)
        said = row.pop("split", None)
        split, parts = _split_of(path, has_splits)
        split = said or split
        if split not in _SPLITS:
            raise DataError(
                f"line {line} of {table} has split {split!r}: its column split, or the first "
                "folder of its file, must be train, val or test"
            )
        levels = {f"folder{k}": level for k, level in enumerate(parts[:-1], start=1)}
        listing.records.append(Record(path, label, split, levels | row))
        listing.classes.add(label)
    paths, listing.notes = find_images(root)
    listed = {record.path for record in listing.records}
    listing.leave_out(len(set(paths) - listed), f"images that {table.name} does not list")
    return listing


def _split_of(path: str, has_splits: bool) -> tuple[str | None, tuple[str, ...]]:
    """The split a path is in (None: in none of them) and its parts below that."""
    parts = PurePosixPath(path).parts
    if not has_splits:
        return "train", parts
    return (parts[0], parts[1:]) if parts[0] in _SPLITS else (None, parts)


def find_images(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """The images under ``root``, as sorted relative paths, and notes on what was left out."""
    found: list[str] = []
    hidden = other = outside = 0
    for here, folders, files in os.walk(root):  # links to folders are not followed
        outside += sum((Path(here) / name).is_symlink() for name in folders)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = Path(here) / name
            if name.startswith("."):
                hidden += 1
            elif path.suffix.lower() not in SUFFIXES:
                other += 1
            elif path.is_symlink() and not path.resolve().is_relative_to(root):
                outside += 1
            else:
                found.append(path.relative_to(root).as_posix())
    counts = {
        "hidden files": hidden,
        "files that are not images": other - (root / "labels.csv").is_file(),
        "links to folders or out of the folder": outside,
    }
    return sorted(found), tuple(f"ignored {n} {what}" for what, n in counts.items() if n)
