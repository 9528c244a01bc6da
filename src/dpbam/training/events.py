"""The events of a training, for a live display or a log.

A front end subclasses :class:`Reporter` and overrides the callbacks that it needs. Names that begin
with ``non_private`` are for the operator only: they come from the training data without noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpbam.tasks.scores import Compared, is_useless

if TYPE_CHECKING:
    from pathlib import Path

    from dpbam.privacy.plan import PrivacyPlan

_FAR = 1e6  # below the best constant answer: R2 where errors are 1,000 deviations of the values


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """A training that is about to start.

    Attributes:
        step: steps already done, above 0 in a resumed run.
        epsilon: the most that this run may spend: the configured one, else the plan's; infinite
            without privacy.
        parameters: how many are trained.
        seeded: reproducible, for research only.
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
        charged: steps paid for, replays after a crash included.
        epsilon_at_most: a bound of what is spent by now, one of about ten values per run. What is
            spent, ``plan.epsilon(step, charged - step)``, takes some 50 ms: too long for each step.
        seconds: since this process began to train.
        seconds_left: until the end at the current pace.
        non_private_batch_size: the realised number of rows.
        non_private_loss: mean training loss of the batch, in the step's own pass; None if not
            measured.
    """

    step: int
    steps: int
    epoch: float
    charged: int
    epsilon_at_most: float
    lr: float
    seconds: float
    seconds_left: float
    non_private_batch_size: int
    non_private_loss: float | None


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The model that would be released, on the test data.

    Attributes:
        step: steps done.
        epoch: expected passes done.
        epsilon: spent by now.
        scores: the task's metrics by name, the main one first, such as the accuracy.
        loss: mean over all ``records``.
        compared: scores next to those of the best constant answer. For the operator: no file that
            may be published has them.
    """

    step: int
    epoch: float
    epsilon: float
    scores: Mapping[str, float]
    loss: float
    records: int
    compared: Mapping[str, Compared] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The name of the task's main metric, of which more is better."""
        return next(iter(self.scores))

    @property
    def score(self) -> float:
        return self.scores[self.metric]

    @property
    def useless(self) -> bool | None:
        """Whether no score is better than the best constant's by more than chance.

        None: there are too few records to tell.
        """
        return is_useless(self.compared)

    @property
    def diverged(self) -> bool:
        """Whether the training has diverged: its numbers have no size that could be compared.

        The loss or the score is not finite, or a score without a lower bound, such as R2, is more
        than a million below that of the best constant answer.
        """
        far = any(one.constant - one.score > _FAR for one in self.compared.values())
        return far or not (math.isfinite(self.loss) and math.isfinite(self.score))

    def to_dict(self) -> dict[str, float]:
        """Return one flat row of plain values.

        Example:
            >>> EvaluationReport(step=1, epoch=0.1, epsilon=0.2, scores={"accuracy": 0.5},
            ...                  loss=0.7, records=10).to_dict()
            {'step': 1, 'epoch': 0.1, 'epsilon': 0.2, 'accuracy': 0.5, 'loss': 0.7, 'records': 10}
        """
        first = {"step": self.step, "epoch": self.epoch, "epsilon": self.epsilon}
        return {**first, **self.scores, "loss": self.loss, "records": self.records}


class Reporter:
    """Callbacks of a training; these do nothing.

    Example:
        >>> class Printing(Reporter):
        ...     def on_evaluation(self, report):
        ...         print(f"step {report.step}: {report.metric} {report.score:.1%}")
        >>> Printing().on_evaluation(EvaluationReport(step=1, epoch=0.1, epsilon=0.2,
        ...                                     scores={"accuracy": 0.5}, loss=0.7, records=10))
        step 1: accuracy 50.0%
    """

    def on_start(self, report: StartReport) -> None:
        """Called before the first step."""

    def on_step(self, report: StepReport) -> None:
        """Called after every step."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Called after every evaluation."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """Called when a checkpoint is on disk."""

    def on_message(self, message: str) -> None:
        """Called with a sentence for the operator."""

    def on_non_private_note(self, note: str) -> None:
        """Called with a note of the data set, such as a number of files: for the operator only."""

    def on_non_private_warning(self, warning: str) -> None:
        """Called with a defect of the data, such as a number of copies: for the operator only."""

    def on_end(self, message: str) -> None:
        """Called at the end, with a sentence on how it ended."""


class Several(Reporter):
    """Calls several reporters, in order."""

    def __init__(self, *reporters: Reporter) -> None:
        def to_all(callback: str) -> Callable[..., None]:
            def call(*facts: Any) -> None:
                for reporter in reporters:
                    getattr(reporter, callback)(*facts)

            return call

        for callback in vars(Reporter):
            if callback.startswith("on_"):
                setattr(self, callback, to_all(callback))
