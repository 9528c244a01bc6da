"""``labels.csv``: what each file of an image folder is."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from dpbam.data.base import DataError


def read_labels(table: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a ``labels.csv`` with their line numbers, each checked.

    Columns ``file`` (relative to the folder, ``/`` between its levels) and ``label`` must be there
    and have a value in every row. That no file is listed twice is checked where files are found,
    since one file may have several spellings: :class:`dpbam.data.same_file.OneRecordPerFile`.
    """
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(table, reader.fieldnames or [])
            for row in reader:
                yield reader.line_num, _check_row(table, reader.line_num, row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} is not a readable CSV file in UTF-8 ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {table}: {error.strerror}") from error


def _check_header(table: Path, names: list[str] | tuple[str, ...] | object) -> None:
    found = list(names) if isinstance(names, list | tuple) else []
    for needed in ("file", "label"):
        if needed not in found:
            raise DataError(
                f"{table} has no column {needed!r}: its first line must name the columns, "
                f"file,label and further ones; it has {','.join(map(str, found)) or 'nothing'}"
            )


def _check_row(table: Path, line: int, row: dict[str, str]) -> dict[str, str]:
    if None in row or None in row.values():
        raise DataError(f"line {line} of {table} has more or fewer values than there are columns")
    if not row["file"] or not row["label"]:
        raise DataError(f"line {line} of {table} has no {'label' if row['file'] else 'file'}")
    return dict(row)
