"""From a data set's name or path to the data set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpbam._names import did_you_mean
from dpbam.catalogue import BUILT_IN, SOURCES
from dpbam.data.base import DataError, counted
from dpbam.data.dataset import DataSet
from dpbam.data.owners import person_columns
from dpbam.data.sources import Findings, Openers, Options
from dpbam.data.split import held_out


class Splits(NamedTuple):
    """A training and a test set of one source."""

    train: DataSet
    test: DataSet


def load(
    spec: str,
    *,
    split: str = "train",
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    unit: str | None = None,
    download: bool = True,
    progress: bool = False,
    task: str | None = None,
    label_columns: Sequence[str] = (),
    dicom_window: tuple[float, float] | None = None,
) -> DataSet:
    """Load one split of a data set.

    Args:
        spec: a name, a path, ``hf:...`` or ``module:function`` (:data:`dpbam.catalogue.SOURCES`).
        split: "train", "test" or "val". Where a source has no test split, its validation split is
            used. If it has neither, a fifth is held out by :func:`held_out`: train is the rest,
            and "all" is both together.
        root: where downloads live; see :func:`data_root`.
        image_size: the size to which images of a folder or a Hugging Face set are resized: (H, W),
            or one number for a square. None: they must agree.
        channels: 1 (grey) or 3 (RGB), to which those images are converted. None: grey if they are.
        unit: the column that holds the unit of privacy: a held-out split keeps units whole. Or
            "record": a set that names owners (:mod:`dpbam.data.owners`) is trained on only if its
            unit was chosen.
        download: whether a missing archive may be downloaded.
        progress: show a progress bar of a download on standard error.
        task: "single-label", "multi-label", "regression" or "segmentation"; None: from the labels.
        label_columns: columns of a folder's ``labels.csv`` that hold the labels: one, or one of
            0 and 1 per finding. None: the column ``label``, or ``mask``.
        dicom_window: (centre, width) by which grey DICOM files are shown. None: each by its own.

    Raises:
        DataError: if the set cannot be found or used; the message has the cause and the way out.

    Example:
        >>> load("digits", split="test")
        DataSet('digits/test', 359 images (1, 8, 8), 10 classes)
        >>> load("cifar")
        Traceback (most recent call last):
        dpbam.data.base.DataError: no data set is called 'cifar': did you mean 'cifar10'?
    """
    options = Options(
        root, image_size, channels, unit, download, progress, task, tuple(label_columns),
        dicom_window=dicom_window, findings=Findings(),
    )  # fmt: skip
    with _all_problems(spec, options):
        openers = _with_test(_usable(_open(spec, options), options), options)
        if split not in openers:
            raise DataError(f"{spec} has no split {split!r}: it has {', '.join(openers)}")
        dataset = _with_unit(openers[split](), options)
        if split == "train":
            _fit_to_train_on(dataset)
    return dataset


def load_pair(
    spec: str,
    *,
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    unit: str | None = None,
    download: bool = True,
    progress: bool = False,
    task: str | None = None,
    label_columns: Sequence[str] = (),
    dicom_window: tuple[float, float] | None = None,
) -> Splits:
    """Load the training and the test set; the arguments are those of :func:`load`.

    The privacy guarantee covers the records of ``train``; held-out records are not trained on.

    Example:
        >>> train, test = load_pair("digits")
        >>> len(train), len(test)
        (1438, 359)
    """
    options = Options(
        root, image_size, channels, unit, download, progress, task, tuple(label_columns),
        dicom_window=dicom_window, findings=Findings(),
    )  # fmt: skip
    with _all_problems(spec, options):
        _check_columns(spec, options)
        openers = _with_test(_usable(_open(spec, options), options), options)
        train, test = (_with_unit(openers[split](), options) for split in ("train", "test"))
        _fit_to_train_on(train)
        _same_shape(train, test)
        _check_window(train, options)
        if options.unit_column is not None:
            train.column(options.unit_column)
    return Splits(train, test)


@contextmanager
def _all_problems(spec: str, options: Options) -> Iterator[None]:
    """Raise one error with all problems that were collected inside, the first in its sentence."""
    findings = options.findings
    assert findings is not None  # the caller collects
    with options.collecting():
        yield
    problems = list(dict.fromkeys(findings.problems))
    if problems:
        collected = DataError(*problems)
        if len(problems) > 1:
            more = counted(len(problems) - 1, "more problem")
            collected.args = (f"{problems[0]}; {more}: dpbam data check {spec} lists all",)
        raise collected


def _usable(openers: Openers, options: Options) -> Openers:
    """Return the openers of a source whose table of records has no problem: only then decode."""
    if options.failed and options.findings is not None:
        raise DataError(*options.findings.problems)
    return openers


def inspect(spec: str, options: Options) -> tuple[Findings, dict[str, DataSet]]:
    """Load "train" and "test" as far as that is possible, and collect what is in the way.

    Where no test set can be held out, "train" is the whole set. What is in the images, and whether
    the sets go together, is for :func:`dpbam.data.check`.
    """
    findings = Findings(thorough=True)
    options = replace(options, findings=findings)
    parts: dict[str, DataSet] = {}
    with options.collecting():
        openers = _open(spec, options)
        openers = _with_test(openers, options) if "train" in openers else openers
        for split in (split for split in ("train", "test") if split in openers):
            with options.collecting():
                parts[split] = _with_unit(openers[split](), options)
        if not parts and "all" in openers:
            parts["train"] = _with_unit(openers["all"](), options)
    with options.collecting():
        _check_columns(spec, options)
    if "train" in parts:
        with options.collecting():
            _check_window(parts["train"], options)
        with options.collecting():
            parts["train"].chosen_unit(options.unit)
    if len(parts) == 2:
        with options.collecting():
            _same_shape(parts["train"], parts["test"])
    findings.problems = list(dict.fromkeys(findings.problems))
    return findings, parts


def _same_shape(train: DataSet, test: DataSet) -> None:
    if test.shape != train.shape:
        raise DataError(
            f"{train.name} has images {train.shape} but {test.name} has {test.shape}: "
            "bring them to one shape"
        )


def _check_columns(spec: str, options: Options) -> None:
    if options.label_columns and not (Path(spec).expanduser() / "labels.csv").is_file():
        raise DataError(
            f"--label-column has no effect on {spec}, which has no labels.csv: leave it out"
        )


def _check_window(dataset: DataSet, options: Options) -> None:
    if options.dicom_window is not None and dataset.images.window is None:
        raise DataError(
            f"--dicom-window has no effect on {dataset.name}, which has no DICOM files: leave it "
            "out"
        )


def _with_test(openers: Openers, options: Options) -> Openers:
    """Add the test split that a source lacks: its validation split, or held-out records."""
    if "test" in openers:
        return openers
    if "val" in openers:
        return {**openers, "test": openers["val"]}
    pair = cache(lambda: _held_out(openers["train"](), options))
    return {"train": lambda: pair()[0], "test": lambda: pair()[1], "all": openers["train"]}


def _with_unit(dataset: DataSet, options: Options) -> DataSet:
    """Note on a set the unit that is named, if it has it."""
    known = options.unit == "record" or options.unit in dataset.columns
    return replace(dataset, unit=options.unit) if known else dataset


def _held_out(dataset: DataSet, options: Options) -> tuple[DataSet, DataSet]:
    """Hold out whole units: of the column that is named, else of the data set's own.

    Persons stay together whatever the unit is: they may not be in both sets.
    """
    unit = options.unit or dataset.unit or "record"
    if unit == "record":
        complete = [c for c in person_columns(dataset.columns) if np.all(dataset.column(c) != "")]
        unit = complete[0] if complete else unit
    return held_out(dataset, unit=None if unit == "record" else unit)


def _fit_to_train_on(dataset: DataSet) -> None:
    """Refuse a training set with a single class, or with nothing to tell apart."""
    present = np.unique(dataset.labels)
    if dataset.task == "segmentation":
        if dataset.num_classes < 2:
            raise DataError(f"the masks of {dataset.name} hold one class only: mark another class")
    elif dataset.task != "single-label":
        if len(present) < 2:
            raise DataError(f"all labels of {dataset.name} are {present[0]}: nothing to learn")
    elif len(present) < 2:
        raise DataError(
            f"{dataset.name} has one class only, {dataset.class_names[present[0]]!r}: "
            "a classifier needs at least two"
        )


def is_function(spec: str) -> bool:
    """Whether a spec is ``module:function``, the user's own code."""
    return re.fullmatch(r"[\w.]+:\w+", spec) is not None and _named(spec) is None


def is_public(spec: str) -> bool:
    """Whether everyone has the records of a set: one that dpbam names as public, as it is."""
    entry = SOURCES.get(spec)
    return entry is not None and entry.public and entry.origin == BUILT_IN


def _named(spec: str) -> str | None:
    """Return the source whose name a spec begins with; None if it has none."""
    name = spec.partition(":")[0]
    return name if name in SOURCES and SOURCES[name].named else None


def _open(spec: str, options: Options) -> Openers:
    """Open the source that a spec names."""
    name, colon, argument = spec.partition(":")
    if _named(spec) is not None:
        return _open_as(name, argument, options)
    choices = [entry.name for entry in SOURCES.values() if entry.named]
    if not spec:
        raise DataError(f"no data set was named: choose {', '.join(choices)}, or give a path")
    path = Path(spec).expanduser()
    if path.suffix == ".npz":
        return _open_as("npz", spec, options)
    if path.is_dir():
        return _open_as("folder", spec, options)
    if path.suffix == ".parquet":
        raise DataError(f"parquet files are read by Hugging Face datasets: write hf:{spec}")
    if path.is_file():
        raise DataError(f"{spec} is a file that no source reads: give a folder or an .npz file")
    if colon and is_function(spec):
        return _open_as("function", spec, options)
    if re.search(r"[/\\]|^[.~]", spec):
        raise DataError(f"there is no folder or file {spec!r}")
    hint = did_you_mean(name.lower(), choices, f"choose {', '.join(choices)}, or give a path")
    raise DataError(f"no data set is called {spec!r}: {hint}")


def _open_as(source: str, argument: str, options: Options) -> Openers:
    entry = SOURCES[source]
    first = (entry.first,) if entry.first else ()
    openers: Openers = entry.load()(*first, argument, options)
    return openers
