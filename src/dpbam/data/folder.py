"""A folder of images: one folder per class, or a ``labels.csv`` that lists the files.

========================================  ====================================================
``train/CLASS/x.png`` (``test/``,         the splits as they are; without ``test`` and ``val``
``val/``)                                 a part of ``train`` is held out
``CLASS/x.png``                           a part is held out
``CLASS/A/B/x.png``                       A and B become the columns ``folder1`` and ``folder2``
``labels.csv``                            columns ``file`` and ``label``, and optionally ``split``;
                                          the others (``patient``, ``sex``, ...) become columns
========================================  ====================================================

Ignored, and counted in the notes: hidden files, files without the suffix of an image, and links out
of the folder. Linked folders are not entered. One file under two names (another spelling, a
symbolic or a hard link) is refused: it would be two records.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
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
from dpbam.data.sources import Openers, Options

_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ImageRecord:
    """One image: its path relative to the folder, its class, its split, its columns."""

    path: str
    label: str
    split: str
    columns: dict[str, str]


@dataclass
class Listing:
    """The contents of a folder."""

    records: list[ImageRecord] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()

    def leave_out(self, count: int, what: str) -> None:
        """Note what was ignored."""
        if count:
            self.notes += (f"ignored {count} {what}",)


def open_folder(argument: str, options: Options) -> Openers:
    """Return the splits of an image folder."""
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
    return FileImages(root, paths, size, channels, resize=options.size is not None)


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


def _columns(records: Sequence[ImageRecord]) -> dict[str, NDArray[Any]]:
    """The records' columns as arrays; "" where a record has no value."""
    names = sorted({name for record in records for name in record.columns})
    return {name: np.array([r.columns.get(name, "") for r in records]) for name in names}


def _from_tree(root: Path) -> Listing:
    """Classes from folder names."""
    listing = Listing()
    has_splits = (root / "train").is_dir()
    paths, listing.notes = find_images(root)
    for path in paths:
        split, parts = _split_of(path, has_splits)
        if split is None or len(parts) < 2:
            continue
        levels = {f"folder{k}": level for k, level in enumerate(parts[1:-1], start=1)}
        listing.records.append(ImageRecord(path, parts[0], split, levels))
    _refuse_repeats(((root / r.path, r.path) for r in listing.records), root)
    listing.leave_out(len(paths) - len(listing.records), "images outside a class folder")
    tops = [root / split for split in _SPLITS if (root / split).is_dir()] if has_splits else [root]
    for top in tops:  # a class folder without images is a class too
        listing.classes |= {p.name for p in top.iterdir() if _is_class(p)}
    return listing


def _refuse_repeats(files: Iterable[tuple[Path, str]], where: Path) -> None:
    """Refuse a file that is listed twice, under any names.

    It would be two records of one person, who would have half of the promised privacy. Files are
    compared by device and inode, so that another spelling, a symbolic link and a hard link are
    recognised.
    """
    seen: dict[tuple[int, int], str] = {}
    for path, spelling in files:
        stat = path.stat()  # follows links
        key = (stat.st_dev, stat.st_ino)
        if key in seen:
            raise DataError(
                f"{where} lists one file twice, as {seen[key]} and as {spelling}: it would be two "
                "records, each with half of the promised privacy; leave one out or, if they are "
                "different records with the same content, make copies instead of links"
            )
        seen[key] = spelling


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _from_csv(root: Path, table: Path) -> Listing:
    """Classes and columns from ``labels.csv``; the split from its column, else from the path."""
    listing, files = Listing(), []
    has_splits = (root / "train").is_dir()
    for line, row in read_labels(table):
        spelling, label = row.pop("file"), row.pop("label")
        path = PurePosixPath(spelling).as_posix()
        real = (root / path).resolve()
        if not real.is_relative_to(root):
            raise DataError(f"line {line} of {table} names {path}, which is outside the folder")
        if not real.is_file():
            raise DataError(f"line {line} of {table} names {path}, which does not exist")
        files.append((real, f"{spelling} (line {line})"))
        given = row.pop("split", None)
        split, parts = _split_of(path, has_splits)
        split = given or split
        if split not in _SPLITS:
            raise DataError(
                f"line {line} of {table} has split {split!r}: its column split, or the first "
                "folder of its file, must be train, val or test"
            )
        levels = {f"folder{k}": level for k, level in enumerate(parts[:-1], start=1)}
        listing.records.append(ImageRecord(path, label, split, levels | row))
        listing.classes.add(label)
    _refuse_repeats(files, table)
    paths, listing.notes = find_images(root)
    listed = {record.path for record in listing.records}
    listing.leave_out(len(set(paths) - listed), f"images that {table.name} does not list")
    return listing


def read_labels(table: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a ``labels.csv`` with their line numbers.

    The columns ``file`` (relative to the folder, with ``/``) and ``label`` are required, and so is
    a value for both in every row.
    """
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(table, list(reader.fieldnames or []))
            for row in reader:
                _check_row(table, reader.line_num, row)
                yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} is not a readable CSV file in UTF-8 ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {table}: {error.strerror}") from error


def _check_header(table: Path, names: list[str]) -> None:
    for needed in ("file", "label"):
        if needed not in names:
            raise DataError(
                f"{table} has no column {needed!r}: its first line must name the columns, "
                f"file,label and further ones; it has {','.join(names) or 'nothing'}"
            )


def _check_row(table: Path, line: int, row: dict[str, str]) -> None:
    if None in row or None in row.values():
        raise DataError(f"line {line} of {table} has more or fewer values than there are columns")
    if not row["file"] or not row["label"]:
        raise DataError(f"line {line} of {table} has no {'label' if row['file'] else 'file'}")


def _split_of(path: str, has_splits: bool) -> tuple[str | None, tuple[str, ...]]:
    """The split of a path (None: of none) and its parts inside that folder."""
    parts = PurePosixPath(path).parts
    if not has_splits:
        return "train", parts
    return (parts[0], parts[1:]) if parts[0] in _SPLITS else (None, parts)


def find_images(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the images under ``root`` as sorted relative paths, and notes on what was ignored."""
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
