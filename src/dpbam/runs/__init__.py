"""Runs: configuration, run folder, checkpoints, privacy statement, a data set's budget.

Importing this package imports no torch.
"""

from __future__ import annotations

from dpbam.runs.budget import Budget
from dpbam.runs.config import ConfigError, RunConfig, default_delta, read_file
from dpbam.runs.execution import execute
from dpbam.runs.folder import stored_config
from dpbam.runs.model_file import RunModel, load_run_model
from dpbam.runs.preparation import Prepared, prepare
from dpbam.runs.result import Interrupted, RunError, RunResult
from dpbam.runs.settling import release_reservation

__all__ = [
    "Budget",
    "ConfigError",
    "Interrupted",
    "Prepared",
    "RunConfig",
    "RunError",
    "RunModel",
    "RunResult",
    "default_delta",
    "execute",
    "load_run_model",
    "prepare",
    "read_file",
    "release_reservation",
    "stored_config",
]
