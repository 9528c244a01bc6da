"""Writes a run's progress into its folder: what may be published apart from what may not."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dpbam.app.runs.files import append_json_line, keep_json_lines, read_json_lines
from dpbam.app.runs.folder import RunFolder
from dpbam.tasks.scores import Compared
from dpbam.training.events import EvaluationReport, Reporter, StartReport, StepReport

if TYPE_CHECKING:
    from dpbam.bias import BiasRecord, ReleasedStatistics


class Recorder(Reporter):
    """Appends to ``metrics.jsonl`` and, in ``non-private``, to the logs of training and bias.

    The metrics hold no times, so that a seeded run ends with the same file, resumed or not.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._bias = folder, folder.non_private / "bias.jsonl"
        self._looks = folder.non_private / "evaluations.jsonl"  # append-only: never rewound

    def rewind(self, step: int) -> list[EvaluationReport]:
        """Drop what was written of later steps, and return the evaluations that are left."""
        keep_json_lines(self._folder.training_log, step)
        for path in (self._bias, self._folder.statistics):
            keep_json_lines(path, step - 1)  # their steps are counted from 0
        lines = keep_json_lines(self._folder.metrics, step)
        reports = [EvaluationReport.from_dict(_finite(line)) for line in lines]
        return [replace(report, compared=self._compared(report.step)) for report in reports]

    def _compared(self, step: int) -> dict[str, Compared]:
        """Return the comparison with the best constant of the latest evaluation of ``step``."""
        rows = [row for row in read_json_lines(self._looks) if row.get("step") == step]
        stored = rows[-1].get("compared", {}) if rows else {}
        return {k: Compared(**_finite(scores)) for k, scores in stored.items()}

    def on_step(self, report: StepReport) -> None:
        names = ("step", "lr", "seconds", "non_private_batch_size", "non_private_loss")
        values = asdict(report)
        append_json_line(self._folder.training_log, {name: values[name] for name in names})

    def on_bias(self, record: BiasRecord) -> None:
        append_json_line(self._bias, asdict(record))

    def on_release(self, released: ReleasedStatistics) -> None:
        append_json_line(self._folder.statistics, asdict(released))

    def on_evaluation(self, report: EvaluationReport) -> None:
        compared = {name: scores._asdict() for name, scores in report.compared.items()}
        # counted before it is shown
        append_json_line(self._looks, {"step": report.step, "compared": compared})
        append_json_line(self._folder.metrics, report.to_dict())

    def evaluated(self, *, seeded: bool) -> int:
        """Return how often the test data was evaluated, also in steps that a restart lost.

        A seeded run repeats a lost step with the same result, which is not a second release.
        """
        steps = [line.get("step") for line in read_json_lines(self._looks)]
        return len(set(steps)) if seeded else len(steps)


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


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Restore the numbers that JSON does not have."""
    words: dict[Any, float] = {None: float("nan"), "infinite": float("inf")}
    return {k: words.get(v, v) for k, v in line.items()}
