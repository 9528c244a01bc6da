"""One small training, imported by the fork server: its children inherit what a first run computes.

A first run costs a second more than the next, most of it the accountant's, which keeps what it has
computed. One thread, and no thread left at the end: a process with others cannot be forked.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from dpbam.app.runs import RunConfig, execute
from tests.end_to_end.kill_driver import SEEDED
from tests.forked import WARM


def train() -> None:
    """Train as most tests with processes do."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        execute(RunConfig(**{**SEEDED, "num_workers": 0}), Path(folder) / "run")


if os.environ.pop(WARM, None):
    train()
