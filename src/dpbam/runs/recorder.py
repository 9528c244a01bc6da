"""Writes a run's progress into its folder: what may be published apart from what may not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpbam.reporter import Evaluation, Reporter, StartReport, StepReport
from dpbam.runs.files import append_json_line, keep_json_lines
from dpbam.runs.folder import RunFolder


class Recorder(Reporter):
    """Appends to ``metrics.jsonl`` and ``non-private/training.jsonl``, and passes everything on.

    The metrics hold no times, so that a resumed seeded run ends with the same file as an
    undisturbed one.
    """

    def __init__(self, folder: RunFolder, onwards: Reporter) -> None:
        self._folder, self._onwards = folder, onwards

    def rewind(self, step: int) -> list[Evaluation]:
        """Drop what was written of later steps; the evaluations that are left."""
        keep_json_lines(self._folder.training_log, step)
        lines = keep_json_lines(self._folder.metrics, step)
        return [Evaluation(**_finite(line)) for line in lines]

    def on_start(self, report: StartReport) -> None:
        """Pass it on."""
        self._onwards.on_start(report)

    def on_step(self, report: StepReport) -> None:
        """One line in the non-private log."""
        names = ("step", "lr", "seconds", "non_private_batch_size", "non_private_loss")
        values = asdict(report)
        append_json_line(self._folder.training_log, {name: values[name] for name in names})
        self._onwards.on_step(report)

    def on_evaluation(self, report: Evaluation) -> None:
        """One line in the metrics."""
        append_json_line(self._folder.metrics, asdict(report))
        self._onwards.on_evaluation(report)

    def on_checkpoint(self, path: Path, step: int) -> None:
        """Pass it on."""
        self._onwards.on_checkpoint(path, step)

    def on_message(self, message: str) -> None:
        """Pass it on."""
        self._onwards.on_message(message)

    def on_end(self, message: str) -> None:
        """Pass it on."""
        self._onwards.on_end(message)


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Undo what JSON cannot hold."""
    words: dict[Any, float] = {None: float("nan"), "infinite": float("inf")}
    return {k: words.get(v, v) for k, v in line.items()}
