"""Predictions of a run's model for data sets, image files and ``.npz`` arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpbam.data import DataError, DataSet, to_float
from dpbam.data.arrays import as_images
from dpbam.data.decode import SUFFIXES, FileImages
from dpbam.data.folder import find_images
from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from PIL import Image

    from dpbam.app.runs.model_file import RunModel
    from dpbam.tasks.base import Row
    from dpbam.tasks.scores import Evaluation

Pixels = NDArray[np.uint8]
_Chunk = tuple[list[str], Pixels, set[str]]  # names, images, and which names had another size
_ROWS = 256  # images at once
_ARRAYS = ("images", "x", "data", "test_images", "x_test")


class Prediction(NamedTuple):
    """What is predicted for one image; row 3 of an array is ``scans.npz[3]``."""

    file: str
    row: Row
    resized: bool = False  # to the size that the model takes


class _SizedFiles(FileImages):
    """Image files, with the names of those that had another size."""

    def __init__(self, paths: Sequence[Path], model: RunModel) -> None:
        channels, height, width = model.image_shape
        names = list(map(str, paths))
        super().__init__(Path(), names, (height, width), channels, True, model.dicom_window)
        self.resized: set[str] = set()

    def pixels(self, image: Image.Image, where: str) -> Pixels:
        if (image.height, image.width) != self.shape[2:]:
            self.resized.add(where)
        return super().pixels(image, where)


def files_in(places: Sequence[str | Path]) -> list[Path]:
    """Return files as they are, and for a folder all image files in it, sorted by path."""
    return [file for place in map(Path, places) for file in _files(place)]


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    names, _ = find_images(place.resolve())
    if not names:
        raise DataError(f"there are no images in {place}: looked for {' '.join(sorted(SUFFIXES))}")
    return [place / name for name in names]


def predict_files(
    model: RunModel,
    files: Sequence[str | Path],
    thresholds: Mapping[str, float] | None = None,
    on_unreadable: Callable[[DataError], None] | None = None,
) -> Iterator[Prediction]:
    """Predict image files (resized and converted to what the model takes) and ``.npz`` arrays.

    A missing file is refused before the first is predicted.

    Args:
        model: of a run.
        files: image files and ``.npz`` arrays.
        thresholds: of findings: those whose probability reaches theirs are listed. Default: 0.5.
        on_unreadable: called with the error of a file that cannot be read, which is left out; None
            raises it.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            kind = "a folder, not a file" if path.is_dir() else "not there"
            raise DataError(f"{path} is {kind}: give image files or .npz files")
    for names, pixels, resized in _chunks(paths, model, on_unreadable or _raise):
        for name, row in zip(names, _predictions(model, pixels), strict=True):
            yield Prediction(name, model.task.row(row, thresholds or {}), name in resized)


def _check_shape(model: RunModel, dataset: DataSet) -> None:
    if dataset.shape != model.image_shape:
        raise DataError(
            f"{dataset.name} has images {list(dataset.shape)} [channels, height, width], but the "
            f"model takes {list(model.image_shape)}"
        )


def evaluate_dataset(
    model: RunModel,
    dataset: DataSet,
    by: Iterable[str] = (),
    thresholds: Mapping[str, float] | None = None,
) -> Evaluation:
    """Return all metrics of a model on a data set, for all records and by the columns ``by``."""
    groups = {column: dataset.column(column) for column in by}
    return model.task.evaluate(*summaries(model, dataset), groups, thresholds)


def summaries(model: RunModel, dataset: DataSet) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return what the metrics of the model's task need of each record, and its target.

    Raises:
        DataError: if the data set is of another task, size or list of classes.
    """
    from dpbam.training.evaluation import summarise

    _check_shape(model, dataset)
    if dataset.task != model.task.layout:
        raise DataError(
            f"{dataset.name} has labels for {dataset.task}, but the model does {model.task.name}"
        )
    try:
        numbers = model.task.numbered(dataset.class_names)
    except ArgumentError as error:
        raise DataError(f"{dataset.name} {error}") from None
    if numbers is not None:
        labels, names = numbers[dataset.labels], model.class_names
        dataset = replace(dataset, labels=labels, class_names=names)
    summary, targets, _ = summarise(model.module, dataset, model.task)
    return summary.double().numpy(), targets.numpy()


def _predictions(model: RunModel, pixels: Pixels) -> NDArray[Any]:
    """uint8 [B, C, H, W] -> [B, K], or masks [B, H, W]."""
    import torch

    device = next(model.module.parameters()).device
    with torch.no_grad():
        output = model.module(to_float(torch.from_numpy(pixels).to(device)))
        return np.asarray(model.task.predictions(output).cpu().numpy())


def _chunks(
    paths: Sequence[Path], model: RunModel, on_unreadable: Callable[[DataError], None]
) -> Iterator[_Chunk]:
    """Yield names and pixels, at most some hundred images at once, in the order given."""
    waiting: list[Path] = []
    for path in paths:
        if path.suffix != ".npz":
            waiting.append(path)
        if waiting and (path.suffix == ".npz" or len(waiting) == _ROWS):
            yield from _read(waiting, model, on_unreadable)
            waiting = []
        if path.suffix == ".npz":
            try:
                pixels = _array(path, model.image_shape)
            except DataError as error:
                on_unreadable(error)
                continue
            for start in range(0, len(pixels), _ROWS):
                rows = np.ascontiguousarray(pixels[start : start + _ROWS])
                yield [f"{path}[{start + k}]" for k in range(len(rows))], rows, set()
    yield from _read(waiting, model, on_unreadable)


def _read(
    paths: Sequence[Path], model: RunModel, on_unreadable: Callable[[DataError], None]
) -> Iterator[_Chunk]:
    """Yield the images that can be read: all at once, or half by half around one that cannot."""
    if not paths:
        return
    try:
        images = _SizedFiles(paths, model)
        pixels = images.read(np.arange(len(paths)))
    except DataError as error:
        if len(paths) == 1:
            on_unreadable(error)
            return
        middle = len(paths) // 2
        yield from _read(paths[:middle], model, on_unreadable)
        yield from _read(paths[middle:], model, on_unreadable)
        return
    yield [images.describe(k) for k in range(len(paths))], pixels, images.resized


def _raise(error: DataError) -> None:
    raise error


def _array(path: Path, shape: tuple[int, int, int]) -> Pixels:
    """Return the images of an ``.npz`` file: the array of a usual name, or the only one."""
    try:
        # opened here: numpy leaves the file of a damaged archive open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            names = list(arrays)
            usual = [name for name in _ARRAYS if name in names] or (
                names if len(names) == 1 else []
            )
            array: NDArray[Any] | None = np.asarray(arrays[usual[0]]) if usual else None
    except Exception as error:  # a damaged zip can fail in many ways
        raise DataError(f"{path} cannot be read ({error}): it may be damaged") from error
    if array is None:
        raise DataError(
            f"{path} has the arrays {', '.join(names)}: call the images {' or '.join(_ARRAYS)}"
        )
    pixels = as_images(array, str(path))
    if pixels.shape[1:] != shape:
        raise DataError(
            f"{path} has images {list(pixels.shape[1:])} [channels, height, width], but the model "
            f"takes {list(shape)}"
        )
    return pixels
