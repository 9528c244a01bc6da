"""Runs: configuration, run folder, checkpoints, privacy statement, a data set's budget.

Importing this package imports no torch.
"""

from __future__ import annotations

from dpbam.app.runs.budget import Budget
from dpbam.app.runs.config import ConfigError, RunConfig, read_file
from dpbam.app.runs.execution import execute
from dpbam.app.runs.folder import RunFolder, stored_config
from dpbam.app.runs.model_file import RunModel, load_run_model
from dpbam.app.runs.preparation import Prepared, prepare
from dpbam.app.runs.run import (
    RunError,
    RunInterruptedError,
    RunRecord,
    RunResult,
    RunSpec,
    places,
)
from dpbam.app.runs.spending import release_reservation

__all__ = [
    "Budget",
    "ConfigError",
    "Prepared",
    "RunConfig",
    "RunError",
    "RunFolder",
    "RunInterruptedError",
    "RunModel",
    "RunRecord",
    "RunResult",
    "RunSpec",
    "execute",
    "load_run_model",
    "places",
    "prepare",
    "read_file",
    "release_reservation",
    "stored_config",
]
