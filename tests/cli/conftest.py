from __future__ import annotations

from typing import NamedTuple

import pytest

from dpbam.cli import main


class Ended(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def dpbam(capsys):
    """Run ``dpbam`` in this process."""

    def run(*args: object) -> Ended:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run
