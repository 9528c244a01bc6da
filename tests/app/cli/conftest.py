from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dpbam.app.cli import main


class Ended(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def runner(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Ended]:
    """Return a function that runs a command in this process.

    The temporary folder's path holds the test's name, in which a word that a message should say
    may be found by chance: it is taken out of what was printed.
    """

    def run(*args: object) -> Ended:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        printed = capsys.readouterr()
        hide = str(tmp_path)
        return Ended(code, printed.out.replace(hide, "TMP"), printed.err.replace(hide, "TMP"))

    return run


@pytest.fixture
def dpbam(capsys, tmp_path):
    """Run ``dpbam`` in this process."""
    return runner(main, capsys, tmp_path)
