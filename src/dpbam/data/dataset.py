"""A data set: uint8 images, labels, columns, a fingerprint.

What is public and what is confidential:

====================================  ==========================================================
public, fixed by the source           ``name``, ``len()``, ``shape``, ``class_names``, column names
confidential                          pixels, labels, the columns' values
mapping to float (:func:`to_float`)   public: the same for every set, never fitted to the data
====================================  ==========================================================
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpbam._names import did_you_mean
from dpbam.data.base import DataError, Images, Indices, for_each, in_short
from dpbam.data.owners import SINGLE, Owner, find_owner, names_person
from dpbam.errors import ArgumentTypeError, DPBAMError

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, NDArray[Any]]
Task = Literal["single-label", "multi-label", "regression", "segmentation"]
TASKS: tuple[Task, ...] = get_args(Task)
_OWNERS_TABLE = "name the owners in a column patient of labels.csv"
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
        unit: whom privacy is promised to: "record", or a column. None: nothing was chosen; the
            record, unless the set names owners (:mod:`dpbam.data.owners`): then it has to be.
        masks: of a segmentation: uint8 [N, 1, H, W], the class of each pixel.
        places: where each record is to be found, for messages, such as a line of ``labels.csv``;
            empty: its path or number.

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
    unit: str | None = None
    places: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        plain = {
            "labels": _number_array(self.labels, self.name),
            "class_names": tuple(map(str, self.class_names)),
            "columns": MappingProxyType(_plain_columns(self.columns, self.name)),
            "notes": tuple(map(str, self.notes)),
        }
        for key, value in plain.items():
            object.__setattr__(self, key, value)
        self._check()
        types: dict[Task, Any] = {"multi-label": np.uint8, "regression": np.float32}
        labels = np.ascontiguousarray(self.labels, types.get(self.task, np.int64)).copy()
        labels.setflags(write=False)
        object.__setattr__(self, "labels", labels)

    def _check(self) -> None:
        if not len(self.images):
            raise DataError(f"{self.name} has no images")
        if problems := [*self._label_problems(), *self._column_problems()]:
            raise DataError(*problems)

    def _label_problems(self) -> Iterator[str]:
        n, k = len(self.images), len(self.class_names)
        if len(self.labels) != n:
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
        if self.task != "regression":  # a cast to whole numbers would round
            bad |= self.labels != np.round(self.labels)
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
        try:
            targets = self.labels[where] if self.masks is None else self.masks.read(where)[:, 0]
            images = torch.from_numpy(self.images.read(where))
        except (DPBAMError, MemoryError):
            raise
        except Exception as error:  # of a user's own Images
            raise DataError(f"records of {self.name} cannot be read: {in_short(error)}") from error
        if images.shape != (len(where), *self.shape):
            raise DataError(
                f"images of {self.name} are read as {list(images.shape)}, not as "
                f"{[len(where), *self.shape]}: correct the shape of its Images"
            )
        return images, torch.from_numpy(targets)

    def class_shares(self) -> NDArray[np.float64]:
        """Return [N, num_classes]: the classes of each record, its findings, or shares of pixels.

        Not protected by privacy: do not share. A regression has none.
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
        """Return [num_classes]: how many records have each class. Not to be shared."""
        if self.task == "single-label":
            return np.bincount(self.labels, minlength=self.num_classes)
        return np.asarray((self.class_shares() > 0).sum(axis=0))

    def place(self, index: int) -> str:
        """Return where a record is to be found: its line in the table, else its path or number.

        Example:
            >>> from dpbam.data import from_arrays
            >>> from_arrays(np.zeros((2, 8, 8), np.uint8), [0, 1]).place(1)
            'record 1'
        """
        listed = len(self.places) == len(self)
        return self.places[index] if listed else self.images.describe(index)

    def column(self, name: str) -> NDArray[Any]:
        """Return the column ``name``, or raise an error that lists the columns."""
        if name not in self.columns:
            there = ", ".join(sorted(self.columns))
            others = f"its columns are {there}" if there else "it has no columns"
            hint = self._owners_instead_of(name) or did_you_mean(name, self.columns, others)
            raise DataError(f"{self.name} has no column {name!r}: {hint}")
        return self.columns[name]

    def _owners_instead_of(self, name: str) -> str:
        """Return what names the owners where a person's column is missing; "" if nothing does."""
        owner = find_owner(self.columns, self.class_names, self.images.paths)
        if owner is None or not names_person(name):
            return ""
        return _OWNERS_TABLE if owner.column is None else f"did you mean {owner.sign}?"

    def owner(self) -> Owner | None:
        """Return what says whose a record is, where no unit was chosen; None without such a sign.

        Example:
            >>> from dpbam.data import from_arrays
            >>> images, patients = np.zeros((2, 8, 8), np.uint8), {"patient": ["a", "a"]}
            >>> from_arrays(images, [0, 1], columns=patients).owner().column
            'patient'
            >>> from_arrays(images, [0, 1], columns=patients, unit="record").owner() is None
            True
        """
        if self.unit is not None:
            return None
        return find_owner(self.columns, self.class_names, self.images.paths)

    def chosen_unit(self, named: str | None = None) -> str:
        """Return the unit of privacy: the one that is named, else the set's, else the record.

        Raises:
            DataError: if nothing was chosen and the set names owners: a promise per record would
                be weaker than one per owner.
        """
        if named is None and (owner := self.owner()) is not None:
            raise DataError(f"{self.name} has {owner.sign}: {_ways_to_choose(owner)}")
        return named or self.unit or "record"

    def subset(self, indices: Indices, *, name: str | None = None) -> DataSet:
        """Return the records at ``indices``, in that order, as a set; nothing is read.

        Raises:
            DataError: if an index comes twice: its record would be two units of privacy.
        """
        places = np.sort(np.arange(len(self))[indices])
        if len(twice := places[1:][places[1:] == places[:-1]]):
            raise DataError(
                f"record {twice[0]} of {self.name} is chosen twice, and its owner would lose more "
                "privacy than a plan accounts for: choose each record once and weight the loss"
            )
        return DataSet(
            name=name or self.name,
            images=self.images.select(indices),
            labels=self.labels[indices],
            class_names=self.class_names,
            columns={key: values[indices] for key, values in self.columns.items()},
            notes=self.notes,
            masks=None if self.masks is None else self.masks.select(indices),
            unit=self.unit,
            places=[self.places[k] for k in indices] if self.places else (),
        )

    def fingerprint(self) -> str:
        """Return a hash of the content, by which a resumed run notices that its data has changed.

        SHA-256 over the shape, the class names, all labels, all columns, the paths and sizes of
        files, and pixels of images and masks: all of them up to 256 MiB; of a larger set 4096
        records, evenly spaced; of images that must be decoded, 256. It is derived from the
        data without noise: store it with the data, do not share it.

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
        for images in (self.images,) if self.masks is None else (self.images, self.masks):
            for _, pixels in images.walk(images.hashed_records()):
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


def _ways_to_choose(owner: Owner) -> str:
    if owner.column is None:
        return f"{_OWNERS_TABLE}, or pass {SINGLE}"
    if not owner.column.isprintable():
        return f"rename it to patient, and pass --unit patient, or pass {SINGLE}"
    by_owner = f"--unit {shlex.quote(owner.column)} to protect all records of one owner together"
    return f"pass {by_owner}, or {SINGLE}"


def _check_types(data: DataSet) -> None:
    """Refuse fields of a wrong type, which a user's own function may return."""
    name = data.name
    if not isinstance(name, str):
        raise DataError(f"the name of a DataSet must be text, got {type(name).__name__}")
    for field_name, images in (("images", data.images), ("masks", data.masks)):
        if not isinstance(images, Images) and not (field_name == "masks" and images is None):
            raise DataError(
                f"{field_name} of {name} must be a dpbam.data.Images, got "
                f"{type(images).__name__}: dpbam.data.from_arrays makes a DataSet of arrays"
            )
    for field_name, texts in (
        ("class_names", data.class_names), ("notes", data.notes), ("places", data.places),
    ):  # fmt: skip
        if not isinstance(texts, list | tuple) or not all(isinstance(x, str) for x in texts):
            kind = type(texts).__name__
            raise DataError(f"{field_name} of {name} must be a list or tuple of texts, got {kind}")
    if not isinstance(data.columns, Mapping) or not all(isinstance(k, str) for k in data.columns):
        raise DataError(f"columns of {name} must be a dict from names to values")
    if not isinstance(data.unit, str | None):
        kind = type(data.unit).__name__
        raise DataError(f"unit of {name} must be 'record', a column's name or None, got {kind}")


def _number_array(labels: Any, name: str) -> NDArray[Any]:
    """Labels as an array of numbers [N] or [N, L], of their own type."""
    array = to_array(labels, f"labels of {name}")
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
        raise DataError(
            f"labels of {name} must be numbers, [N] or [N, L], got {array.dtype} "
            f"{list(array.shape)}: dpbam.data.from_arrays numbers texts"
        )
    return array


def to_array(values: Any, where: str) -> NDArray[Any]:
    """Return an array; texts that are kept as objects, as pandas does, become texts.

    Raises:
        DataError: if numpy cannot make one, as of rows of different lengths.
    """
    try:
        array = np.asanyarray(values)
        if array.dtype.kind == "O" and all(isinstance(x, str) for x in array.flat):
            array = array.astype(np.str_)
        return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
    except Exception as error:  # numpy calls methods of what it is given
        raise DataError(f"{where} cannot be read as an array ({in_short(error)})") from error


def as_column(values: Any, where: str) -> NDArray[Any]:
    """Return a column [N] of numbers or strings."""
    column = to_array(values, f"column {where}")
    if column.dtype.kind not in "biufU" or column.ndim != 1:
        raise DataError(
            f"column {where} must hold one number or string per record, "
            f"got {column.dtype} {list(column.shape)}"
        )
    return column


def _plain_columns(columns: Mapping[str, Any], name: str) -> dict[str, NDArray[Any]]:
    """The columns as arrays, text without space around it: "ann" and "ann " are one patient."""
    arrays = for_each(lambda v, key: as_column(v, f"{name}: {key}"), dict(columns))
    return {k: np.char.strip(v) if v.dtype.kind == "U" else v for k, v in arrays.items()}
