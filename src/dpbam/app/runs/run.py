"""The three types of a run (specification, result, record), its errors, and its interruption."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from dpbam.errors import DPBAMError

if TYPE_CHECKING:
    from dpbam.app.runs.config import RunConfig
    from dpbam.privacy.accounting import Charge
    from dpbam.privacy.plan import PrivacyPlan
    from dpbam.training.events import EvaluationReport


class RunError(DPBAMError, ValueError):
    """A run that cannot be started or resumed: one sentence with the way out."""


class RunInterruptedError(Exception):
    """Stopped by Ctrl-C or SIGTERM, with a checkpoint saved; the message has the resume command.

    Attributes:
        out: the run folder.
        step: steps done.
    """

    def __init__(self, out: Path, step: int, steps: int) -> None:
        super().__init__(
            f"stopped at step {step} of {steps}, and saved: resume with "
            f"dpbam train --resume --out {out}"
        )
        self.out, self.step = out, step


@contextmanager
def graceful(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C or SIGTERM makes the yielded function true; a second one acts as usual.

    Example:
        >>> with graceful(print) as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop()
        stopping after this step, with a checkpoint; a second signal stops at once
        True
    """
    asked = False
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()
        say("stopping after this step, with a checkpoint; a second signal stops at once")

    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        restore()


@dataclass(frozen=True)
class RunSpec:
    """A run to be done."""

    arm: str  # what is compared: a method, or an arm of a recipe
    config: RunConfig
    out: Path  # the run folder
    cell: Mapping[str, Any] = field(default_factory=dict)  # place in a grid, as {"epsilon": 2}

    @property
    def seed(self) -> int | None:
        """Runs of one seed are paired."""
        return self.config.seed

    @property
    def name(self) -> str:
        """Arm, place in the grid and seed, such as ``bam-epsilon-2-seed-0``."""
        return f"{label(self.arm, self.cell)}-seed-{self.seed}"


def label(arm: str, cell: Mapping[str, Any]) -> str:
    """Join the arm and the place in the grid.

    Example:
        >>> label("bam", {"epsilon": 2.0}), label("bam", {"at": "width-12"})
        ('bam-epsilon-2', 'bam-at-width-12')
    """
    return "-".join([arm, *places(cell)])


def places(cell: Mapping[str, Any]) -> list[str]:
    """Name the place in each dimension of the grid.

    Example:
        >>> places({"epsilon": 2.0, "at": "width-12"})
        ['epsilon-2', 'at-width-12']
    """
    return [f"{key}-{v if isinstance(v, str) else f'{v:g}'}" for key, v in cell.items()]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run returned, in memory."""

    spec: RunSpec
    status: Literal["complete", "budget ended"]  # ended: replays after a crash used up the rest
    plan: PrivacyPlan
    steps: int  # that reached the parameters
    charged: int  # steps on the ledger; more than ``steps`` after an unseeded replay
    epsilon: float  # of everything charged; infinite without privacy
    delta: float
    evaluations: tuple[EvaluationReport, ...]  # in order; the last is of the model handed out
    seconds: float  # of training in this process
    pairing: Mapping[str, str]  # digests of what runs of one seed share: RunFolder.pairing

    @property
    def arm(self) -> str:
        return self.spec.arm

    @property
    def seed(self) -> int | None:
        return self.spec.seed

    @property
    def out(self) -> Path:
        return self.spec.out

    @property
    def charges(self) -> list[Charge]:
        """What was charged, replays included."""
        return self.plan.charges(self.steps, self.charged - self.steps)

    @property
    def ending(self) -> str:
        """How it ended, and why not at the planned step."""
        if self.status == "complete":
            return f"complete: {self.steps} steps"
        return (
            f"the privacy budget ended at step {self.steps} of {self.plan.steps}: "
            f"{self.charged - self.steps} steps were lost in crashes and are paid for; the model "
            "is that of the last step"
        )

    @property
    def score(self) -> float:
        """The task's main metric on the test set, such as the accuracy: more is better."""
        return self.evaluations[-1].score

    @property
    def metric(self) -> str:
        """The name of the main metric."""
        return self.evaluations[-1].metric


@dataclass(frozen=True)
class RunRecord:
    """What is kept of a finished run, as plain values: one JSON file, for tables and figures."""

    arm: str
    cell: Mapping[str, Any]
    seed: int
    config: Mapping[str, Any]  # every field of RunConfig
    plan: Mapping[str, Any]
    epsilon: float  # spent
    accuracy: float  # on the test set
    accuracy_curve: Sequence[Sequence[float]]  # (step, accuracy) over training
    seconds: float  # of training
    pairing: Mapping[str, str]
    machine: Mapping[str, Any]  # processor, threads, versions, commit
    last_accuracy: float | None = None  # of the last weights, where their average is handed out
    group_accuracy: Mapping[str, Mapping[str, float]] | None = None  # "averaged", "last" -> group
    note: str = ""  # how it differs from what the recipe asks for now
    non_private_bias: Sequence[Mapping[str, Any]] = ()  # as in non-private/bias.jsonl
    non_private_flatness: Mapping[str, Any] | None = None  # of the trained model, if measured
