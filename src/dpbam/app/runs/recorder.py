"""Writes a run's progress into its folder: what may be published apart from what may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.rows import ComparedRow, TrainingRow, append_row, read_rows, rewind_rows
from dpbam.tasks.scores import Compared
from dpbam.training.events import EvaluationReport, Reporter, StartReport, StepReport

if TYPE_CHECKING:
    from dpbam.bias import BiasRecord, ReleasedStatistics


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
