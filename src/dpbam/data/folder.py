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

How its columns are read: :mod:`dpbam.data.labels_csv`. A file ``classes.txt`` names the classes of
masks, one per line, from 0.

The files may be DICOM (:mod:`dpbam.data.dicom`), with or without a suffix; then the column
``patient`` is their PatientID, unless ``labels.csv`` has one, and the unit of privacy is the
patient unless another is named.

Ignored, and counted in the notes: hidden files, files without the suffix of an image, and links out
of the folder. Linked folders are not entered. One file under two names (another spelling, a
symbolic or a hard link) is refused: it would be two records.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath

import numpy as np

from dpbam.data.base import DataError, Images, counted, for_each
from dpbam.data.decode import SUFFIXES, FileImages, common_format, open_image
from dpbam.data.dicom import Header, is_dicom, read_header
from dpbam.data.labels import class_order, is_number
from dpbam.data.labels_csv import TABLE, holds_masks, read_rows
from dpbam.data.masks import MaskFiles
from dpbam.data.sources import Options, Splits, Table

_SPLITS = ("train", "val", "test")
_LISTS = (TABLE, "classes.txt")


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
    # not resolved: every message has paths as the user gave them
    root, findings = Path(argument).expanduser(), options.findings
    listing = _list(root, options)
    if not listing.rows:
        raise _explain_no_records(root, listing, options)
    unit = None if findings.failed else _read_patients(root, listing, options)
    splits = sorted({row.split for row in listing.rows})
    if "train" not in splits:
        problem = f"{argument} has {' and '.join(splits)} images but none to train on"
        findings.problems.append(problem)
    call = root.resolve().name or "folder"
    # one format for all splits; nothing is opened before a table is known to be right
    images = cache(lambda: _open_images(root, [row.path for row in listing.rows], options))

    def make_table(split: str) -> Table:
        chosen = np.array([k for k, row in enumerate(listing.rows) if row.split == split], np.int64)
        rows = [listing.rows[k] for k in chosen]
        columns = sorted({name for row in rows for name in row.columns})
        masks = [row.mask for row in rows if row.mask is not None]

        def open_masks() -> Images:
            # images of several sizes are a problem of the images, not of their masks
            resize = options.size is not None or len(findings.sizes) > 1
            return MaskFiles(root, masks, images().shape[2:], 1, resize)

        return Table(
            name=f"{call}/{split}" if len(splits) > 1 else call,
            labels=None if masks or listing.unlisted else np.array([row.labels for row in rows]),
            open_images=lambda: images().select(chosen),
            open_masks=open_masks if masks else None,
            # "" where a row has no value
            columns={n: np.array([row.columns.get(n, "") for row in rows]) for n in columns},
            class_names=listing.class_names,
            task=listing.task,
            unit=unit,
            places=[
                f"line {row.line} of {TABLE}" if row.line else str(root / row.path) for row in rows
            ],
        )

    return {split: make_table(split) for split in splits}


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


def _explain_no_records(root: Path, listing: Listing, options: Options) -> DataError:
    """Return why a folder has no record, and what to do."""
    if options.findings.failed:
        return DataError(*options.findings.problems)
    images = len(find_images(root)[0])
    if not images:
        return DataError(f"there are no images in {root}: looked for {' '.join(sorted(SUFFIXES))}")
    if options.findings.problems:  # of a check: they are why
        return DataError(*options.findings.problems)
    inside = "train/" if (root / "train").is_dir() else ""
    if options.task == "segmentation":
        lack, labels = "no folders images and masks", "mask"
        move = f"move them to {inside}images/ and their masks to {inside}masks/"
    else:
        lack = "none in its class folders" if listing.class_names else "no class folders"
        labels = "label"
        move = f"move each into a folder of its class ({inside}CLASS/x.png)"
    return DataError(
        f"{root} has {counted(images, 'image')}, but {lack} and no {TABLE}: {move}, or list them "
        f"in {TABLE} with the columns file and {labels}"
    )


def _open_images(root: Path, paths: list[str], options: Options) -> FileImages:
    """All images of all splits, in one format."""
    window = options.dicom_window if is_dicom(root / paths[0]) else None
    size, channels = common_format(
        lambda k: open_image(root / paths[k], window=window), paths.__getitem__, len(paths),
        options, str(root),
    )  # fmt: skip
    return FileImages(root, paths, size, channels, options.resizes, window)


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
    if options.task == "regression" and not all(map(is_number, classes)):
        raise DataError(
            f"{root} has one folder per class ({', '.join(class_order(classes)[:3])}), but a "
            f"regression needs a number per image: name them in {TABLE}"
        )
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
    listing, table, findings = Listing(), root / TABLE, options.findings
    paths, notes = find_images(root)
    by_name: dict[str, list[str]] = {}
    for path in paths:
        for name in {PurePosixPath(path).name, PurePosixPath(path).stem}:
            by_name.setdefault(name, []).append(path)
    known = len(findings.problems)
    for line, values in read_rows(table, options):
        with findings.collecting():
            listing.rows.append(_row(root, by_name, line, values, options))
    if findings.cut_short:
        # the rows before the error may be of one class or one split: nothing is said of the whole
        return Listing()
    if not listing.rows and len(findings.problems) == known:
        raise DataError(f"{table} lists no images: write a line for each, with its label")
    findings.notes += notes
    if listing.rows:  # else all images are checked
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
    mask = values.pop("mask", None) if holds_masks(values, options) else None
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
    if not real.is_relative_to(root.resolve()):
        raise DataError(f"{where} names {path}, which is outside the folder")
    if not real.is_file():
        # usual: the separator of Windows, no suffix, or no folder
        meant = by_name.get(PurePosixPath(path.replace("\\", "/")).name, [])
        hint = f": did you mean {meant[0]}?" if len(meant) == 1 else ""
        raise DataError(f"{where} names {path}, which does not exist{hint}")


def _split_of(path: str, has_splits: bool) -> tuple[str | None, tuple[str, ...]]:
    """The split of a path (None: of none) and its parts inside that folder."""
    parts = PurePosixPath(path).parts
    if not has_splits:
        return "train", parts
    return (parts[0], parts[1:]) if parts[0] in _SPLITS else (None, parts)


def find_images(root: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the images under ``root`` as sorted relative paths, and notes on what was ignored."""
    paths, real = list[str](), root.resolve()
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
            elif path.is_symlink() and not path.resolve().is_relative_to(real):
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
