"""``labels.csv``: one line per image, read and checked before an image is opened.

Columns: ``file``, relative to the folder, and ``label`` or ``mask``; optionally ``split`` and
``patient``; all others are further facts. Where no column has such a name, the only one that means
the same has its part: ``path``, ``image`` or ``filename`` for ``file``, ``class``, ``target`` or
``finding`` for ``label``, ``subject`` or ``patient_id`` for ``patient`` (``_SYNONYMS`` has them
all), in any case and with spaces or dashes for ``_``. If two would do, the table is refused.

A ``label`` may be a class, findings with ``|`` between them, or a number. The option
``label_columns`` names other columns: one instead of ``label``, or one of 0 and 1 per finding. A
column ``mask`` in place of ``label`` names each image's mask.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpbam._names import did_you_mean
from dpbam.data.base import DataError
from dpbam.data.sources import Options

TABLE = "labels.csv"
_SYNONYMS = {
    "file": ("path", "filename", "file_name", "filepath", "file_path", "image", "image_path",
             "image_file", "image_index", "img", "dicom", "dicom_path"),
    "mask": ("masks", "mask_path", "mask_file"),
    "label": ("labels", "class", "target", "finding", "findings", "finding_labels", "diagnosis"),
    "patient": ("patient_id", "patientid", "subject", "subject_id", "subjectid"),
    "split": ("subset", "partition"),
}  # fmt: skip


def holds_masks(names: Iterable[str], options: Options) -> bool:
    """Whether the column ``mask`` holds the labels."""
    wanted = options.task in (None, "segmentation") and not options.label_columns
    return wanted and "mask" in names and (options.task is not None or "label" not in names)


def read_rows(table: Path, options: Options) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a ``labels.csv`` with their line numbers.

    The columns ``file`` (relative to the folder, with ``/``) and ``label``, or those that the
    options name, are required, and so is a value for each in every row. Only the findings of a
    multi-label set may be empty: there are none. Problems are collected.
    """
    findings = options.findings
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            header = list(reader.fieldnames or [])
            names = reader.fieldnames = _standard(table, header, options)
            label = ("mask",) if holds_masks(names, options) else ("label",)
            needed = ("file", *(options.label_columns or label))
            _check_header(table, header, names, needed)
            pairs = zip(header, names, strict=True)
            if renamed := [
                f"{spelling!r} as {name}" for spelling, name in pairs if spelling != name
            ]:
                findings.notes.append(f"{table.name}: reading the column {', '.join(renamed)}")
            for row in reader:
                line = _first_line(reader.line_num, row)
                if problem := _row_problem(row, needed, options.task):
                    findings.problems.append(f"line {line} of {table} has {problem}")
                else:
                    yield line, row
    except (UnicodeDecodeError, csv.Error) as error:  # the rows before it are checked
        findings.cut_short = True
        way_out = ": save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        findings.problems.append(f"{table} is not a readable CSV file in UTF-8 ({error}){way_out}")
    except OSError as error:
        raise DataError(f"cannot read {table}: {error.strerror}") from error


def _first_line(last: int, row: Mapping[Any, Any]) -> int:
    """The line on which a row begins: a value in quotes may hold further ones."""
    texts = (text for value in row.values() for text in (value if type(value) is list else [value]))
    return last - sum(len(re.findall(r"\r\n|\r|\n", text)) for text in texts if text)


def _standard(table: Path, names: list[str], options: Options) -> list[str]:
    """The names of a table's columns, synonyms replaced where no column has the name itself."""
    plain = [re.sub(r"[\s-]", "_", name.strip().lower()) for name in names]
    renamed = list(names)
    for standard, synonyms in _SYNONYMS.items():
        chosen = standard in ("label", "mask") and bool(options.label_columns)
        if standard in names or chosen or (standard == "label" and holds_masks(renamed, options)):
            continue
        places = [k for k, name in enumerate(plain) if name in (standard, *synonyms)]
        places = [k for k in places if names[k] not in options.label_columns]
        if len(places) > 1:
            raise DataError(
                f"{table} has the columns {' and '.join(repr(names[k]) for k in places)}, each of "
                f"which could be {standard!r}: rename the right one to {standard}"
            )
        for k in places:
            renamed[k] = standard
    return renamed


def _check_header(table: Path, header: list[str], names: list[str], needed: Sequence[str]) -> None:
    missing = [name for name in needed if name not in names]
    if not missing:
        return
    way_out = (
        f"its first line must name the columns, {','.join(needed)} and further ones, with commas "
        f"between them; it has {','.join(header) or 'nothing'}"
    )
    if missing == ["label"]:
        way_out += "; or name the column of labels by --label-column"
    if len(missing) == 1 and missing[0] not in _SYNONYMS:
        way_out = did_you_mean(missing[0], header, way_out)
    raise DataError(
        f"{table} has no column {' and no column '.join(map(repr, missing))}: {way_out}"
    )


def _row_problem(row: dict[str, str], needed: Sequence[str], task: str | None) -> str:
    """What is wrong with the values of a line, after "has"; empty if nothing is."""
    if None in row or None in row.values():
        return "more or fewer values than there are columns"
    empty = [name for name in needed if not row[name]]
    findings_may_be_empty = task == "multi-label" and empty == ["label"]
    if findings_may_be_empty or not empty:
        return ""
    return f"no {' and no '.join(empty)}: fill it in, or leave the line out"
