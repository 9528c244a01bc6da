from __future__ import annotations

import pytest

from reproduce.__main__ import main
from tests.app.cli.conftest import runner


@pytest.fixture
def reproduce(capsys, tmp_path):
    """Run ``python -m reproduce`` in this process."""
    return runner(main, capsys, tmp_path)
