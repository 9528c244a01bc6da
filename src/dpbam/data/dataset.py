"""A data set: uint8 images, labels, columns, a fingerprint.

What is public and what is private:

====================================  ==========================================================
public, fixed by the source           ``name``, ``len()``, ``shape``, ``class_names``, column names
private                               pixels, labels, the columns' values
mapping to float (:func:`to_float`)   public: the same for every set, never fitted to the data
====================================  ==========================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpbam.data.base import DataError, Images, Indices
from dpbam.errors import ArgumentTypeError

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, NDArray[Any]]
Task = Literal["single-label", "multi-label", "regression", "segmentation"]
TASKS: tuple[Task, ...] = get_args(Task)
UNKNOWN = ("",)  # the class of records whose labels cannot be read, while a set is checked


@dataclass(frozen=True, eq=False)
class DataSet:
    """One split of one source.

    Attributes:
        name: to display, such as ``cifar10/train``.
        images: N images, read by position.
        labels: by task. Single-label: int64 [N], each 0 .. num_classes - 1. Multi-label: uint8
            [N, num_classes], 1 where the record has the finding. Regression: float32 [N].
            Segmentation: int64 [N], all 0; the labels are the masks.
        class_names: one per class or finding; the name of the value in a regression.
        columns: further facts about each record ([N] each): a patient, a sex, a folder level.
            They serve as units of privacy and as sub-groups to evaluate.
        notes: remarks from loading, for the operator.
        unit: whom privacy is promised to where no unit is named: "record", or a column.
        masks: of a segmentation: uint8 [N, 1, H, W], the class of each pixel.

    Example:
        >>> from dpbam.data import load
        >>> digits = load("digits")
        >>> digits.shape, digits.num_classes
        ((1, 8, 8), 10)
        >>> images, labels = digits.batch(np.array([0, 5]))
        >>> images.shape, images.dtype, labels.dtype
        (torch.Size([2, 1, 8, 8]), torch.uint8, torch.int64)
    """

    name: str
    images: Images
    labels: NDArray[Any]
    class_names: tuple[str, ...]
    columns: Columns = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    masks: Images | None = None
    unit: str = "record"

    def __post_init__(self) -> None:
        types: dict[Task, Any] = {"multi-label": np.uint8, "regression": np.float32}
        dtype = types.get(self.task, np.int64)
        labels = np.ascontiguousarray(self.labels, dtype=dtype).copy()
        labels.setflags(write=False)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "columns", MappingProxyType(_stripped(self.columns)))
        self._check()

    def _check(self) -> None:
        if not len(self.images):
            raise DataError(f"{self.name} has no images")
        if problems := [*self._label_problems(), *self._column_problems()]:
            raise DataError(*problems)

    def _label_problems(self) -> Iterator[str]:
        n, k = len(self.images), len(self.class_names)
        if len(self.labels) != n or self.labels.ndim > 2:
            yield f"{self.name} has {n} images but {len(self.labels)} labels"
        if self.task == "multi-label" and self.labels.shape[1] != k:
            yield f"{self.name} has {self.labels.shape[1]} labels per record for {k} findings"
        if self.masks is not None and self.masks.shape != (n, 1, *self.shape[1:]):
            yield (
                f"{self.name} has images {list(self.images.shape)} but masks "
                f"{list(self.masks.shape)}: each image needs one mask of its own size"
            )
        low, high = {"multi-label": (0, 1), "regression": (-np.inf, np.inf)}.get(
            self.task, (0, k - 1)
        )
        bad = ~((self.labels >= low) & (self.labels <= high) & np.isfinite(self.labels))
        if bad.any():
            first = int(np.argwhere(bad)[0, 0])
            yield (
                f"{self.name}: {self.images.describe(first)} has label {self.labels[bad][0]}, "
                f"outside {low}..{high} ({bad.sum()} such labels)"
            )

    def _column_problems(self) -> Iterator[str]:
        n = len(self.images)
        for column, values in self.columns.items():
            if values.shape != (n,):
                yield (
                    f"{self.name}: column {column!r} must have {n} values, got {list(values.shape)}"
                )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        kind = "" if self.task == "single-label" else f", {self.task}"
        count = f"{self.num_classes} class{'es' if self.num_classes != 1 else ''}"
        return f"DataSet({self.name!r}, {len(self)} images {self.shape}, {count}{kind})"

    @property
    def task(self) -> Task:
        """What a model of this set predicts, from the kind of its labels.

        Example:
            >>> from dpbam.data import from_arrays
            >>> from_arrays(np.zeros((2, 8, 8), np.uint8), [[1, 1, 0], [0, 0, 0]]).task
            'multi-label'
        """
        if self.masks is not None:
            return "segmentation"
        if self.labels.ndim == 2:
            return "multi-label"
        return "regression" if self.labels.dtype.kind == "f" else "single-label"

    @property
    def num_classes(self) -> int:
        """The number of possible classes or findings; not all of them need to occur."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        return self.images.shape[1:]

    def batch(self, indices: Indices | Tensor) -> tuple[Tensor, Tensor]:
        """Return the records at ``indices`` [B]: uint8 [B, C, H, W] and their labels, on the CPU.

        Those of a segmentation are its masks, uint8 [B, H, W].

        Raises:
            IndexError: if an index is outside 0 .. len - 1 (negative ones do not count back).
            DataError: if an image cannot be read; the message has its path.
        """
        import torch

        raw = indices.cpu().numpy() if isinstance(indices, torch.Tensor) else indices
        where = np.asarray(raw, dtype=np.int64).reshape(-1)
        if where.size and not (where.min() >= 0 and where.max() < len(self)):
            raise IndexError(f"{self.name} has records 0..{len(self) - 1}, asked for {where}")
        targets = self.labels[where] if self.masks is None else self.masks.read(where)[:, 0]
        return torch.from_numpy(self.images.read(where)), torch.from_numpy(targets)

    def class_shares(self) -> NDArray[np.float64]:
        """Return [N, num_classes]: the classes of each record, its findings, or shares of pixels.

        Not private. A regression has none.
        """
        if self.masks is not None:
            every = range(self.num_classes)
            return np.concatenate([
                np.stack([(mask == k).mean(axis=(1, 2, 3)) for k in every], axis=1)
                for _, mask in self.masks.walk()
            ])  # fmt: skip
        if self.task == "multi-label":
            return self.labels.astype(np.float64)
        one_hot: NDArray[np.float64] = np.eye(self.num_classes)[self.labels]
        return one_hot

    def class_counts(self) -> NDArray[np.int64]:
        """Return [num_classes]: how many records have each class. Not private."""
        if self.task == "single-label":
            return np.bincount(self.labels, minlength=self.num_classes)
        return np.asarray((self.class_shares() > 0).sum(axis=0))

    def column(self, name: str) -> NDArray[Any]:
        """Return the column ``name``, or raise an error that lists the columns."""
        if name not in self.columns:
            there = ", ".join(sorted(self.columns)) or "none"
            raise DataError(f"{self.name} has no column {name!r}: its columns are {there}")
        return self.columns[name]

    def subset(self, indices: Indices, *, name: str | None = None) -> DataSet:
        """Return the records at ``indices``, in that order, as a set; nothing is read."""
        return DataSet(
            name=name or self.name,
            images=self.images.select(indices),
            labels=self.labels[indices],
            class_names=self.class_names,
            columns={key: values[indices] for key, values in self.columns.items()},
            notes=self.notes,
            masks=None if self.masks is None else self.masks.select(indices),
            unit=self.unit,
        )

    def fingerprint(self) -> str:
        """Return a hash of the content, by which a resumed run notices that its data has changed.

        SHA-256 over the shape, the class names, all labels, all columns, the paths and sizes of
        files, and pixels of images and masks: all of them up to 256 MiB; of a larger set 4096
        records, evenly spaced; of images that must be decoded, 256. It is derived from private
        data without noise: store it with the data, do not publish it.

        Example:
            >>> from dpbam.data import load
            >>> load("digits").fingerprint() == load("digits", split="test").fingerprint()
            False
        """
        digest = hashlib.sha256(repr((self.images.shape, self.class_names)).encode())
        digest.update(self.labels.tobytes())
        for name in sorted(self.columns):
            values = np.ascontiguousarray(self.columns[name])
            digest.update(f"{name} {values.dtype.str} ".encode())
            digest.update(values.tobytes())
        digest.update(self.images.manifest())
        for part in (self.images,) if self.masks is None else (self.images, self.masks):
            for _, pixels in part.walk(part.hashed_records()):
                digest.update(pixels.data)
        if self.masks is not None:
            digest.update(self.masks.manifest())
        return digest.hexdigest()


def model_input(images: Tensor) -> Tensor:
    """Return what a model takes: floats of uint8 images; features are floats already."""
    return images if images.is_floating_point() else to_float(images)


def to_float(images: Tensor) -> Tensor:
    """Map uint8 0..255 to float32 in [-1, 1] on the images' device: x / 127.5 - 1.

    The mapping is public: the same for every set. A mean or deviation measured on the data would
    be a release without noise.

    Example:
        >>> import torch
        >>> to_float(torch.tensor([0, 255], dtype=torch.uint8))
        tensor([-1.,  1.])
    """
    import torch

    if images.dtype != torch.uint8:
        raise ArgumentTypeError(f"to_float takes uint8 images, got {images.dtype}")
    return images.float().mul_(1 / 127.5).sub_(1.0)


def _stripped(columns: Columns) -> dict[str, NDArray[Any]]:
    """The columns, text without space around it: "ann" and "ann " are one patient."""
    return {k: np.char.strip(v) if v.dtype.kind in "SU" else v for k, v in columns.items()}
