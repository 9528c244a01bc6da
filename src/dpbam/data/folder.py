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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam._names import did_you_mean
from dpbam.data.base import DataError, Images, counted, for_each
from dpbam.data.decode import SUFFIXES, FileImages, common_format, opened
from dpbam.data.dicom import Header, is_dicom, read_header
from dpbam.data.labels import class_order
from dpbam.data.masks import MaskFiles
from dpbam.data.sources import Options, Splits, Table

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
class Row:
    """One image: its path relative to the folder, its labels, its split, its columns, its mask.

    In ``labels.csv`` it is on ``line``, from 1 as an editor counts, with its path as ``spelling``;
    0 and empty if there is no table.
    """

    path: str
    labels: tuple[str, ...]
    split: str
    columns: dict[str, str]
    mask: str | None = None
    line: int = 0
    spelling: str = ""


@dataclass
class Listing:
    """The images of a folder.

    Attributes:
        rows: one per image, sorted by path, or in the order of ``labels.csv``.
        class_names: in their order, where folders or ``classes.txt`` name them.
        task: "single-label" where folders are classes.
        unlisted: while a set is checked: the labels cannot be read, only the images.
    """

    rows: list[Row] = field(default_factory=list)
    class_names: Sequence[str] | None = None
    task: str | None = None
    unlisted: bool = False


def open_folder(argument: str, options: Options) -> Splits:
    """Return the splits of an image folder."""
    root, findings = Path(argument).expanduser().resolve(), options.findings
    listing = _list(root, options)
    if not listing.rows:
        findings.stop()
        suffixes = " ".join(sorted(SUFFIXES))
        raise DataError(f"there are no images in {argument} (looked for CLASS/x with {suffixes})")
    splits = sorted({row.split for row in listing.rows})
    with findings.collecting():
        if "train" not in splits:
            there = " and ".join(splits)
            raise DataError(f"{argument} has {there} images but none to train on")
    unit = None if findings.failed else _read_patients(root, listing, options)
    # one format for all splits; nothing is opened before a table is known to be right
    images = cache(partial(_images, root, [row.path for row in listing.rows], argument, options))
    call = root.name or "folder"
    tables: dict[str, Table] = {}
    for split in splits:
        chosen = np.array([k for k, row in enumerate(listing.rows) if row.split == split], np.int64)
        rows = [listing.rows[k] for k in chosen]
        masked = rows[0].mask is not None
        tables[split] = Table(
            name=f"{call}/{split}" if len(splits) > 1 else call,
            labels=None if masked or listing.unlisted else np.array([row.labels for row in rows]),
            open_images=partial(_select, images, chosen),
            open_masks=partial(_open_masks, root, rows, images, options) if masked else None,
            columns=_columns(rows),
            class_names=listing.class_names,
            task=listing.task,
            unit=unit,
            places=[
                f"line {row.line} of {TABLE}" if row.line else str(Path(argument) / row.path)
                for row in rows
            ],
        )
    return tables


def _list(root: Path, options: Options) -> Listing:
    """List the images of a folder by the layout that it has."""
    if (root / TABLE).is_file():
        listing = Listing()
        with options.findings.collecting():
            listing = _from_csv(root, options)
        if not listing.rows and options.findings.thorough:  # check the images, if nothing else
            return Listing([Row(path, (), "train", {}) for path in find_images(root)[0]],
                           unlisted=True)  # fmt: skip
    elif options.task in (None, "segmentation") and _mask_folders(root):
        listing = _from_mask_tree(root, options)
    else:
        listing = _from_tree(root, options)
    names = root / "classes.txt"
    if names.is_file() and any(row.mask is not None for row in listing.rows):
        lines = names.read_text(encoding="utf-8").splitlines()
        listing.class_names = [line.strip() for line in lines if line.strip()]
    for files in (
        [(row.path, row.spelling or row.path, row.line) for row in listing.rows],
        [(row.mask, row.mask, row.line) for row in listing.rows if row.mask is not None],
    ):
        with options.findings.collecting():
            _refuse_repeats(root, files)
    return listing


def _select(images: Callable[[], FileImages], chosen: NDArray[np.int64]) -> Images:
    return images().select(chosen)


def _open_masks(
    root: Path, rows: Sequence[Row], images: Callable[[], FileImages], options: Options
) -> Images:
    size = images().shape[2:]
    # images of several sizes are a problem of the images, not of their masks
    resize = options.size is not None or len(options.findings.sizes) > 1
    return MaskFiles(root, [row.mask or "" for row in rows], size, 1, resize)


def _images(root: Path, paths: list[str], argument: str, options: Options) -> FileImages:
    """All images of all splits, in one format."""
    window = options.dicom_window if is_dicom(root / paths[0]) else None
    size, channels = common_format(
        lambda k: opened(root / paths[k], window=window), paths.__getitem__, len(paths), options,
        str(root),
    )  # fmt: skip
    return FileImages(root, paths, size, channels, options.resizes, window, Path(argument))


def _columns(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """The rows' columns as arrays; "" where a row has no value."""
    names = sorted({name for row in rows for name in row.columns})
    return {name: np.array([row.columns.get(name, "") for row in rows]) for name in names}


def _read_patients(root: Path, listing: Listing, options: Options) -> str | None:
    """Add the column ``patient`` of DICOM files, who are their unit of privacy by default."""
    findings = options.findings
    kinds = {is_dicom(root / row.path) for row in listing.rows}
    if kinds == {False}:
        return None
    with findings.collecting():
        if len(kinds) > 1:
            raise DataError(
                f"{root} has DICOM files and other images: keep them in separate folders"
            )
    headers: dict[str, Header] = {}
    for row in listing.rows:
        if is_dicom(root / row.path):
            with findings.collecting():
                headers[row.path] = read_header(root / row.path)
    listing.rows = [row for row in listing.rows if row.path in headers]
    if not listing.rows:
        raise DataError(f"none of the DICOM files in {root} can be used")
    tags = [headers[row.path].patient for row in listing.rows]
    with findings.collecting():
        if all("patient" in row.columns for row in listing.rows):
            _check_agreement(root, tags, [row.columns["patient"] for row in listing.rows])
        else:
            listing.rows = [
                replace(row, columns={**row.columns, "patient": tag})
                for row, tag in zip(listing.rows, tags, strict=True)
            ]
            if options.unit in (None, "patient"):
                _check_patients(root, tags, listing)
    patients = len({row.columns["patient"] for row in listing.rows})
    findings.notes.append(f"{counted(len(tags), 'DICOM file')} of {counted(patients, 'patient')}")
    bare = sum(not header.windowed for header in headers.values())
    if bare and options.dicom_window is None:
        files = counted(bare, "DICOM file has", "DICOM files have")
        findings.notes.append(f"{files} no window: the whole range of values is used")
    return "patient"


def _check_patients(root: Path, tags: list[str], listing: Listing) -> None:
    """Refuse identifiers that are missing or all alike, where patients are the unit."""
    otherwise = (
        "name the patients in a column patient of labels.csv, or pass --unit record to protect "
        "single images"
    )
    if "" in tags:
        first = root / listing.rows[tags.index("")].path
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


def _from_tree(root: Path, options: Options) -> Listing:
    """Classes from folder names."""
    listing, findings = Listing(), options.findings
    has_splits = (root / "train").is_dir()
    paths, notes = find_images(root)
    for path in paths:
        split, parts = _split_of(path, has_splits)
        if split is not None and len(parts) > 1:
            listing.rows.append(Row(path, parts[:1], split, _levels(parts[1:-1])))
    findings.notes += notes
    _note_unused(options, len(paths) - len(listing.rows), "outside a class folder")
    tops = [root / split for split in _SPLITS if (root / split).is_dir()] if has_splits else [root]
    # a class folder without images is a class too
    classes = {p.name for top in tops for p in top.iterdir()
               if p.is_dir() and not p.is_symlink() and not p.name.startswith(".")}  # fmt: skip
    if classes and options.task in (None, "single-label"):  # a folder's name is one class
        listing.class_names, listing.task = class_order(classes), "single-label"
    return listing


def _levels(folders: Sequence[str]) -> dict[str, str]:
    """The columns ``folder1``, ``folder2`` ... of the folders that an image is in."""
    return {f"folder{k}": name for k, name in enumerate(folders, start=1)}


def _note_unused(options: Options, count: int, which: str) -> None:
    if count:
        options.findings.notes.append(f"ignored {counted(count, 'image')} {which}")


def _mask_folders(root: Path) -> list[Path]:
    """The folders that hold ``images`` and ``masks``: the folder itself, or its splits."""
    places = [root, *(root / split for split in _SPLITS)]
    return [p for p in places if (p / "images").is_dir() and (p / "masks").is_dir()]


def _from_mask_tree(root: Path, options: Options) -> Listing:
    """Images and masks with the same paths."""
    listing = Listing()
    paths, notes = find_images(root)
    for place in _mask_folders(root):
        start = (place / "images").relative_to(root).as_posix() + "/"
        for path in (path for path in paths if path.startswith(start)):
            inner = PurePosixPath(path.removeprefix(start))
            names = (inner.as_posix(), inner.with_suffix(".png").as_posix())
            existing = [place / "masks" / n for n in names if (place / "masks" / n).is_file()]
            if not existing:
                problem = f"{root / path} has no mask {place / 'masks' / inner}"
                options.findings.problems.append(problem)
                continue
            mask = existing[0].relative_to(root).as_posix()
            split = "train" if place == root else place.name
            listing.rows.append(Row(path, (), split, _levels(inner.parts[:-1]), mask))
    options.findings.notes += notes
    used = {path for row in listing.rows for path in (row.path, row.mask)}
    _note_unused(options, len(set(paths) - used), "without a partner in images or masks")
    return listing


def _refuse_repeats(root: Path, files: Iterable[tuple[str, str, int]]) -> None:
    """Refuse a file (path, spelling, line) that is listed twice, under any names.

    It would be two records of one person, who would have half of the promised privacy. Files are
    compared by device and inode, so that another spelling, a symbolic link and a hard link are
    recognised.
    """
    seen: dict[tuple[int, int], str] = {}
    for path, spelling, line in files:
        stat = (root / path).stat()  # follows links
        key = (stat.st_dev, stat.st_ino)
        spelling += f" (line {line})" if line else ""
        if key in seen:
            where = root / TABLE if line else root
            raise DataError(
                f"{where} lists one file twice, as {seen[key]} and as {spelling}: it would be two "
                "records, each with half of the promised privacy; leave one out or, if they are "
                "different records with the same content, make copies instead of links"
            )
        seen[key] = spelling


def _from_csv(root: Path, options: Options) -> Listing:
    """Labels and columns from ``labels.csv``; the split from its column, else from the path."""
    listing, table = Listing(), root / TABLE
    paths, notes = find_images(root)
    by_name: dict[str, list[str]] = {}
    for path in paths:
        for name in {PurePosixPath(path).name, PurePosixPath(path).stem}:
            by_name.setdefault(name, []).append(path)
    for line, values in read_labels(table, options):
        with options.findings.collecting():
            listing.rows.append(_row(root, by_name, line, values, options))
    options.findings.notes += notes
    used = {path for row in listing.rows for path in (row.path, row.mask)}
    _note_unused(options, len(set(paths) - used), f"that {TABLE} does not list")
    if len(options.label_columns) > 1 or options.task == "regression":
        listing.class_names = tuple(options.label_columns) or None
    return listing


def _row(
    root: Path, by_name: Mapping[str, list[str]], line: int, values: dict[str, str],
    options: Options,
) -> Row:  # fmt: skip
    """The image of one line of a table, and what the table has on it."""
    where = f"line {line} of {root / TABLE}"
    spelling = values.pop("file")
    path = PurePosixPath(spelling).as_posix()
    mask = values.pop("mask", None) if _masked(values, options) else None
    wanted = options.label_columns or (() if mask else ("label",))
    labels = tuple(values.pop(name).strip() for name in wanted)
    files = dict.fromkeys([path, mask or path])
    for_each(lambda _, name: _check_inside(root, name, where, by_name), files)
    named_split = values.pop("split", None)
    split, parts = _split_of(path, (root / "train").is_dir())
    split = named_split or split
    if split not in _SPLITS:
        raise DataError(
            f"{where} has split {split!r}: its column split, or the first folder of its file, must "
            "be train, val or test"
        )
    return Row(path, labels, split, _levels(parts[:-1]) | values, mask, line, spelling)


def _check_inside(root: Path, path: str, where: str, by_name: Mapping[str, list[str]]) -> None:
    """Refuse a file that a table names unless it is one of the folder."""
    real = (root / path).resolve()
    if not real.is_relative_to(root):
        raise DataError(f"{where} names {path}, which is outside the folder")
    if not real.is_file():
        # usual: the separator of Windows, no suffix, or no folder
        meant = by_name.get(PurePosixPath(path.replace("\\", "/")).name, [])
        hint = f": did you mean {meant[0]}?" if len(meant) == 1 else ""
        raise DataError(f"{where} names {path}, which does not exist{hint}")


def _masked(names: Iterable[str], options: Options) -> bool:
    """Whether the column ``mask`` holds the labels."""
    wanted = options.task in (None, "segmentation") and not options.label_columns
    return wanted and "mask" in names and (options.task is not None or "label" not in names)


def read_labels(table: Path, options: Options) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a ``labels.csv`` with their line numbers.

    The columns ``file`` (relative to the folder, with ``/``) and ``label``, or those that the
    options name, are required, and so is a value for each in every row. Only the findings of a
    multi-label set may be empty: there are none. Problems are collected.
    """
    findings = options.findings
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            header = list(reader.fieldnames or [])
            names = reader.fieldnames = _standard(table, header, options)
            label = ("mask",) if _masked(names, options) else ("label",)
            needed = ("file", *(options.label_columns or label))
            _check_header(table, header, names, needed)
            pairs = zip(header, names, strict=True)
            if renamed := [
                f"{spelling!r} as {name}" for spelling, name in pairs if spelling != name
            ]:
                findings.notes.append(f"{table.name}: reading the column {', '.join(renamed)}")
            for row in reader:
                line = _first_line(reader.line_num, row)
                if problem := _row_problem(row, needed, options.task):
                    findings.problems.append(f"line {line} of {table} has {problem}")
                else:
                    yield line, row
    except (UnicodeDecodeError, csv.Error) as error:  # the rows before it are checked
        way_out = ": save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        findings.problems.append(f"{table} is not a readable CSV file in UTF-8 ({error}){way_out}")
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


def _check_header(table: Path, header: list[str], names: list[str], needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in names]
    if not missing:
        return
    way_out = (
        f"its first line must name the columns, {','.join(needed)} and further ones, with commas "
        f"between them; it has {','.join(header) or 'nothing'}"
    )
    if missing == ["label"]:
        way_out += "; or name the column of labels by --label-column"
    if len(missing) == 1 and missing[0] not in _SYNONYMS:
        way_out = did_you_mean(missing[0], header, way_out)
    raise DataError(
        f"{table} has no column {' and no column '.join(map(repr, missing))}: {way_out}"
    )


def _row_problem(row: dict[str, str], needed: Sequence[str], task: str | None) -> str:
    """What is wrong with the values of a line, after "has"; empty if nothing is."""
    if None in row or None in row.values():
        return "more or fewer values than there are columns"
    empty = [name for name in needed if not row[name]]
    findings_may_be_empty = task == "multi-label" and empty == ["label"]
    if findings_may_be_empty or not empty:
        return ""
    return f"no {' and no '.join(empty)}: fill it in, or leave the line out"


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
