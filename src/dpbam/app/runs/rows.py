"""The files of a run folder with one line per step: their types, and the reporter that writes them.

=================================  ====================================================
``metrics.jsonl``                  :class:`dpbam.training.events.EvaluationReport`
``statistics.jsonl``               :class:`dpbam.bias.ReleasedStatistics`
``non-private/bias.jsonl``         :class:`dpbam.bias.BiasRecord`
``non-private/training.jsonl``     :class:`TrainingRow`
``non-private/evaluations.jsonl``  :class:`ComparedRow`
=================================  ====================================================

Each line is one dataclass, which writer and readers share. What may be published is apart from what
may not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, core_schema

from dpbam.app.runs.documents import DamagedFileError, first_problem
from dpbam.app.runs.files import append_json_line, read_json_lines, read_number, write_atomic
from dpbam.tasks.scores import Compared
from dpbam.training.events import EvaluationReport, Reporter, StartReport, StepReport

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dpbam.app.runs.folder import RunFolder

    class _Step(DataclassInstance, Protocol):
        @property
        def step(self) -> int: ...

    from dpbam.bias import BiasRecord, ReleasedStatistics

Row = TypeVar("Row", bound="_Step")


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One step of the training, of :class:`dpbam.training.events.StepReport`."""

    step: int
    lr: float
    seconds: float
    non_private_batch_size: int
    non_private_loss: float | None


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One evaluation of the test data: its scores next to those of the best constant answer."""

    step: int
    compared: Mapping[str, Compared]


def append_row(path: Path, row: _Step) -> None:
    """Append a line; on return it survives the end of the process."""
    append_json_line(path, row.to_dict() if isinstance(row, EvaluationReport) else asdict(row))


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Return the rows of all whole lines; a missing file has none.

    Raises:
        DamagedFileError: if a line is not of this kind.
    """
    return [_parse_row(path, number, kind, values)
            for number, values in enumerate(read_json_lines(path), 1)]  # fmt: skip


def rewind_rows(path: Path, kind: type[Row], last_step: int) -> list[Row]:
    """Drop the rows of steps after ``last_step``, which a resumed run repeats; return the rest."""
    rows = zip(read_json_lines(path), read_rows(path, kind), strict=True)
    earlier = [(line, row) for line, row in rows if row.step <= last_step]
    if path.exists():
        write_atomic(path, "".join(json.dumps(line) + "\n" for line, _ in earlier))
    return [row for _, row in earlier]


def _parse_row(path: Path, number: int, kind: type[Row], values: dict[str, JsonValue]) -> Row:
    if kind is EvaluationReport:  # its scores are next to the other fields
        names = {field.name for field in fields(kind)}
        scores = {name: value for name, value in values.items() if name not in names}
        values = {k: v for k, v in values.items() if k in names} | {"scores": scores}
    try:
        row: Row = _validator(kind).validate_python(values)
    except ValidationError as error:
        raise DamagedFileError(
            f"{path} line {number} is damaged ({first_problem(error)}): restore it from a backup"
        ) from None
    return row


@cache
def _validator(kind: type[_Step]) -> SchemaValidator:
    """Return what checks a line; every number in it may be a word that JSON has in its place."""
    return SchemaValidator(_with_words(TypeAdapter(kind).core_schema))


def _with_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_words(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "float":
        return core_schema.no_info_before_validator_function(_number, core_schema.float_schema())
    return {name: _with_words(inner) for name, inner in schema.items()}


def _number(value: object) -> object:
    """Read what :func:`dpbam.app.runs.files.plain` writes for NaN and infinity."""
    return math.nan if value is None else read_number(value)


class Recorder(Reporter):
    """Appends to ``metrics.jsonl`` and, in ``non-private``, to the logs of training and bias.

    The metrics hold no times, so that a seeded run ends with the same file, resumed or not.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def rewind(self, step: int) -> list[EvaluationReport]:
        """Drop what was written of later steps, and return the evaluations that are left."""
        from dpbam.bias import BiasRecord, ReleasedStatistics

        rewind_rows(self._folder.training_log, TrainingRow, step)
        rewind_rows(self._folder.bias, BiasRecord, step - 1)  # its steps are counted from 0
        rewind_rows(self._folder.statistics, ReleasedStatistics, step - 1)  # these, too
        reports = rewind_rows(self._folder.metrics, EvaluationReport, step)
        return [replace(report, compared=self._compared(report.step)) for report in reports]

    def _compared(self, step: int) -> Mapping[str, Compared]:
        """Return the comparison with the best constant of the latest evaluation of ``step``."""
        rows = read_rows(self._folder.evaluations, ComparedRow)
        return next((row.compared for row in reversed(rows) if row.step == step), {})

    def on_step(self, report: StepReport) -> None:
        row = TrainingRow(
            step=report.step,
            lr=report.lr,
            seconds=report.seconds,
            non_private_batch_size=report.non_private_batch_size,
            non_private_loss=report.non_private_loss,
        )
        append_row(self._folder.training_log, row)

    def on_bias(self, record: BiasRecord) -> None:
        append_row(self._folder.bias, record)

    def on_release(self, released: ReleasedStatistics) -> None:
        append_row(self._folder.statistics, released)

    def on_non_private_warning(self, warning: str) -> None:
        with self._folder.warnings.open("a", encoding="utf-8") as file:
            file.write(f"{warning}\n")

    def on_evaluation(self, report: EvaluationReport) -> None:
        # counted before it is shown; this file is never rewound
        row = ComparedRow(step=report.step, compared=report.compared)
        append_row(self._folder.evaluations, row)
        append_row(self._folder.metrics, report)


class TensorBoard(Reporter):
    """Writes curves for TensorBoard into ``non-private/tensorboard``; needs ``dpbam[tensorboard]``.

    They show the training loss too, so none of them may be published.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.non_private / "tensorboard"
        self._writer: Any = None

    def on_start(self, report: StartReport) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=report.step + 1)

    def on_step(self, report: StepReport) -> None:
        self._writer.add_scalar("lr", report.lr, report.step)
        self._writer.add_scalar(
            "non_private/batch_size", report.non_private_batch_size, report.step
        )
        if report.non_private_loss is not None:
            self._writer.add_scalar("non_private/loss", report.non_private_loss, report.step)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._writer.add_scalar("epsilon", report.epsilon, report.step)
        for name, value in report.scores.items():
            self._writer.add_scalar(f"test/{name}", value, report.step)
        self._writer.add_scalar("test/loss", report.loss, report.step)
        self._writer.flush()

    def on_end(self, message: str) -> None:
        self._writer.close()
