"""From a configuration to a finished run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpbam.plan import PrivacyPlan
from dpbam.reporter import Reporter
from dpbam.runs.config import RunConfig
from dpbam.runs.result import RunResult

if TYPE_CHECKING:
    from torch import nn

    from dpbam.data import DataSet


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and built, with nothing written yet: what a dry run shows.

    Attributes:
        config: as given.
        train: the training set.
        test: the test set.
        plan: sigma, q, steps, n and epsilon.
        model: on its device, with its initial weights.
        physical_batch_size: rows computed at once.
    """

    config: RunConfig
    train: DataSet
    test: DataSet
    plan: PrivacyPlan
    model: nn.Module
    physical_batch_size: int

    def summary(self) -> dict[str, object]:
        """The plan in plain values: sigma, steps, q, epsilon, delta, parameters, memory, ..."""
        raise NotImplementedError


def prepare(config: RunConfig) -> Prepared:
    """Load the data, make the plan, build the model; write nothing."""
    raise NotImplementedError


def execute(
    config: RunConfig, out: str | Path, *, resume: bool = False, reporter: Reporter | None = None
) -> RunResult:
    """Train as ``config`` says into the run folder ``out``.

    Args:
        config: what to do. To resume, start from :func:`dpbam.runs.stored_config` and change what
            may change: epochs (with a constant schedule), data_root, num_workers, eval_every and
            checkpoint_every; in an unseeded run device, engine and physical_batch_size too.
        out: must not exist or be empty, unless ``resume``.
        resume: go on with the run in ``out``; a finished one is finished again, at no cost.
        reporter: hears of the progress.

    Raises:
        RunError: if the folder, its lock, a checkpoint or the budget stands in the way.
        ConfigError: if the configuration cannot be used.
        dpbam.data.DataError: if the data cannot.
        Interrupted: after Ctrl-C or SIGTERM, when a checkpoint is saved.
    """
    raise NotImplementedError
