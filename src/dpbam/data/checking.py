"""Read a whole data set and list its problems."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam import _validate
from dpbam.data.base import DataError, Images, Pixels, counted, in_short
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
    problems, hashes = _walk(dataset)
    problems += _classes(dataset)
    problems += _repeats(dataset, hashes)
    problems += _owners(dataset, unit)
    if test is not None:
        broken, test_hashes = _walk(test)
        problems += broken + _shared(dataset, hashes, test, test_hashes)
        problems += _straddling(dataset, test, unit)
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


def copies(train: DataSet, test: DataSet, unit: str | None = None) -> tuple[int, int]:
    """Count the images that several units of privacy have, and those of ``test`` in ``train``.

    Copies under several names are several units: the guarantee of a person who is in k of them is
    k times epsilon. Copies of one unit are protected together, and do not count. The counts are
    computed from the data without noise: for the operator only. Sets that are decoded anew for
    every step are not read for it, and count as 0: :func:`check` reads them.

    Args:
        train: the training set.
        test: the test set.
        unit: the column that holds the unit of privacy; None or "record" if each record is one.

    Example:
        >>> from dpbam.data import from_arrays
        >>> images = np.zeros((3, 8, 8), np.uint8)
        >>> images[2] = 255
        >>> train = from_arrays(images, [0, 0, 1], columns={"patient": ["a", "a", "b"]})
        >>> test = from_arrays(images[2:], [0])
        >>> copies(train, test), copies(train, test, "patient")
        ((1, 1), (0, 1))
    """
    if _is_streamed(train):
        return 0, 0
    by_record = unit is None or unit == "record"
    owners = np.arange(len(train)) if by_record else train.column(str(unit))
    first: dict[bytes, Any] = {}
    repeated = {d for k, d in _digests(train) if first.setdefault(d, owners[k]) != owners[k]}
    shared = 0 if _is_streamed(test) else sum(d in first for _, d in _digests(test))
    return len(repeated), shared


def _is_streamed(dataset: DataSet) -> bool:
    return dataset.images.decodes and math.prod(dataset.images.shape) > KEPT_BYTES


def _digests(dataset: DataSet) -> Iterator[tuple[int, bytes]]:
    """A hash of each image that can be read, and its position."""
    for index, pixels in _each(dataset.images):
        if not isinstance(pixels, DataError):
            yield index, hashlib.sha256(pixels.tobytes()).digest()


def _owners(dataset: DataSet, unit: str | None) -> list[str]:
    unread = dataset.class_names == UNKNOWN and not dataset.columns  # reported as what it is
    if unit is None or unit == "record" or unread:
        return []
    try:
        _validate.owners(unit, dataset.column(unit), dataset.place)
    except DPBAMError as error:
        return [str(error)]
    return []


def _walk(dataset: DataSet) -> tuple[list[str], dict[int, bytes]]:
    """The problems of single images, and a hash of each that can be read, by position."""
    broken: list[str] = []
    hashes: dict[int, bytes] = {}
    brightest: dict[int, int] = {}
    for index, pixels in _each(dataset.images):
        if isinstance(pixels, DataError):
            broken.append(str(pixels))
        else:
            hashes[index] = hashlib.sha256(pixels.tobytes()).digest()
            brightest[index] = int(pixels.max())
    if len(broken) > _LISTED:
        rest = f"{dataset.name} has {len(broken) - _LISTED} more images that cannot be read"
        broken = [*broken[:_LISTED], rest]
    return broken + _dark(dataset, brightest), hashes


def _dark(dataset: DataSet, brightest: dict[int, int]) -> list[str]:
    """Name images that are nearly black, those whose files leave bits unused apart.

    A file of 16 bits is scaled by its full range, so that one which uses 12 of them is nearly
    black. Where no image of a set is brighter than 14 bits, all of its files are looked at.
    """
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


def _each(images: Images) -> Iterator[tuple[int, Pixels | DataError]]:
    """Every record's pixels, or its error: by chunks, one by one where a record is broken."""
    for positions in images.chunks():
        try:
            pixels = images.read(positions)
        except Exception:  # a user's own Images can fail in any way
            yield from ((int(i), _single(images, int(i))) for i in positions)
        else:
            yield from zip(positions.tolist(), pixels, strict=True)


def _single(images: Images, index: int) -> Pixels | DataError:
    try:
        return images.read(np.array([index], dtype=np.int64))
    except DataError as error:
        return error
    except Exception as error:
        return DataError(f"{images.describe(index)} cannot be read: {in_short(error)}")


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
    empty = [name for name, count in counts.items() if count == 0]
    problems = [] if dataset.task != "single-label" else _misspelt(dataset, counts)
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


def _repeats(dataset: DataSet, hashes: dict[int, bytes]) -> list[str]:
    first: dict[bytes, int] = {}
    pairs = [(first[d], k) for k, d in hashes.items() if first.setdefault(d, k) != k]
    if not pairs:
        return []
    images = counted(len({a for a, _ in pairs}), "image")
    return [f"{dataset.name} has {images} more than once ({_examples(pairs, dataset, dataset)})"]


def _shared(
    train: DataSet, hashes: dict[int, bytes], test: DataSet, test_hashes: dict[int, bytes]
) -> list[str]:
    where = {digest: index for index, digest in hashes.items()}
    pairs = [(where[d], index) for index, d in test_hashes.items() if d in where]
    if not pairs:
        return []
    images = f"{counted(len(pairs), 'image')} of {test.name} {'is' if len(pairs) == 1 else 'are'}"
    return [f"{images} in {train.name} too ({_examples(pairs, train, test)})"]


def _examples(pairs: list[tuple[int, int]], first: DataSet, second: DataSet) -> str:
    shown = pairs[:_NAMED]
    return ", ".join(f"{first.images.describe(a)} = {second.images.describe(b)}" for a, b in shown)


def _straddling(train: DataSet, test: DataSet, unit: str | None) -> list[str]:
    return [
        f"{train.name} and {test.name} share "
        f"{counted(both.size, f'value of {name!r}', f'values of {name!r}')} "
        f"({', '.join(map(str, both[:_NAMED]))})"
        for name, both in shared_units(train, test, unit).items()
    ]


def summary(parts: Mapping[str, DataSet], findings: Findings, unit: str | None) -> dict[str, Any]:
    """Return counts of images, sizes, classes, units and columns, without noise: not to be shared.

    Args:
        parts: the splits that could be loaded.
        findings: what was collected while they were.
        unit: the column of the unit of privacy; None or "record" if each record is one.
    """
    if not parts:
        return {}
    first = next(iter(parts.values()))
    channels, height, width = first.shape
    largest = max(math.prod(dataset.images.shape) for dataset in parts.values())
    streams = first.images.decodes and largest > KEPT_BYTES
    values: dict[str, Any] = {
        "images": {split: len(dataset) for split, dataset in parts.items()},
        "kind": f"{_KINDS.get(channels, f'{channels} channels')}, {height}x{width}",
        "sizes": {f"{h}x{w}": count for (h, w), count in findings.sizes.most_common()},
        "task": None if first.class_names == UNKNOWN else first.task,
        "classes": _classes_by_split(parts),
        "columns": {name: len(_distinct(parts, name)) for name in sorted(first.columns)},
        "bytes_of_pixels": sum(math.prod(dataset.images.shape) for dataset in parts.values()),
        "read": "decoded anew for every step" if streams else "kept in memory",
        "notes": list(first.notes),
    }
    column = unit if unit is not None and unit in first.columns else "patient"
    if column in first.columns:
        values["units"] = {"column": column, **_units(parts, column)}
    return values


def _classes_by_split(parts: Mapping[str, DataSet]) -> dict[str, dict[str, int]]:
    """The records of each class by split; none of a regression, or where labels are unknown."""
    first = next(iter(parts.values()))
    if first.task == "regression" or first.class_names == UNKNOWN:
        return {}
    counts = {s: dataset.class_counts().tolist() for s, dataset in parts.items()}
    return {
        name: {split: count[k] for split, count in counts.items()}
        for k, name in enumerate(first.class_names)
    }


def _units(parts: Mapping[str, DataSet], column: str) -> dict[str, Any]:
    every = np.concatenate([dataset.column(column) for dataset in parts.values()])
    _, records = np.unique(every, return_counts=True)
    by_split = {split: len(np.unique(dataset.column(column))) for split, dataset in parts.items()}
    return {**by_split, "fewest_images": int(records.min()), "most_images": int(records.max())}


def _distinct(parts: Mapping[str, DataSet], name: str) -> set[Any]:
    columns = [dataset.columns[name] for dataset in parts.values() if name in dataset.columns]
    return {value for values in columns for value in values.tolist()}
