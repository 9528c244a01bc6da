"""Read a whole data set and list its problems."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from dpbam.data.base import DataError, Images
from dpbam.data.dataset import DataSet

_NAMED = 3  # examples in a sentence


def check(dataset: DataSet, test: DataSet | None = None, *, unit: str | None = None) -> list[str]:
    """Read every image and list the problems, one sentence each.

    Problems are broken images (by path), a single class, classes without images, images that occur
    twice in the training set (each copy counts as a record, so the person in it is protected less
    than the statement promises) or in both sets, and units of privacy in both sets.

    Args:
        dataset: the training set.
        test: the test set, if there is one.
        unit: the column that holds the unit of privacy; None or "record" if each record is one.

    Example:
        >>> from dpbam.data import from_arrays
        >>> check(from_arrays(np.zeros((2, 8, 8), np.uint8), [0, 1]))
        ['arrays has 1 image more than once (record 0 = record 1)']
    """
    problems, hashes = _walk(dataset)
    problems += _classes(dataset)
    problems += _repeats(dataset, hashes)
    if test is not None:
        broken, test_hashes = _walk(test)
        problems += broken + _shared(dataset, hashes, test, test_hashes)
        if unit is not None and unit != "record":
            problems += _straddling(dataset, test, unit)
    return problems


def _walk(dataset: DataSet) -> tuple[list[str], dict[int, bytes]]:
    """The errors of broken images, and a hash of each of the others by position."""
    broken: list[str] = []
    hashes: dict[int, bytes] = {}
    for index, found in _each(dataset.images):
        if isinstance(found, DataError):
            broken.append(str(found))
        else:
            hashes[index] = found
    return broken, hashes


def _each(images: Images) -> Iterator[tuple[int, bytes | DataError]]:
    """Every record's hash, or its error: by chunks, one by one where a record is broken."""
    for part in images.chunks():
        try:
            pixels = images.read(part)
        except DataError:
            yield from ((int(i), _single(images, int(i))) for i in part)
        else:
            yield from zip(part.tolist(), (_hash(image.tobytes()) for image in pixels), strict=True)


def _single(images: Images, index: int) -> bytes | DataError:
    try:
        return _hash(images.read(np.array([index], dtype=np.int64)).tobytes())
    except DataError as error:
        return error


def _hash(pixels: bytes) -> bytes:
    return hashlib.sha256(pixels).digest()


def _classes(dataset: DataSet) -> list[str]:
    if dataset.task == "regression":
        return []
    counts = dataset.class_shares().sum(axis=0)
    present = np.flatnonzero(counts)
    if len(present) == 1 and dataset.task != "multi-label":
        return [f"{dataset.name} has one class only, {dataset.class_names[present[0]]!r}"]
    empty = [dataset.class_names[k] for k in np.flatnonzero(counts == 0)]
    more = ", ..." if len(empty) > _NAMED else ""
    names = ", ".join(map(repr, empty[:_NAMED])) + more
    count = _count(len(empty), "class", "classes")
    return [f"{dataset.name} has no images of {count}: {names}"] if empty else []


def _repeats(dataset: DataSet, hashes: dict[int, bytes]) -> list[str]:
    first: dict[bytes, int] = {}
    pairs = [(first[d], k) for k, d in hashes.items() if first.setdefault(d, k) != k]
    if not pairs:
        return []
    images = _count(len({a for a, _ in pairs}), "image")
    return [f"{dataset.name} has {images} more than once ({_examples(pairs, dataset, dataset)})"]


def _shared(
    train: DataSet, hashes: dict[int, bytes], test: DataSet, test_hashes: dict[int, bytes]
) -> list[str]:
    where = {digest: index for index, digest in hashes.items()}
    pairs = [(where[d], index) for index, d in test_hashes.items() if d in where]
    if not pairs:
        return []
    images = f"{_count(len(pairs), 'image')} of {test.name} {'is' if len(pairs) == 1 else 'are'}"
    return [f"{images} in {train.name} too ({_examples(pairs, train, test)})"]


def _examples(pairs: list[tuple[int, int]], first: DataSet, second: DataSet) -> str:
    shown = pairs[:_NAMED]
    return ", ".join(f"{first.images.describe(a)} = {second.images.describe(b)}" for a, b in shown)


def _straddling(train: DataSet, test: DataSet, unit: str) -> list[str]:
    both = np.intersect1d(train.column(unit), test.column(unit))
    if not both.size:
        return []
    examples = ", ".join(map(str, both[:_NAMED]))
    count = _count(both.size, f"value of {unit!r}", f"values of {unit!r}")
    return [f"{train.name} and {test.name} share {count} ({examples})"]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
