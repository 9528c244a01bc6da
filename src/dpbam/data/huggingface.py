"""Hugging Face ``datasets`` by name, or local parquet files; needs the extra ``dpbam[hf]``.

``hf:cifar10`` is a set of the Hub, ``hf:scans.parquet`` one file, ``hf:./scans`` a folder whose
file names start with ``train``, ``val`` or ``test``. The library caches its copy in the folder
``huggingface`` of the data root; images are decoded from there when they are read. The image column
is the one of type Image (or named image or img), the label column the first of type ClassLabel (or
named label, labels or target); other plain columns become columns.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpbam.data.base import DataError
from dpbam.data.dataset import as_column
from dpbam.data.decode import DecodedImages, common_format, open_image
from dpbam.data.owners import SINGLE, names_person
from dpbam.data.sources import Options, Splits, Table

if TYPE_CHECKING:
    from PIL import Image

_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "target", "fine_label")
_SPLITS = {"train": "train", "test": "test", "validation": "val", "valid": "val", "val": "val"}


def open_huggingface(argument: str, options: Options) -> Splits:
    """Return the splits train, test and validation (as ``val``) of the set."""
    if not argument:
        raise DataError("hf needs a name or a parquet file, such as hf:cifar10")
    sets = {_SPLITS[k]: v for k, v in _load_dataset(argument, options).items() if k in _SPLITS}
    if "train" not in sets:
        raise DataError(f"hf:{argument} has no split called train")
    image, label, names = _schema(sets["train"], argument)
    with options.findings.collecting():
        _refuse_nested_owners(sets["train"], argument, options)
    calls = {split: f"hf:{argument}/{split}" for split in sets}
    encoded = {split: _select_images(rows, image) for split, rows in sets.items()}
    image_format = cache(lambda: _common_format(encoded, calls, options))

    def make_table(split: str, rows: Any) -> Table:
        return Table(
            name=calls[split],
            labels=np.asarray(rows[label]),
            open_images=lambda: _RowImages(
                encoded[split], calls[split], *image_format(), options.resizes
            ),
            columns={
                name: as_column(np.asarray(rows[name]), name)
                for name, feature in rows.features.items()
                if name not in (image, label) and _is_plain(feature)
            },
            class_names=names,
        )

    return {split: make_table(split, rows) for split, rows in sets.items()}


def _common_format(
    encoded: Mapping[str, Any], calls: Mapping[str, str], options: Options
) -> tuple[tuple[int, int], int]:
    """The size and the channels of the training set; while a set is checked, of all splits."""
    splits = list(encoded) if options.findings.thorough else ["train"]
    places = [(split, index) for split in splits for index in range(len(encoded[split]))]

    def describe(place: int) -> str:
        split, index = places[place]
        return f"row {index} of {calls[split]}"

    def open_place(place: int) -> AbstractContextManager[Image.Image]:
        split, index = places[place]
        return _open_row(encoded[split][index], describe(place))

    where = " and ".join(calls[split] for split in splits)
    return common_format(open_place, describe, len(places), options, where)


class _RowImages(DecodedImages):
    """The image column of a ``datasets.Dataset``, decoded when it is read."""

    def __init__(
        self, rows: Any, call: str, size: tuple[int, int], channels: int, resize: bool
    ) -> None:
        super().__init__(len(rows), size, channels, resize)
        self._rows, self._call = rows, call

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        return _open_row(self._rows[index], self.describe(index))

    def describe(self, index: int) -> str:
        return f"row {index} of {self._call}"


def _open_row(row: Mapping[str, object], where: str) -> AbstractContextManager[Image.Image]:
    (item,) = row.values()
    if isinstance(item, dict) and item.get("bytes") is None and item.get("path"):
        return open_image(item["path"])
    encoded = item.get("bytes") if isinstance(item, dict) else item
    if not isinstance(encoded, bytes):
        raise DataError(f"{where} has no image bytes")
    return open_image(io.BytesIO(encoded), where)


def _load_dataset(argument: str, options: Options) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Hugging Face sets need the package datasets: pip install 'dpbam[hf]'"
        ) from error
    files = _parquet_files(Path(argument).expanduser())
    if files is None and not options.download:
        raise DataError(
            f"hf:{argument} is not a local file or folder, and downloads are switched off"
        )
    cache = str(options.folder / "huggingface")
    try:
        if files:
            return dict(datasets.load_dataset("parquet", data_files=files, cache_dir=cache))
        return dict(datasets.load_dataset(argument, cache_dir=cache))
    except Exception as error:  # the library and the network below it fail in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"cannot load hf:{argument} ({reason}): check the name, or get its parquet files and "
            "give their folder, as hf:/path/to/folder"
        ) from error


def _parquet_files(path: Path) -> dict[str, list[str]] | None:
    """The local files by split, or None if ``path`` is not local."""
    if path.is_dir():
        paths_by_split = {
            split: sorted(map(str, path.glob(f"{split}*.parquet")))
            for split in ("train", "test", "val")
        }
        if not paths_by_split["train"]:
            raise DataError(f"{path} has no file train*.parquet")
        return {split: files for split, files in paths_by_split.items() if files}
    if path.suffix == ".parquet":
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        return {"train": [str(path)]}
    return None


def _schema(rows: Any, argument: str) -> tuple[str, str, list[str] | None]:
    """The image column, the label column, and the class names if they are declared."""
    import datasets

    kinds = rows.features
    images = [name for name, kind in kinds.items() if isinstance(kind, datasets.Image)]
    images += [name for name in _IMAGE_NAMES if name in kinds]
    labels = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    labels += [name for name in _LABEL_NAMES if name in kinds]
    if not images or not labels:
        raise DataError(
            f"hf:{argument} has the columns {', '.join(kinds)}, but needs an image (of type Image, "
            "or called image) and a label (of type ClassLabel, or called label)"
        )
    return images[0], labels[0], getattr(kinds[labels[0]], "names", None)


def _select_images(rows: Any, image: str) -> Any:
    """The image column alone, encoded."""
    import datasets

    column = rows.select_columns([image])
    if isinstance(rows.features[image], datasets.Image):
        column = column.cast_column(image, datasets.Image(decode=False))
    return column


def _refuse_nested_owners(rows: Any, argument: str, options: Options) -> None:
    """Refuse persons in a column that cannot be read, unless the unit was chosen without them."""
    names = [n for n, kind in rows.features.items() if names_person(n) and not _is_plain(kind)]
    if names and options.unit is None:
        raise DataError(
            f"hf:{argument} has the column {names[0]!r}, which says whose each record is, but does "
            f"not hold one number or string per row: convert it, or pass {SINGLE}"
        )


def _is_plain(feature: Any) -> bool:
    kind = str(getattr(feature, "dtype", ""))
    return kind in ("string", "large_string", "bool") or kind.startswith(("int", "uint", "float"))
