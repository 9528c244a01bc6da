"""From a data set's name or path to the data set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dpbam._names import did_you_mean
from dpbam.catalogue import BUILT_IN, SOURCES
from dpbam.data.base import DataError, counted
from dpbam.data.checking import nothing_to_learn
from dpbam.data.dataset import DataSet
from dpbam.data.sources import Findings, Options
from dpbam.data.sources import Splits as SourceSplits
from dpbam.data.tables import Tables


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
        dicom_window,
    )  # fmt: skip
    with _all_problems(spec, options.findings):
        tables = Tables(_open(spec, options), options)
        if split not in tables.names:
            raise DataError(f"{spec} has no split {split!r}: it has {', '.join(tables.names)}")
        dataset = tables.dataset(split)
        if split == "train" and (problem := nothing_to_learn(dataset)):
            raise DataError(problem)
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
        dicom_window,
    )  # fmt: skip
    findings, pair = options.findings, list[DataSet]()
    with _all_problems(spec, findings):
        _check_columns(spec, options)
        tables = Tables(_open(spec, options), options)
        for split in ("train", "test"):
            with findings.collecting():
                pair.append(tables.dataset(split))
        findings.stop()
        train, test = pair
        if problem := nothing_to_learn(train):
            raise DataError(problem)
        findings.problems += _find_mismatches(train, test, options)
        if unit not in (None, "record"):
            train.column(unit)
    return Splits(*pair)


@contextmanager
def _all_problems(spec: str, findings: Findings) -> Iterator[None]:
    """Raise one error with all problems that were collected inside, the first in its sentence."""
    with findings.collecting():
        yield
    problems = list(dict.fromkeys(findings.problems))
    if problems:
        collected = DataError(*problems)
        if len(problems) > 1:
            more = counted(len(problems) - 1, "more problem")
            collected.args = (f"{problems[0]}; {more}: dpbam data check {spec} lists all",)
        raise collected


def inspect(spec: str, options: Options) -> tuple[Findings, dict[str, DataSet]]:
    """Load "train" and "test" as far as that is possible, and collect what is in the way.

    Where no test set can be held out, "train" is the whole set. What is in the images, and whether
    the sets go together, is for :func:`dpbam.data.check`.
    """
    findings = Findings(thorough=True)
    options = replace(options, findings=findings)
    datasets: dict[str, DataSet] = {}
    with findings.collecting():
        tables = Tables(_open(spec, options), options)
        held_out = "all" in tables.names and not tables.unlisted
        for split in ("train", "test") if held_out or "all" not in tables.names else ():
            if split in tables.names:
                with findings.collecting():
                    datasets[split] = tables.dataset(split)
        if not datasets and "all" in tables.names:
            datasets["train"] = tables.dataset("all")
    with findings.collecting():
        _check_columns(spec, options)
    if "train" in datasets:
        findings.problems += _find_mismatches(datasets["train"], datasets.get("test"), options)
        with findings.collecting():
            datasets["train"].chosen_unit(options.unit)
    findings.problems = list(dict.fromkeys(findings.problems))
    return findings, datasets


def _find_mismatches(train: DataSet, test: DataSet | None, options: Options) -> Iterator[str]:
    """Yield what does not go together: two shapes, or a window without DICOM files."""
    if test is not None and test.shape != train.shape:
        yield (
            f"{train.name} has images {train.shape} but {test.name} has {test.shape}: "
            "bring them to one shape"
        )
    if options.dicom_window is not None and train.images.window is None:
        yield (
            f"--dicom-window has no effect on {train.name}, which has no DICOM files: leave it out"
        )


def _check_columns(spec: str, options: Options) -> None:
    if options.label_columns and not (Path(spec).expanduser() / "labels.csv").is_file():
        raise DataError(
            f"--label-column has no effect on {spec}, which has no labels.csv: leave it out"
        )


def is_function(spec: str) -> bool:
    """Whether a spec is ``module:function``, the user's own code."""
    return re.fullmatch(r"[\w.]+:\w+", spec) is not None and _source_name(spec) is None


def is_public(spec: str) -> bool:
    """Whether everyone has the records of a set: one that dpbam names as public, as it is."""
    entry = SOURCES.get(spec)
    return entry is not None and entry.public and entry.origin == BUILT_IN


def _source_name(spec: str) -> str | None:
    """Return the source whose name a spec begins with; None if it has none."""
    name = spec.partition(":")[0]
    return name if name in SOURCES and SOURCES[name].named else None


def _open(spec: str, options: Options) -> SourceSplits:
    """Open the source that a spec names."""
    name, colon, argument = spec.partition(":")
    if _source_name(spec) is not None:
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
    # a mistyped folder is as likely as a mistyped name
    here = [p.name for p in Path().iterdir() if p.is_dir() or p.suffix == ".npz"]
    otherwise = f"choose {', '.join(choices)}, or give a path"
    hint = did_you_mean(name.lower(), [*choices, *sorted(here)], otherwise)
    raise DataError(f"no data set is called {spec!r}: {hint}")


def _open_as(source: str, argument: str, options: Options) -> SourceSplits:
    entry = SOURCES[source]
    first = (entry.first,) if entry.first else ()
    splits: SourceSplits = entry.load()(*first, argument, options)
    return splits
