"""The site, built once for all tests that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.docs.pages import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; test processes that run side by side share one."""
    pytest.importorskip("mkdocs", reason="mkdocs is in the docs extra")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with FileLock(shared / "site.lock"):
        out = shared / "site"
        if not (shared / "site.log").exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
                cwd=ROOT, capture_output=True, text=True, check=False,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            (shared / "site.log").write_text(done.stdout + done.stderr)
    return out
