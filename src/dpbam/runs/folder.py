"""The run folder: what lives where, and the lock that keeps a second run out."""

from __future__ import annotations

from pathlib import Path

from dpbam.runs.config import RunConfig


def stored_config(out: str | Path) -> RunConfig:
    """The configuration of the run in ``out``, to resume it from."""
    raise NotImplementedError
