"""From the tables of a source to data sets: labels, splits and units, each decided here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import Images, for_each
from dpbam.data.dataset import UNKNOWN, DataSet
from dpbam.data.labels import number_labels
from dpbam.data.masks import mask_array, number_masks
from dpbam.data.owners import person_columns
from dpbam.data.sources import Options, Splits, Table
from dpbam.data.split import held_out


class Numbered(NamedTuple):
    """The labels of all splits of a source as data sets hold them, by the table's name."""

    labels: Mapping[str, NDArray[Any]] = {}
    masks: Mapping[str, Images] = {}
    class_names: tuple[str, ...] = UNKNOWN

    def dataset(self, table: Table, notes: Sequence[str] = ()) -> DataSet:
        """Decode a table; labels that are not numbered are those of the unknown class."""
        images = table.open_images()
        count = len(images) if table.labels is None else len(table.labels)
        labels = self.labels.get(table.name, np.zeros(count, np.int64))
        return DataSet(
            name=table.name,
            images=images,
            labels=labels,
            class_names=self.class_names,
            columns=table.columns,
            notes=tuple(notes),
            masks=self.masks.get(table.name),
            unit=table.unit,
            places=table.places,
        )


def number(tables: Sequence[Table], task: str | None) -> Numbered:
    """Number the labels, or masks, of all splits of a source by one list of classes.

    Args:
        tables: of one source: class names and task are those of the first.
        task: None takes it from the labels; a source that fixes it has the last word.
    """
    class_names, task = tables[0].class_names, tables[0].task or task
    openers = {table.name: table.open_masks for table in tables if table.open_masks is not None}
    arrays = {table.name: table.labels for table in tables if table.labels is not None}
    if any(array.ndim > 2 for array in arrays.values()) and task in (None, "segmentation"):
        openers = {name: partial(mask_array, array, name) for name, array in arrays.items()}
    if openers:
        masks, names = number_masks(for_each(lambda opener, _: opener(), openers), class_names)
        return Numbered({}, masks, names)
    places = {table.name: table.place for table in tables}
    labels, names = number_labels(arrays, class_names, task, place=lambda n, k: places[n](k))
    return Numbered(labels, {}, names)


class Tables:
    """The splits of one source; each is decoded when it is first asked for.

    Raises:
        DataError: if a table has problems: all of them, and before an image is opened. While a set
            is checked, they are collected, and labels that cannot be used are unknown.
    """

    def __init__(self, splits: Splits, options: Options) -> None:
        self._splits, self._options = splits, options
        self._numbered = Numbered()
        tables = [table for table in splits.values() if isinstance(table, Table)]
        if any(table.open_masks is not None for table in tables):
            options.findings.stop()  # masks are read to be numbered
        if tables and not self.unlisted:
            with options.findings.collecting():
                self._numbered = number(tables, options.task)
        options.findings.stop()

    @property
    def unlisted(self) -> bool:
        """Whether nothing but the images is known, while a set is checked."""
        tables = [table for table in self._splits.values() if isinstance(table, Table)]
        return any(table.labels is None and table.open_masks is None for table in tables)

    @property
    def names(self) -> tuple[str, ...]:
        """The splits that :meth:`dataset` returns."""
        if "train" not in self._splits or "test" in self._splits:
            return tuple(self._splits)
        return (*self._splits, "test") if "val" in self._splits else ("train", "test", "all")

    def dataset(self, split: str) -> DataSet:
        """Return a split.

        A missing test split is the validation split. Without either, records are held out of the
        training split, and "all" is both together.
        """
        if "all" not in self.names:
            dataset = self._decode(split if split in self._splits else "val")
        else:
            dataset = self._everything if split == "all" else self._held_out[split == "test"]
        unit = self._options.unit
        known = unit == "record" or unit in dataset.columns
        return replace(dataset, unit=unit) if known else dataset

    def _decode(self, split: str) -> DataSet:
        table = self._splits[split]
        if isinstance(table, DataSet):
            return table
        return self._numbered.dataset(table, self._options.findings.notes)

    @cached_property
    def _everything(self) -> DataSet:
        return self._decode("train")

    @cached_property
    def _held_out(self) -> tuple[DataSet, DataSet]:
        """Hold out whole units: of the column that is named, else of the data set's own.

        Persons stay together whatever the unit is: they may not be in both sets.
        """
        dataset = self._everything
        unit = self._options.unit or dataset.unit or "record"
        if unit == "record":
            persons = person_columns(dataset.columns)
            complete = [name for name in persons if np.all(dataset.column(name) != "")]
            unit = complete[0] if complete else unit
        return held_out(dataset, unit=None if unit == "record" else unit)
