from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's own cache."""
    folder = tmp_path_factory.mktemp("data-root")
    monkeypatch.setenv("DPBAM_DATA", str(folder))
    return folder
