"""A folder of images: one folder per class, or a ``labels.csv`` that lists the files.

========================================  ====================================================
``train/CLASS/x.png`` (``test/``,         the splits as they are; without ``test`` and ``val``
``val/``)                                 a part of ``train`` is held out
``CLASS/x.png``                           a part is held out
``CLASS/A/B/x.png``                       A and B become the columns ``folder1`` and ``folder2``
``images/x.png`` and ``masks/x.png``,     a segmentation: the mask of each image has its path,
or both in ``train/`` ...                 with the suffix of the image or ``.png``
``labels.csv``                            columns ``file`` and ``label``, and optionally ``split``;
                                          the others (``patient``, ``sex``, ...) become columns
========================================  ====================================================

Where ``labels.csv`` has no column of such a name, the only column that means the same has its part:
``path``, ``image`` or ``filename`` for ``file``, ``class``, ``target`` or ``finding`` for
``label``, ``subject`` or ``patient_id`` for ``patient`` (``_SYNONYMS`` has them all), in any case
and with spaces or dashes for ``_``. If two would do, the table is refused.

In ``labels.csv`` a ``label`` may be a class, findings with ``|`` between them, or a number. The
option ``label_columns`` names other columns: one instead of ``label``, or one of 0 and 1 per
finding. A column ``mask`` in place of ``label`` names each image's mask. A file ``classes.txt``
names the classes of masks, one per line, from 0.

The files may be DICOM (:mod:`dpbam.data.dicom`), with or without a suffix; then the column
``patient`` is their PatientID, unless ``labels.csv`` has one, and the unit of privacy is the
patient unless another is named.

Ignored, and counted in the notes: hidden files, files without the suffix of an image, and links out
of the folder. Linked folders are not entered. One file under two names (another spelling, a
symbolic or a hard link) is refused: it would be two records.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import DataError, Images, counted, for_each
from dpbam.data.dataset import UNKNOWN, DataSet
from dpbam.data.decode import SUFFIXES, FileImages, common_format, opened
from dpbam.data.dicom import Header, is_dicom, read_header
from dpbam.data.labels import class_order, number_labels
from dpbam.data.masks import MaskFiles, number_masks
from dpbam.data.sources import Openers, Options

_SPLITS = ("train", "val", "test")
TABLE = "labels.csv"
_LISTS = (TABLE, "classes.txt")
_SYNONYMS = {
    "file": ("path", "filename", "file_name", "filepath", "file_path", "image", "image_path",
             "image_file", "image_index", "img", "dicom", "dicom_path"),
    "mask": ("masks", "mask_path", "mask_file"),
    "label": ("labels", "class", "target", "finding", "findings", "finding_labels", "diagnosis"),
    "patient": ("patient_id", "patientid", "subject", "subject_id", "subjectid"),
    "split": ("subset", "partition"),
}  # fmt: skip


@dataclass(frozen=True)
class ImageRecord:
    """One image: its path relative to the folder, its labels, its split, its columns, its mask.

    ``line`` is its line in ``labels.csv``, from 1, as an editor counts; 0 if there is no table.
    """

    path: str
    labels: tuple[str, ...]
    split: str
    columns: dict[str, str]
    mask: str | None = None
    line: int = 0


@dataclass
class Listing:
    """The contents of a folder."""

    records: list[ImageRecord] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)  # of folders
    columns: tuple[str, ...] = ()  # of labels.csv that hold labels
    notes: tuple[str, ...] = ()
    unknown: bool = False  # while a set is checked: a table of labels that cannot be read

    def place(self, index: int) -> str:
        """Return where a record is to be found: its line in the table, else its path."""
        record = self.records[index]
        return f"line {record.line} of {TABLE}" if record.line else record.path

    def leave_out(self, count: int, which: str) -> None:
        """Note images that were ignored."""
        if count:
            self.notes += (f"ignored {counted(count, 'image')} {which}",)


def open_folder(argument: str, options: Options) -> Openers:
    """Return the splits of an image folder."""
    root = Path(argument).expanduser().resolve()
    table = root / TABLE
    listing: Listing | None = None
    if table.is_file():
        with options.collecting():
            listing = _from_csv(root, table, options)
        if listing is None or (not listing.records and options.thorough):
            listing = _unlisted(root)
    elif options.task in (None, "segmentation") and _mask_folders(root):
        listing = _from_mask_tree(root, options)
    else:
        listing = _from_tree(root, options)
    if options.failed:  # the table first: no image is opened where it has problems
        return {}
    if not listing.records:
        suffixes = " ".join(sorted(SUFFIXES))
        raise DataError(f"there are no images in {argument} (looked for CLASS/x with {suffixes})")
    splits = {record.split for record in listing.records}
    with options.collecting():
        if "train" not in splits:
            there = " and ".join(sorted(splits))
            raise DataError(f"{argument} has {there} images but none to train on")
    call, unit = root.name or "folder", _read_patients(root, listing, options)
    images = _images(root, [record.path for record in listing.records], argument, options)
    labels, masks = np.zeros(len(listing.records), np.int64), None
    names: tuple[str, ...] = UNKNOWN
    with options.collecting():
        if listing.records[0].mask is not None:
            masks, names = _masks(root, listing, images, options)
        elif not listing.unknown:
            labels, names = _labels(listing, call, options.task)
    return {
        split: partial(
            _load, f"{call}/{split}" if len(splits) > 1 else call, split, listing,
            DataSet(call, images, labels, names, masks=masks, unit=unit),
        )
        for split in sorted(splits)
    }  # fmt: skip


def _labels(listing: Listing, call: str, task: str | None) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The labels of all records, and the classes."""
    class_names: Sequence[str] | None = None
    if listing.classes and task in (None, "single-label"):  # a folder's name is one class
        class_names, task = class_order(listing.classes), "single-label"
    elif len(listing.columns) > 1 or (listing.columns and task == "regression"):
        class_names = listing.columns
    raw = np.array([record.labels for record in listing.records])
    numbers, names = number_labels({call: raw}, class_names, task, place=listing.place)
    return numbers[call], names


def _masks(
    root: Path, listing: Listing, images: FileImages, options: Options
) -> tuple[Images, tuple[str, ...]]:
    paths = [record.mask or "" for record in listing.records]
    with options.collecting():
        _refuse_repeats(((root / path, path) for path in paths), root)
    sizes = options.findings.sizes if options.findings else ()  # several: a problem of the images
    resize = options.size is not None or len(sizes) > 1
    files = MaskFiles(root, paths, images.shape[2:], 1, resize)
    listed = root / "classes.txt"
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    class_names = [line.strip() for line in lines if line.strip()]
    masks, names = number_masks({str(root): files}, class_names)
    return masks[str(root)], names


def _images(root: Path, paths: list[str], argument: str, options: Options) -> FileImages:
    """All images of all splits, in one format."""
    window = options.dicom_window if is_dicom(root / paths[0]) else None
    size, channels = common_format(
        lambda index: opened(root / paths[index], window=window), len(paths), options, str(root)
    )
    resize = options.size is not None or options.thorough
    return FileImages(root, paths, size, channels, resize, window, Path(argument))


def _read_patients(root: Path, listing: Listing, options: Options) -> str | None:
    """Add the column ``patient`` of DICOM files, who are their unit of privacy by default."""
    records = listing.records
    kinds = {is_dicom(root / record.path) for record in records if record.path}
    if kinds == {False}:
        return None
    with options.collecting():
        if len(kinds) > 1:
            raise DataError(
                f"{root} has DICOM files and other images: keep them in separate folders"
            )
    records = [record for record in records if is_dicom(root / record.path)]
    headers: dict[str, Header] = {}
    for record in records:
        with options.collecting():
            headers[record.path] = read_header(root / record.path)
    listing.records = [record for record in records if record.path in headers]
    if not listing.records:
        raise DataError(f"none of the DICOM files in {root} can be used")
    tags = [headers[record.path].patient for record in listing.records]
    if all("patient" in record.columns for record in listing.records):
        with options.collecting():
            _check_agreement(root, tags, [record.columns["patient"] for record in listing.records])
    else:
        _check_patients(root, tags, listing, options)
        listing.records = [
            replace(record, columns={**record.columns, "patient": tag})
            for record, tag in zip(listing.records, tags, strict=True)
        ]
    patients = len({record.columns["patient"] for record in listing.records})
    bare = sum(not header.windowed for header in headers.values())
    listing.notes += (f"{counted(len(tags), 'DICOM file')} of {counted(patients, 'patient')}",)
    if bare and options.dicom_window is None:
        files = counted(bare, "DICOM file has", "DICOM files have")
        listing.notes += (f"{files} no window: the whole range of values is used",)
    return "patient"


def _check_patients(root: Path, tags: list[str], listing: Listing, options: Options) -> None:
    """Refuse identifiers that are missing or all alike, where patients are the unit."""
    otherwise = (
        "name the patients in a column patient of labels.csv, or pass --unit record to protect "
        "single images"
    )
    if options.unit not in (None, "patient"):
        return
    with options.collecting():
        if "" in tags:
            first = root / listing.records[tags.index("")].path
            raise DataError(
                f"{tags.count('')} of {len(tags)} DICOM files have no PatientID, {first} first: "
                f"{otherwise}"
            )
        if len(set(tags)) == 1:
            raise DataError(
                f"all {len(tags)} DICOM files in {root} have the same PatientID, as if it had been "
                f"removed: {otherwise}"
            )


def _check_agreement(root: Path, tags: list[str], named: list[str]) -> None:
    """Refuse a table that gives one patient of the files several names: each would be a unit."""
    names: dict[str, set[str]] = {}
    for tag, name in zip(tags, named, strict=True):
        names.setdefault(tag, set()).add(name)
    split = sum(len(named_as) > 1 for tag, named_as in names.items() if tag)
    if split and len(names) > 1:
        raise DataError(
            f"{split} PatientIDs of the DICOM files in {root} have several values in the column "
            "patient of labels.csv: they would be several units of privacy; correct the column, or "
            "leave it out"
        )


def _load(name: str, split: str, listing: Listing, everything: DataSet) -> DataSet:
    chosen = np.array([k for k, r in enumerate(listing.records) if r.split == split], np.int64)
    records = [listing.records[k] for k in chosen]
    lines = [record.line for record in records] if all(record.line for record in records) else ()
    subset = everything.subset(chosen, name=name)
    return replace(subset, columns=_columns(records), notes=listing.notes, table=TABLE, lines=lines)


def _columns(records: Sequence[ImageRecord]) -> dict[str, NDArray[Any]]:
    """The records' columns as arrays; "" where a record has no value."""
    names = sorted({name for record in records for name in record.columns})
    return {name: np.array([r.columns.get(name, "") for r in records]) for name in names}


def _from_tree(root: Path, options: Options) -> Listing:
    """Classes from folder names."""
    listing = Listing()
    has_splits = (root / "train").is_dir()
    paths, listing.notes = find_images(root)
    for path in paths:
        split, parts = _split_of(path, has_splits)
        if split is None or len(parts) < 2:
            continue
        levels = {f"folder{k}": level for k, level in enumerate(parts[1:-1], start=1)}
        listing.records.append(ImageRecord(path, parts[:1], split, levels))
    with options.collecting():
        _refuse_repeats(((root / r.path, r.path) for r in listing.records), root)
    listing.leave_out(len(paths) - len(listing.records), "outside a class folder")
    tops = [root / split for split in _SPLITS if (root / split).is_dir()] if has_splits else [root]
    for top in tops:  # a class folder without images is a class too
        listing.classes |= {p.name for p in top.iterdir() if _is_class(p)}
    return listing


def _mask_folders(root: Path) -> list[Path]:
    """The folders that hold ``images`` and ``masks``: the folder itself, or its splits."""
    places = [root, *(root / split for split in _SPLITS)]
    return [p for p in places if (p / "images").is_dir() and (p / "masks").is_dir()]


def _from_mask_tree(root: Path, options: Options) -> Listing:
    """Images and masks with the same paths."""
    listing, every = Listing(), set()
    paths, listing.notes = find_images(root)
    for place in _mask_folders(root):
        start = (place / "images").relative_to(root).as_posix() + "/"
        for path in (path for path in paths if path.startswith(start)):
            inner = PurePosixPath(path.removeprefix(start))
            names = (inner.as_posix(), inner.with_suffix(".png").as_posix())
            existing = [place / "masks" / n for n in names if (place / "masks" / n).is_file()]
            if not existing:
                with options.collecting():
                    raise DataError(f"{root / path} has no mask {place / 'masks' / inner}")
                continue
            mask = existing[0].relative_to(root).as_posix()
            levels = {f"folder{k}": level for k, level in enumerate(inner.parts[:-1], start=1)}
            split = "train" if place == root else place.name
            listing.records.append(ImageRecord(path, (), split, levels, mask))
            every |= {path, mask}
    with options.collecting():
        _refuse_repeats(((root / r.path, r.path) for r in listing.records), root)
    listing.leave_out(len(set(paths) - every), "without a partner in images or masks")
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


def _from_csv(root: Path, table: Path, options: Options) -> Listing:
    """Labels and columns from ``labels.csv``; the split from its column, else from the path."""
    listing, files = Listing(), []
    listing.columns = tuple(options.label_columns)
    for line, row in read_labels(table, options):
        with options.collecting():
            spelling = row.pop("file")
            record = _record(root, f"line {line} of {table}", spelling, row, options)
            listing.records.append(replace(record, line=line))
            files.append((root / record.path, f"{spelling} (line {line})"))
    with options.collecting():
        _refuse_repeats(files, table)
    paths, notes = find_images(root)
    listing.notes = (*_renamed(table, options), *notes)
    listed = {path for record in listing.records for path in (record.path, record.mask)}
    listing.leave_out(len(set(paths) - listed), f"that {table.name} does not list")
    return listing


def _unlisted(root: Path) -> Listing:
    """All images of a folder whose table cannot be used, without labels, to check the rest."""
    paths, notes = find_images(root)
    records = [ImageRecord(path, (), "train", {}) for path in paths]
    return Listing(records, notes=notes, unknown=True)


def _record(
    root: Path, where: str, spelling: str, row: dict[str, str], options: Options
) -> ImageRecord:
    """The record of one row of a table, whose file is ``spelling``."""
    masked = row.pop("mask", None) if _masked(row, options) else None
    path = PurePosixPath(spelling).as_posix()
    wanted = options.label_columns or (() if masked else ("label",))
    labels = tuple(row.pop(name).strip() for name in wanted)
    for_each(lambda _, name: _inside(root, name, where), dict.fromkeys([path, masked or path]))
    named_split = row.pop("split", None)
    split, parts = _split_of(path, (root / "train").is_dir())
    split = named_split or split
    if split not in _SPLITS:
        raise DataError(
            f"{where} has split {split!r}: its column split, or the first folder of its file, must "
            "be train, val or test"
        )
    levels = {f"folder{k}": level for k, level in enumerate(parts[:-1], start=1)}
    return ImageRecord(path, labels, split, levels | row, masked)


def _inside(root: Path, path: str, where: str) -> Path:
    """Return the file that a table names, if it is one of the folder."""
    real = (root / path).resolve()
    if not real.is_relative_to(root):
        raise DataError(f"{where} names {path}, which is outside the folder")
    if not real.is_file():
        raise DataError(f"{where} names {path}, which does not exist")
    return real


def _masked(names: Iterable[str], options: Options) -> bool:
    """Whether the column ``mask`` holds the labels."""
    wanted = options.task in (None, "segmentation") and not options.label_columns
    return wanted and "mask" in names and (options.task is not None or "label" not in names)


def read_labels(
    table: Path, options: Options | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a ``labels.csv`` with their line numbers.

    The columns ``file`` (relative to the folder, with ``/``) and ``label``, or those that the
    options name, are required, and so is a value for each in every row. Only the findings of a
    multi-label set may be empty: there are none.
    """
    options = options or Options()
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            header = list(reader.fieldnames or [])
            names = reader.fieldnames = _standard(table, header, options)
            label = ("mask",) if _masked(names, options) else ("label",)
            needed = ("file", *(options.label_columns or label))
            _check_header(table, names, needed)
            for row in reader:
                line = _first_line(reader.line_num, row)
                with options.collecting():
                    _check_row(table, line, row, needed, options.task)
                    yield line, row
    except (UnicodeDecodeError, csv.Error) as error:
        with options.collecting():  # the rows before it are checked
            way_out = ": save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            raise DataError(
                f"{table} is not a readable CSV file in UTF-8 ({error}){way_out}"
            ) from error
    except OSError as error:
        raise DataError(f"cannot read {table}: {error.strerror}") from error


def _first_line(last: int, row: Mapping[Any, Any]) -> int:
    """The line on which a row begins: a value in quotes may hold further ones."""
    texts = (text for value in row.values() for text in (value if type(value) is list else [value]))
    return last - sum(len(re.findall(r"\r\n|\r|\n", text)) for text in texts if text)


def _standard(table: Path, names: list[str], options: Options) -> list[str]:
    """The names of a table's columns, synonyms replaced where no column has the name itself."""
    plain = [re.sub(r"[\s-]", "_", name.strip().lower()) for name in names]
    renamed = list(names)
    for standard, synonyms in _SYNONYMS.items():
        chosen = standard in ("label", "mask") and bool(options.label_columns)
        if standard in names or chosen or (standard == "label" and _masked(renamed, options)):
            continue
        places = [k for k, name in enumerate(plain) if name in (standard, *synonyms)]
        places = [k for k in places if names[k] not in options.label_columns]
        if len(places) > 1:
            raise DataError(
                f"{table} has the columns {' and '.join(repr(names[k]) for k in places)}, each of "
                f"which could be {standard!r}: rename the right one to {standard}"
            )
        for k in places:
            renamed[k] = standard
    return renamed


def _renamed(table: Path, options: Options) -> tuple[str, ...]:
    """Note which columns of a table are read under another name."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            names = list(csv.DictReader(file).fieldnames or [])
    except (UnicodeDecodeError, csv.Error):  # while a set is checked: reported already
        return ()
    pairs = zip(names, _standard(table, names, options), strict=True)
    changed = [f"{spelling!r} as {name}" for spelling, name in pairs if spelling != name]
    return (f"{table.name}: reading the column {', '.join(changed)}",) if changed else ()


def _check_header(table: Path, names: list[str], needed: Sequence[str]) -> None:
    if missing := [name for name in needed if name not in names]:
        raise DataError(
            f"{table} has no column {' and no column '.join(map(repr, missing))}: its first line "
            f"must name the columns, {','.join(needed)} and further ones, with commas between "
            f"them; it has {','.join(names) or 'nothing'}"
        )


def _check_row(
    table: Path, line: int, row: dict[str, str], needed: Sequence[str], task: str | None
) -> None:
    if None in row or None in row.values():
        raise DataError(f"line {line} of {table} has more or fewer values than there are columns")
    empty = [name for name in needed if not row[name]]
    if empty and not (task == "multi-label" and empty == ["label"]):
        raise DataError(f"line {line} of {table} has no {' and no '.join(empty)}")


def _split_of(path: str, has_splits: bool) -> tuple[str | None, tuple[str, ...]]:
    """The split of a path (None: of none) and its parts inside that folder."""
    parts = PurePosixPath(path).parts
    if not has_splits:
        return "train", parts
    return (parts[0], parts[1:]) if parts[0] in _SPLITS else (None, parts)


def find_images(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the images under ``root`` as sorted relative paths, and notes on what was ignored."""
    paths: list[str] = []
    hidden = other = outside = 0
    for here, folders, files in os.walk(root):  # links to folders are not followed
        outside += sum((Path(here) / name).is_symlink() for name in folders)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            path = Path(here) / name
            if name.startswith("."):
                hidden += 1
            elif path.suffix.lower() not in SUFFIXES and not is_dicom(path):
                other += 1
            elif path.is_symlink() and not path.resolve().is_relative_to(root):
                outside += 1
            else:
                paths.append(path.relative_to(root).as_posix())
    other -= sum((root / name).is_file() for name in _LISTS)
    counts = {
        counted(hidden, "hidden file"): hidden,
        counted(other, "file that is not an image", "files that are not images"): other,
        f"{counted(outside, 'link')} to folders or out of the folder": outside,
    }
    return sorted(paths), tuple(f"ignored {what}" for what, n in counts.items() if n)
