"""A run's three forms: its specification, its result, and the record that is kept of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpbam.errors import DPBAMError

if TYPE_CHECKING:
    from dpbam.app.runs.config import RunConfig
    from dpbam.privacy.plan import PrivacyPlan
    from dpbam.training.events import Evaluation


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


@dataclass(frozen=True)
class RunSpec:
    """A run to be done.

    Attributes:
        arm: what is compared: a method, or an arm of a recipe.
        config: the configuration.
        out: the run folder.
        cell: the place in a recipe's grid, such as {"epsilon": 2}.
    """

    arm: str
    config: RunConfig
    out: Path
    cell: Mapping[str, Any] = field(default_factory=dict)

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
        >>> label("bam", {"epsilon": 2.0})
        'bam-epsilon-2'
    """
    return "-".join([arm, *(f"{key}-{value:g}" for key, value in cell.items())])


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run returned, in memory.

    Attributes:
        spec: what was asked for.
        status: "complete", or "budget ended" where replays after a crash used up the last steps.
        plan: the privacy plan.
        steps: steps that reached the parameters.
        charged: steps on the ledger; more than ``steps`` after an unseeded replay.
        epsilon: of everything charged; infinite without privacy.
        delta: its delta.
        evaluations: all of them, in order; the last is of the model handed out.
        seconds: of training in this process.
        pairing: digests of what runs of one seed must share, :meth:`RunFolder.pairing`.
    """

    spec: RunSpec
    status: Literal["complete", "budget ended"]
    plan: PrivacyPlan
    steps: int
    charged: int
    epsilon: float
    delta: float
    evaluations: tuple[Evaluation, ...]
    seconds: float
    pairing: Mapping[str, str]

    @property
    def arm(self) -> str:
        """The specification's."""
        return self.spec.arm

    @property
    def seed(self) -> int | None:
        """The specification's."""
        return self.spec.seed

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.spec.out

    @property
    def accuracy(self) -> float:
        """The last evaluation's."""
        return self.evaluations[-1].accuracy


@dataclass(frozen=True)
class RunRecord:
    """What is kept of a finished run, as plain values: one JSON file, for tables and figures.

    Attributes:
        arm: what is compared.
        cell: the place in a recipe's grid.
        seed: runs of one seed are paired.
        config: every field of :class:`~dpbam.app.runs.RunConfig`.
        plan: the privacy plan.
        epsilon: what was spent.
        accuracy: on the test set.
        accuracy_curve: (step, accuracy) over training.
        seconds: of training.
        pairing: digests of what runs of one seed must share, :meth:`RunFolder.pairing`.
        machine: processor, threads, versions, commit.
        note: how it differs from what the recipe asks for now; mostly empty.
        non_private_bias: measured steps, as in ``non-private/bias.jsonl``.
        non_private_flatness: of the trained model; None if not measured.
    """

    arm: str
    cell: Mapping[str, Any]
    seed: int
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    epsilon: float
    accuracy: float
    accuracy_curve: Sequence[Sequence[float]]
    seconds: float
    pairing: Mapping[str, str]
    machine: Mapping[str, Any]
    note: str = ""
    non_private_bias: Sequence[Mapping[str, Any]] = ()
    non_private_flatness: Mapping[str, Any] | None = None
