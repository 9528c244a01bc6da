"""Read a whole data set and list its problems."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.data.base import DataError, Pixels, counted, in_short
from dpbam.data.dataset import UNKNOWN, DataSet
from dpbam.data.decode import KEPT_BYTES
from dpbam.data.owners import person_columns
from dpbam.data.sources import Findings
from dpbam.errors import DPBAMError

_KINDS = {1: "grey", 3: "colour"}
_NAMED = 3  # examples in a sentence
_LISTED = 20  # images that cannot be read, one sentence each
_MANY, _SIMILAR = 20, 0.6  # records of a class, and the likeness of a name misspelt for its own
_DARK = 32  # of 255
_DIM = 64  # of 255: what 14 of 16 bits reach


def check(dataset: DataSet, test: DataSet | None = None, *, unit: str | None = None) -> list[str]:
    """Read every image and list the problems, one sentence each.

    Problems are broken images (by path), a single class, classes without images, images that occur
    twice in the training set (each copy counts as a record, so the person in it is protected less
    than the statement promises) or in both sets, images that are nearly black, records without a
    unit of privacy, and units of privacy, or patients, in both sets.

    Args:
        dataset: the training set.
        test: the test set, if there is one.
        unit: the column that holds the unit of privacy; None or "record" if each record is one.

    Example:
        >>> from dpbam.data import from_arrays
        >>> check(from_arrays(np.full((2, 8, 8), 255, np.uint8), [0, 1]))
        ['arrays has 1 image more than once (record 0 = record 1)']
    """
    scan = _scan(dataset)
    problems = [*scan.broken, *_dark(dataset, scan), *_classes(dataset)]
    if pairs := _find_repeats(scan):
        images = counted(len({first for first, _ in pairs}), "image")
        problems.append(
            f"{dataset.name} has {images} more than once ({_examples(pairs, dataset, dataset)})"
        )
    unread = dataset.class_names == UNKNOWN and not dataset.columns  # reported as what it is
    if unit not in (None, "record") and not unread:
        try:
            _validate.owners(str(unit), dataset.column(str(unit)), dataset.place)
        except DPBAMError as error:
            problems.append(str(error))
    if test is None:
        return problems
    test_scan = _scan(test)
    problems += [*test_scan.broken, *_dark(test, test_scan)]
    if pairs := _find_shared(scan, test_scan):
        images = f"{counted(len(pairs), 'image')} of {test.name}"
        problems.append(
            f"{images} {'is' if len(pairs) == 1 else 'are'} in {dataset.name} too "
            f"({_examples(pairs, dataset, test)})"
        )
    for name, both in shared_units(dataset, test, unit).items():
        values = counted(both.size, f"value of {name!r}", f"values of {name!r}")
        examples = ", ".join(map(str, both[:_NAMED]))
        problems.append(f"{dataset.name} and {test.name} share {values} ({examples})")
    return problems


def shared_units(train: DataSet, test: DataSet, unit: str | None) -> dict[str, NDArray[Any]]:
    """Return the units of privacy, and the persons, that are in both sets, by column.

    Example:
        >>> from dpbam.data import from_arrays
        >>> images = np.zeros((2, 8, 8), np.uint8)
        >>> train = from_arrays(images, [0, 1], columns={"patient": ["a", "b"]})
        >>> test = from_arrays(images, [0, 1], columns={"patient": ["b", "c"]})
        >>> shared_units(train, test, "record")["patient"].tolist()
        ['b']
    """
    names = [str(n) for n in dict.fromkeys((unit, *person_columns(train.columns)))]
    there = [n for n in names if n in train.columns and n in test.columns]
    both = {n: np.intersect1d(train.columns[n], test.columns[n]) for n in there}
    named = {name: values[values != ""] for name, values in both.items()}
    return {name: values for name, values in named.items() if values.size}


def defects(train: DataSet, test: DataSet, unit: str, *, private: bool = True) -> list[str]:
    """Return what a run warns its operator of before it starts, a sentence each.

    Copies, images that are nearly black, and classes without a training image: nothing that keeps
    a run from training, but it is worse than its operator believes. Copies under several names are
    several units: the guarantee of a person who is in k of them is k times epsilon; copies of one
    unit are protected together, and do not count. The numbers are computed from the data without
    noise: for the operator only. Of sets that are decoded anew for every step only the headers are
    read; :func:`check` reads everything.

    Args:
        train: the training set.
        test: the test set.
        unit: the column that holds the unit of privacy; "record" if each record is one.
        private: whether the run promises privacy.

    Raises:
        DataError: if an image cannot be read, or is of another size than the others.

    Example:
        >>> from dpbam.data import from_arrays
        >>> images = np.full((3, 8, 8), 255, np.uint8)
        >>> images[2, 0] = 0
        >>> train = from_arrays(images, [0, 0, 1], columns={"patient": ["a", "a", "b"]})
        >>> test = from_arrays(images[2:], [0], name="test")
        >>> [sentence.partition(":")[0] for sentence in defects(train, test, "patient")]
        ['1 image of test is in arrays too, so the score is too good']
        >>> len(defects(train, test, "record"))
        2
    """
    warnings: list[str] = []
    scan, test_scan = _readable(train), _readable(test)
    if scan is not None:
        owners = np.arange(len(train)) if unit == "record" else train.column(unit)
        copies = {scan.hashes[k] for j, k in _find_repeats(scan) if owners[j] != owners[k]}
        if copies and private:
            way = "name their owner by --unit" if unit == "record" else f"correct their {unit}"
            each = "" if unit == "record" else f", under more than one {unit}"
            occurs = f"{counted(len(copies), 'image')} {'occurs' if len(copies) == 1 else 'occur'}"
            warnings.append(
                f"{occurs} more than once in {train.name}{each}: a person who is in all copies has "
                "weaker protection than the stated epsilon; remove the copies, or "
                f"{way} (dpbam data check names them)"
            )
        shared = [] if test_scan is None else _find_shared(scan, test_scan)
        if shared:
            are = f"{counted(len(shared), 'image')} of {test.name} " + (
                "is" if len(shared) == 1 else "are"
            )
            warnings.append(
                f"{are} in {train.name} too, so the score is too good: remove the copies from one "
                "of the two (dpbam data check names them)"
            )
        warnings += _dark(train, scan)
    return warnings + ([] if train.task == "segmentation" else _classes(train))


def _readable(dataset: DataSet) -> Scan | None:
    """Read all images, or all headers if they are decoded anew for every step; refuse a bad one."""
    if _is_streamed(dataset):
        dataset.images.check_headers()
        return None
    scan = _scan(dataset)
    if scan.broken:
        raise DataError(*scan.broken)
    return scan


def _is_streamed(dataset: DataSet) -> bool:
    return dataset.images.decodes and math.prod(dataset.images.shape) > KEPT_BYTES


class Scan(NamedTuple):
    """What one pass over all images of a set finds.

    Attributes:
        broken: sentences on images that cannot be read.
        hashes: of the pixels of the others, by position.
        brightest: the largest value of each, by position.
    """

    broken: list[str]
    hashes: dict[int, bytes]
    brightest: dict[int, int]


def _scan(dataset: DataSet) -> Scan:
    """Read all images: by chunks, and one by one where a record is broken."""
    scan, images = Scan([], {}, {}), dataset.images

    def add(index: int, pixels: Pixels) -> None:
        scan.hashes[index] = hashlib.sha256(pixels.tobytes()).digest()
        scan.brightest[index] = int(pixels.max())

    for positions in images.chunks():
        try:
            pixels = images.read(positions)
        except Exception:  # a user's own Images can fail in any way
            for index in positions.tolist():
                try:
                    add(index, images.read(np.array([index], dtype=np.int64)))
                except DataError as error:
                    scan.broken.append(str(error))
                except Exception as error:
                    where = images.describe(index)
                    scan.broken.append(f"{where} cannot be read: {in_short(error)}")
        else:
            for index, one in zip(positions.tolist(), pixels, strict=True):
                add(index, one)
    if len(scan.broken) > _LISTED:
        rest = f"{dataset.name} has {len(scan.broken) - _LISTED} more images that cannot be read"
        scan.broken[_LISTED:] = [rest]
    return scan


def _find_repeats(scan: Scan) -> list[tuple[int, int]]:
    """The pairs of a record and an earlier one with the same pixels."""
    first: dict[bytes, int] = {}
    return [(first[d], k) for k, d in scan.hashes.items() if first.setdefault(d, k) != k]


def _find_shared(train: Scan, test: Scan) -> list[tuple[int, int]]:
    """The pairs of a training and a test record with the same pixels."""
    where = {digest: index for index, digest in train.hashes.items()}
    return [(where[d], index) for index, d in test.hashes.items() if d in where]


def _examples(pairs: list[tuple[int, int]], first: DataSet, second: DataSet) -> str:
    shown = pairs[:_NAMED]
    return ", ".join(f"{first.images.describe(a)} = {second.images.describe(b)}" for a, b in shown)


def _dark(dataset: DataSet, scan: Scan) -> list[str]:
    """Name images that are nearly black, those whose files leave bits unused apart.

    A file of 16 bits is scaled by its full range, so that one which uses 12 of them is nearly
    black. Where no image of a set is brighter than 14 bits, all of its files are looked at.
    """
    brightest = scan.brightest
    dark = [index for index, most in brightest.items() if most < _DARK]
    dim = max(brightest.values(), default=255) <= _DIM
    looked_at = list(brightest) if dim else dark
    used = {k: bits for k in looked_at if (bits := dataset.images.used_bits(k)) is not None}
    plain = [k for k in dark if k not in used]
    problems = []
    if used:
        bits = max(1, *used.values())
        problems.append(
            f"{dataset.name} has {counted(len(used), 'image')} of 16 bits with only {bits} in use, "
            f"too dark by a factor of {2 ** (16 - bits)}: multiply the values by it, the same for "
            f"all files ({_names(list(used), dataset)})"
        )
    if plain:
        problems.append(
            f"{dataset.name} has {counted(len(plain), 'image')} without a pixel above {_DARK - 1} "
            "of 255, nearly black: scale all files by one public factor, or leave out those "
            f"without content ({_names(plain, dataset)})"
        )
    return problems


def _names(indices: list[int], dataset: DataSet) -> str:
    more = ", ..." if len(indices) > _NAMED else ""
    return ", ".join(dataset.images.describe(k) for k in indices[:_NAMED]) + more


def nothing_to_learn(dataset: DataSet) -> str | None:
    """Return why a training set has nothing to tell apart, or None."""
    if dataset.task == "segmentation":
        one = dataset.num_classes < 2
        return (
            f"the masks of {dataset.name} hold one class only: mark another class" if one else None
        )
    first = dataset.labels.flat[0]
    if (dataset.labels != first).any():
        return None
    if dataset.task != "single-label":
        return f"all labels of {dataset.name} are {first:g}: nothing to learn"
    name = dataset.class_names[first]
    return f"{dataset.name} has one class only, {name!r}: a classifier needs at least two"


def _classes(dataset: DataSet) -> list[str]:
    if dataset.class_names == UNKNOWN:
        return []
    if problem := nothing_to_learn(dataset):
        return [problem]
    if dataset.task == "regression":
        return []
    counts = dict(zip(dataset.class_names, dataset.class_counts().tolist(), strict=True))
    problems = _misspelt(dataset, counts) if dataset.task == "single-label" else []
    named = " ".join(problems)
    empty = [name for name, count in counts.items() if not count and repr(name) not in named]
    if empty:
        more = ", ..." if len(empty) > _NAMED else ""
        names = ", ".join(map(repr, empty[:_NAMED])) + more
        count = counted(len(empty), "class", "classes")
        problems.append(f"{dataset.name} has no images of {count}: {names}")
    return problems


def _misspelt(dataset: DataSet, counts: dict[str, int]) -> list[str]:
    """Name classes of at most one record that are spelt nearly as one of many records is."""
    frequent = [name for name, count in counts.items() if count >= _MANY]
    problems = []
    for number, (name, count) in enumerate(counts.items()):
        near = get_close_matches(name, frequent, n=1, cutoff=_SIMILAR) if count < 2 else []
        if near and not name.isdigit():
            where = f" ({dataset.place(int(np.argmax(dataset.labels == number)))})" * count
            problems.append(
                f"{dataset.name} has {counted(count, 'image')} of the class {name!r}{where} and "
                f"{counts[near[0]]} of {near[0]!r}: correct the name if it is misspelt"
            )
    return problems


@dataclass(frozen=True)
class Units:
    """The units of privacy of a set: how many each split has, and of how many images."""

    column: str
    count: dict[str, int]
    fewest_images: int
    most_images: int


@dataclass(frozen=True)
class Summary:
    """Counts of images, sizes, classes, units and columns, without noise: not to be shared.

    Attributes:
        images: by split.
        kind: grey or colour, and the size.
        sizes: how many files have each.
        task: None where the labels cannot be read.
        classes: the records of each class, by split; empty for a regression.
        columns: how many values each has.
        bytes_of_pixels: of all splits.
        read: whether decoded images are kept.
        notes: remarks from loading.
        units: None if every record is one.
    """

    images: dict[str, int]
    kind: str
    sizes: dict[str, int]
    task: str | None
    classes: dict[str, dict[str, int]]
    columns: dict[str, int]
    bytes_of_pixels: int
    read: str
    notes: list[str]
    units: Units | None


def summarise(
    datasets: Mapping[str, DataSet], findings: Findings, unit: str | None
) -> Summary | None:
    """Return counts of what a set holds; None if no split, or not the whole list, could be read.

    Args:
        datasets: the splits that could be loaded.
        findings: what was collected while they were.
        unit: the column of the unit of privacy; None or "record" if each record is one.
    """
    if not datasets or findings.cut_short:
        return None
    first = next(iter(datasets.values()))
    channels, height, width = first.shape
    classes: dict[str, dict[str, int]] = {}
    if first.task != "regression" and first.class_names != UNKNOWN:
        counts = {split: dataset.class_counts() for split, dataset in datasets.items()}
        for k, name in enumerate(first.class_names):
            classes[name] = {split: int(count[k]) for split, count in counts.items()}
    column = unit if unit is not None and unit in first.columns else "patient"
    return Summary(
        images={split: len(dataset) for split, dataset in datasets.items()},
        kind=f"{_KINDS.get(channels, f'{channels} channels')}, {height}x{width}",
        sizes={f"{h}x{w}": count for (h, w), count in findings.sizes.most_common()},
        task=None if first.class_names == UNKNOWN else first.task,
        classes=classes,
        columns={
            name: len({v for d in datasets.values() for v in d.columns.get(name, first.labels[:0])})
            for name in sorted(first.columns)
        },
        bytes_of_pixels=sum(math.prod(dataset.images.shape) for dataset in datasets.values()),
        read="decoded anew for every step"
        if any(map(_is_streamed, datasets.values()))
        else "kept in memory",
        notes=list(first.notes),
        units=_count_units(datasets, column) if column in first.columns else None,
    )


def _count_units(datasets: Mapping[str, DataSet], column: str) -> Units:
    every = np.concatenate([dataset.column(column) for dataset in datasets.values()])
    _, records = np.unique(every, return_counts=True)
    by_split = {split: len(np.unique(data.column(column))) for split, data in datasets.items()}
    return Units(column, by_split, int(records.min()), int(records.max()))
