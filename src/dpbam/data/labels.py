"""Labels of any task, from arrays of numbers or strings.

=============  =================================================================================
task           labels of N records
=============  =================================================================================
single-label   [N] or [N, 1]: whole numbers 0 .. K-1 without gaps over all splits, or strings,
               whose sorted values become the classes. With class names given, gaps are allowed.
multi-label    [N, L] of 0 and 1; or strings of findings with ``|`` between them. An empty string
               and ``No Finding`` are records without a finding.
regression     [N] or [N, 1] of numbers.
=============  =================================================================================

Without a task, several columns or a ``|`` mean multi-label, fractions regression, and whole
numbers and other strings single-label. What could be two of them has to be decided by ``--task``.
Masks of a segmentation are in :mod:`dpbam.data.masks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbam._names import did_you_mean
from dpbam.data.base import DataError, for_each
from dpbam.data.dataset import TASKS

Arrays = Mapping[str, NDArray[Any]]
Numbered = tuple[dict[str, NDArray[Any]], tuple[str, ...]]
Place = Callable[[str, int], str]  # of a split and a record

SEPARATOR = "|"
_NONE = ("", "no finding")
_LISTED = 20  # records of a split whose labels cannot be used, one sentence each


def _record(where: str, index: int) -> str:
    return f"record {index}"


def number_labels(
    splits: Arrays,
    class_names: Sequence[str] | None = None,
    task: str | None = None,
    *,
    place: Place = _record,
) -> Numbered:
    """Number the labels of all splits of a source by one list of classes.

    Args:
        splits: the labels of each split, by the name to use in an error.
        class_names: the classes, if they are known; then some may be absent.
        task: None takes it from the labels.
        place: returns where a record is to be found, for an error.

    Returns:
        The labels of each split as a data set holds them, and the class names.
    """
    if task not in (None, *TASKS):
        raise DataError(f"task {task!r} is unknown: {did_you_mean(task, TASKS)}")
    labels = for_each(_plain, splits)
    task = task or _task_of(labels)
    if task == "segmentation":
        raise DataError(f"{' and '.join(splits)} have labels, but segmentation needs masks")
    readers = {"multi-label": _findings, "regression": _values}
    return readers.get(task, _classes)(labels, class_names, place)


def class_order(names: Iterable[str]) -> list[str]:
    """Sort class names: as numbers where all are ("2" before "10"), else as text."""
    names = list(names)
    numeric = all(name.isascii() and name.isdigit() for name in names)
    return sorted(names, key=lambda name: (int(name) if numeric else 0, name))


def _plain(labels: NDArray[Any], where: str) -> NDArray[Any]:
    """[N, 1] -> [N]; bytes -> text."""
    if labels.ndim not in (1, 2) or labels.dtype.kind not in "biufUS":
        raise DataError(
            f"labels of {where} must be numbers or strings, [N] or [N, L], got {labels.dtype} "
            f"{list(labels.shape)}"
        )
    flat = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return np.char.decode(flat, "utf-8") if flat.dtype.kind == "S" else flat


def _task_of(splits: Arrays) -> str:
    """Return the one task that labels of this kind can mean."""
    for where, labels in splits.items():
        if labels.ndim == 2:
            return _not_one_hot(splits)
        if labels.dtype.kind == "f":
            if (labels == np.round(labels)).all():
                raise DataError(
                    f"labels of {where} are whole numbers of type {labels.dtype}, which could be "
                    "classes or measurements: pass --task single-label or --task regression"
                )
            return "regression"
    texts = [labels for labels in splits.values() if labels.dtype.kind == "U"]
    if any(SEPARATOR in text for labels in texts for text in labels.tolist()):
        return "multi-label"
    fractions = all(is_number(t) for labels in texts for t in labels.tolist()) and any(
        not t.isdigit() for labels in texts for t in labels.tolist()
    )
    return "regression" if fractions else "single-label"


def _not_one_hot(splits: Arrays) -> str:
    tables = [labels for labels in splits.values() if labels.ndim == 2 and labels.size]
    if tables and all(labels.dtype.kind in "biu" for labels in tables):
        ones = all(((t == 0) | (t == 1)).all() and (t.sum(axis=1) == 1).all() for t in tables)
        if ones:
            raise DataError(
                f"every record of {' and '.join(splits)} has exactly one of {tables[0].shape[1]} "
                "findings, which could be one class each: pass --task single-label or "
                "--task multi-label"
            )
    return "multi-label"


def is_number(text: str) -> bool:
    """Whether a text is a finite number."""
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _classes(splits: Arrays, class_names: Sequence[str] | None, place: Place) -> Numbered:
    flat = for_each(_one_class, splits)
    if all(labels.dtype.kind == "U" for labels in flat.values()):
        names = tuple(class_names or class_order({str(x) for y in flat.values() for x in set(y)}))
        return for_each(lambda labels, where: _look_up(labels, names, where), flat), names
    numbers = for_each(lambda labels, where: _whole(labels, where, place), flat)
    return numbers, tuple(class_names) if class_names else _count_classes(numbers)


def _one_class(labels: NDArray[Any], where: str) -> NDArray[Any]:
    """[N, L] with a single 1 per row -> [N]."""
    if labels.ndim == 1:
        return labels
    if labels.dtype.kind not in "biu" or (labels != 0).sum(axis=1).tolist() != [1] * len(labels):
        raise DataError(
            f"labels of {where} have {labels.shape[1]} values per record, not a single 1 among "
            "zeros: pass --task multi-label, or choose one of the columns"
        )
    return np.asarray(labels.argmax(axis=1))


def _whole(labels: NDArray[Any], where: str, place: Place) -> NDArray[np.int64]:
    fractional = labels.dtype.kind == "f" and not (labels == np.round(labels)).all()
    if labels.dtype.kind not in "biuf" or fractional:
        raise DataError(
            f"labels of {where} are {labels.dtype}, but must be whole numbers 0..K-1 or strings"
        )
    if labels.size and labels.min() < 0:
        raise DataError(
            f"labels of {where} are out of range: {place(where, int(labels.argmin()))} has "
            f"{labels.min()}, but classes are numbered from 0"
        )
    return labels.astype(np.int64)


def _count_classes(splits: Mapping[str, NDArray[np.int64]]) -> tuple[str, ...]:
    """The class names "0" .. "K-1", if each of them occurs in some split."""
    present = set().union(*(np.unique(labels).tolist() for labels in splits.values()))
    top = max(present, default=-1) + 1
    if len(present) != top:
        missing = [k for k in range(min(top, 2**16)) if k not in present][:5]
        raise DataError(
            f"labels of {' and '.join(splits)} go up to {top - 1} but skip "
            f"{', '.join(map(str, missing))}{', ...' if top - len(present) > 5 else ''}: number "
            "the classes 0..K-1 without gaps, or give class_names"
        )
    return tuple(str(k) for k in range(top))


def _look_up(labels: NDArray[Any], names: Sequence[str], where: str) -> NDArray[np.int64]:
    number = {name: k for k, name in enumerate(names)}
    unknown = sorted(set(labels.tolist()) - set(number))
    if unknown:
        raise DataError(f"labels of {where} hold {unknown[0]!r}, which is not among class_names")
    return np.array([number[label] for label in labels.tolist()], dtype=np.int64)


def _findings(splits: Arrays, class_names: Sequence[str] | None, place: Place) -> Numbered:
    if all(labels.dtype.kind == "U" and labels.ndim == 1 for labels in splits.values()):
        return _split_findings(splits, class_names)
    tables = for_each(lambda labels, where: _zero_one(labels, where, place), splits)
    widths = {table.shape[1] for table in tables.values()}
    if len(widths) > 1 or (class_names and len(class_names) not in widths):
        raise DataError(
            f"{' and '.join(splits)} have {', '.join(map(str, sorted(widths)))} findings per "
            f"record{f' and {len(class_names)} names' if class_names else ''}: they must agree"
        )
    return tables, tuple(class_names or map(str, range(widths.pop())))


def _split_findings(splits: Arrays, class_names: Sequence[str] | None) -> Numbered:
    """Findings with ``|`` between them."""
    rows = {
        where: [
            [
                finding.strip()
                for finding in text.split(SEPARATOR)
                if finding.strip().lower() not in _NONE
            ]
            for text in labels.tolist()
        ]
        for where, labels in splits.items()
    }
    findings = {name for lists in rows.values() for names in lists for name in names}
    names = tuple(class_names or class_order(findings))
    if not names or findings - set(names):
        odd = repr(min(findings - set(names))) if findings else "no finding at all"
        raise DataError(f"labels of {' and '.join(splits)} hold {odd}, not among the findings")
    return {
        where: np.array([[name in row for name in names] for row in lists], dtype=np.uint8)
        for where, lists in rows.items()
    }, names


def _zero_one(labels: NDArray[Any], where: str, place: Place) -> NDArray[np.uint8]:
    table = labels[:, None] if labels.ndim == 1 else labels
    wrong = ~np.isin(table, (0, 1) if table.dtype.kind != "U" else ("0", "1", "0.0", "1.0"))
    if wrong.any():
        raise DataError(*(
            f"labels of {where}: {place(where, int(row))} has "
            f"{table[row, column].item() or 'nothing'} for finding {column}, but a finding is 0 or "
            "1: decide those that are uncertain or missing first, or leave the record out"
            for row, column in np.argwhere(wrong)[:_LISTED]
        ))  # fmt: skip
    return table.astype(np.float64).astype(np.uint8)


def _values(splits: Arrays, class_names: Sequence[str] | None, place: Place) -> Numbered:
    if class_names and len(class_names) != 1:
        raise DataError(f"a regression has one value per record, but {len(class_names)} names")
    values = for_each(lambda labels, where: _floats(labels, where, place), splits)
    return values, tuple(class_names or ("value",))


def _floats(labels: NDArray[Any], where: str, place: Place) -> NDArray[np.float32]:
    if labels.ndim == 2:
        raise DataError(
            f"labels of {where} have {labels.shape[1]} values per record, but a regression "
            "predicts one: choose one of the columns"
        )
    odd = [k for k, value in enumerate(labels.tolist()) if not is_number(str(value))]
    if labels.dtype.kind != "b" and not odd:
        return labels.astype(np.float32)
    if not odd:
        raise DataError(f"labels of {where} are true or false: a regression needs numbers")
    raise DataError(*(
        f"labels of {where}: {place(where, k)} has {labels[k].item()!r}, which is not a number: a "
        "regression needs one per record"
        for k in odd[:_LISTED]
    ))  # fmt: skip
