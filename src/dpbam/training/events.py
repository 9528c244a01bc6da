"""What a training tells its front end: a live display, a log, JSON lines, or nothing.

A front end subclasses :class:`Reporter` and overrides what it wants to hear. Names that begin with
``non_private`` are for the operator's eyes: they come from the training data without noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from dpbam.privacy.plan import PrivacyPlan


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """What is about to run.

    Attributes:
        plan: the privacy plan; ``plan.steps`` in all.
        step: steps already done, above 0 in a resumed run.
        epsilon: the most that this run may spend: the configured one, else the plan's; infinite
            without privacy.
        method: its name.
        model: its name.
        parameters: how many are trained.
        physical_batch_size: rows computed at once.
        engine: the engine's name.
        device: where it runs.
        seeded: reproducible, research only.
        out: the run folder; None for a loop without one.
    """

    plan: PrivacyPlan
    step: int
    epsilon: float
    method: str
    model: str
    parameters: int
    physical_batch_size: int
    engine: str
    device: str
    seeded: bool
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, after the parameters have moved.

    Attributes:
        step: steps done, from 1.
        steps: in all.
        epoch: expected passes done.
        epsilon: an upper bound of what is spent by now, on a grid of some ten values a run.
        lr: the learning rate of the step.
        seconds: since this process began to train.
        seconds_left: until the end at the present pace.
        non_private_batch_size: the realised number of rows.
        non_private_loss: mean training loss of a part of the batch; None if not measured.
    """

    step: int
    steps: int
    epoch: float
    epsilon: float
    lr: float
    seconds: float
    seconds_left: float
    non_private_batch_size: int
    non_private_loss: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The model that would be handed out, on the test data.

    Attributes:
        step: steps done.
        epoch: expected passes done.
        epsilon: spent by now.
        accuracy: share of test records classified rightly.
        loss: mean cross-entropy.
        records: how many test records.
    """

    step: int
    epoch: float
    epsilon: float
    accuracy: float
    loss: float
    records: int


class Reporter:
    """Hears of a run's progress; this one keeps quiet.

    Example:
        >>> class Printing(Reporter):
        ...     def on_evaluation(self, report):
        ...         print(f"step {report.step}: accuracy {report.accuracy:.1%}")
        >>> Printing().on_evaluation(Evaluation(step=1, epoch=0.1, epsilon=0.2, accuracy=0.5,
        ...                                     loss=0.7, records=10))
        step 1: accuracy 50.0%
    """

    def on_start(self, report: StartReport) -> None:
        """Before the first step."""

    def on_step(self, report: StepReport) -> None:
        """After every step."""

    def on_evaluation(self, report: Evaluation) -> None:
        """After every evaluation."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """When a checkpoint is safe on disk."""

    def on_message(self, message: str) -> None:
        """One sentence the operator should see, such as a note of the data set."""

    def on_end(self, message: str) -> None:
        """When training is over, with one sentence how it ended."""


class Several(Reporter):
    """Tells several others, in order.

    Example:
        >>> class Printing(Reporter):
        ...     def on_message(self, message):
        ...         print(message)
        >>> Several(Printing(), Printing()).on_message("twice")
        twice
        twice
    """

    def __init__(self, *others: Reporter) -> None:
        self._others = others

    def on_start(self, report: StartReport) -> None:
        """Tell all."""
        for other in self._others:
            other.on_start(report)

    def on_step(self, report: StepReport) -> None:
        """Tell all."""
        for other in self._others:
            other.on_step(report)

    def on_evaluation(self, report: Evaluation) -> None:
        """Tell all."""
        for other in self._others:
            other.on_evaluation(report)

    def on_checkpoint(self, path: Path, step: int) -> None:
        """Tell all."""
        for other in self._others:
            other.on_checkpoint(path, step)

    def on_message(self, message: str) -> None:
        """Tell all."""
        for other in self._others:
            other.on_message(message)

    def on_end(self, message: str) -> None:
        """Tell all."""
        for other in self._others:
            other.on_end(message)
