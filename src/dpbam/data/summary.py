"""What a data set holds, in plain values: what ``dpbam data check`` shows the operator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpbam.data.dataset import UNKNOWN, DataSet
from dpbam.data.decode import KEPT_BYTES
from dpbam.data.sources import Findings

_KINDS = {1: "grey", 3: "colour"}


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
    largest = max(math.prod(part.images.shape) for part in parts.values())
    streams = first.images.decodes and largest > KEPT_BYTES
    values: dict[str, Any] = {
        "images": {split: len(part) for split, part in parts.items()},
        "kind": f"{_KINDS.get(channels, f'{channels} channels')}, {height}x{width}",
        "sizes": {f"{h}x{w}": count for (h, w), count in findings.sizes.most_common()},
        "task": None if first.class_names == UNKNOWN else first.task,
        "classes": _classes(parts),
        "columns": {name: len(_distinct(parts, name)) for name in sorted(first.columns)},
        "bytes_of_pixels": sum(math.prod(part.images.shape) for part in parts.values()),
        "read": "decoded anew for every step" if streams else "kept in memory",
        "notes": list(first.notes),
    }
    column = unit if unit is not None and unit in first.columns else "patient"
    if column in first.columns:
        values["units"] = {"column": column, **_units(parts, column)}
    return values


def _classes(parts: Mapping[str, DataSet]) -> dict[str, dict[str, int]]:
    """The records of each class by split; none of a regression, or where labels are unknown."""
    first = next(iter(parts.values()))
    if first.task == "regression" or first.class_names == UNKNOWN:
        return {}
    counts = {s: part.class_counts().tolist() for s, part in parts.items()}
    return {
        name: {split: count[k] for split, count in counts.items()}
        for k, name in enumerate(first.class_names)
    }


def _units(parts: Mapping[str, DataSet], column: str) -> dict[str, Any]:
    every = np.concatenate([part.column(column) for part in parts.values()])
    _, records = np.unique(every, return_counts=True)
    by_split = {split: len(np.unique(part.column(column))) for split, part in parts.items()}
    return {**by_split, "fewest_images": int(records.min()), "most_images": int(records.max())}


def _distinct(parts: Mapping[str, DataSet], name: str) -> set[Any]:
    found = [part.columns[name] for part in parts.values() if name in part.columns]
    return {value for values in found for value in values.tolist()}
