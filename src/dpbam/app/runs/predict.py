"""Predictions of a run's model for data sets, image files and ``.npz`` arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpbam.app.runs.metrics import Metrics, evaluate
from dpbam.data import DataError, DataSet, read_images, to_float
from dpbam.data.arrays import as_images

if TYPE_CHECKING:
    from torch import Tensor

    from dpbam.app.runs.model_file import RunModel

Pixels = NDArray[np.uint8]
_ROWS = 256  # images at once
_ARRAYS = ("images", "x", "data", "test_images", "x_test")


@dataclass(frozen=True)
class Prediction:
    """The likeliest class and all probabilities; row 3 of an array is ``scans.npz[3]``."""

    file: str
    label: str
    probabilities: dict[str, float]


def predict_files(model: RunModel, files: Sequence[str | Path]) -> Iterator[Prediction]:
    """Predict image files (resized and converted to what the model takes) and ``.npz`` arrays.

    A missing file is refused before the first is predicted.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            kind = "a folder, not a file" if path.is_dir() else "not there"
            raise DataError(f"{path} is {kind}: give image files or .npz files")
    for names, pixels in _chunks(paths, model.image_shape):
        for name, row in zip(names, _probabilities(model, pixels), strict=True):
            by_class = dict(zip(model.class_names, row.tolist(), strict=True))
            yield Prediction(name, model.class_names[int(row.argmax())], by_class)


def predict_dataset(model: RunModel, dataset: DataSet) -> NDArray[np.float64]:
    """Return the probabilities [N, K] of every record of a data set."""
    if dataset.shape != model.image_shape:
        raise DataError(
            f"{dataset.name} has images {list(dataset.shape)} [channels, height, width], but the "
            f"model takes {list(model.image_shape)}"
        )
    from dpbam.training.evaluation import predict_logits

    return _softmax(predict_logits(model.module, dataset)[0])


def evaluate_dataset(model: RunModel, dataset: DataSet, by: Iterable[str] = ()) -> Metrics:
    """Return all metrics of a model on a data set, for all records and by the columns ``by``.

    Classes are matched by name, so a data set that lacks some of the model's is evaluated too.
    """
    groups = {column: dataset.column(column) for column in by}
    labels = _labels_of(model, dataset)
    return evaluate(predict_dataset(model, dataset), labels, model.class_names, groups)


def _labels_of(model: RunModel, dataset: DataSet) -> NDArray[np.int64]:
    """Return the data set's labels in the model's numbering."""
    number = {name: k for k, name in enumerate(model.class_names)}
    unknown = [name for name in dataset.class_names if name not in number]
    if unknown:
        raise DataError(
            f"{dataset.name} has the class {unknown[0]!r}, which the model does not know: it knows "
            f"{', '.join(model.class_names[:10])}{', ...' if len(number) > 10 else ''}"
        )
    numbers = np.array([number[name] for name in dataset.class_names])
    return np.asarray(numbers[dataset.labels])


def _probabilities(model: RunModel, pixels: Pixels) -> NDArray[np.float64]:
    """softmax(model(x)): uint8 [B, C, H, W] -> [B, K]."""
    import torch

    device = next(model.module.parameters()).device
    with torch.no_grad():
        return _softmax(model.module(to_float(torch.from_numpy(pixels).to(device))))


def _softmax(logits: Tensor) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = logits.double().softmax(dim=1).cpu().numpy()
    return probabilities


def _chunks(
    paths: Sequence[Path], shape: tuple[int, int, int]
) -> Iterator[tuple[list[str], Pixels]]:
    """Yield names and pixels, at most some hundred images at once, in the order given."""
    waiting: list[Path] = []
    for path in paths:
        if path.suffix != ".npz":
            waiting.append(path)
        if waiting and (path.suffix == ".npz" or len(waiting) == _ROWS):
            yield [str(p) for p in waiting], read_images(waiting, shape)
            waiting = []
        if path.suffix == ".npz":
            pixels = _array(path, shape)
            for start in range(0, len(pixels), _ROWS):
                part = np.ascontiguousarray(pixels[start : start + _ROWS])
                yield [f"{path}[{start + k}]" for k in range(len(part))], part
    if waiting:
        yield [str(p) for p in waiting], read_images(waiting, shape)


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
