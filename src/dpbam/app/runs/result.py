"""How a run ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dpbam.errors import DPBAMError

if TYPE_CHECKING:
    from dpbam.privacy.plan import PrivacyPlan
    from dpbam.training.events import EvaluationReport


class RunError(DPBAMError, ValueError):
    """A run that cannot be started or resumed: one sentence with the way out."""


class RunInterruptedError(Exception):
    """Stopped by Ctrl-C or SIGTERM, with a checkpoint saved; the message says how to go on.

    Attributes:
        out: the run folder.
        step: steps done.
    """

    def __init__(self, out: Path, step: int, steps: int) -> None:
        super().__init__(
            f"stopped at step {step} of {steps}, and saved: go on with "
            f"dpbam train --resume --out {out}"
        )
        self.out, self.step = out, step


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run gave.

    Attributes:
        out: the run folder.
        status: "complete", or "budget ended" where replays after a crash used up the last steps.
        plan: the privacy plan.
        steps: steps that reached the parameters.
        charged: steps on the ledger; more than ``steps`` after an unseeded replay.
        epsilon: of everything charged; infinite without privacy.
        delta: its delta.
        evaluations: all of them, in order; the last is of the model handed out.
        seconds: of training in this process.
    """

    out: Path
    status: Literal["complete", "budget ended"]
    plan: PrivacyPlan
    steps: int
    charged: int
    epsilon: float
    delta: float
    evaluations: tuple[EvaluationReport, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """The last evaluation's."""
        return self.evaluations[-1].accuracy
