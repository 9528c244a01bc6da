from __future__ import annotations

import pytest

from reproduce.__main__ import main
from tests.app.cli.conftest import Ended


@pytest.fixture
def reproduce(capsys, tmp_path):
    """Run ``python -m reproduce`` in this process."""

    def run(*args: object) -> Ended:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        printed = capsys.readouterr()
        hide = str(tmp_path)
        return Ended(code, printed.out.replace(hide, "TMP"), printed.err.replace(hide, "TMP"))

    return run
