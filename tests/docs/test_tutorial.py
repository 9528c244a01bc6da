"""The tutorial runs from top to bottom, and its page shows the code that runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT, blocks


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial_tool", ROOT / "tools" / "tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tutorial.py")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout


def test_the_page_shows_the_script() -> None:
    script = (ROOT / "examples" / "tutorial.py").read_text()
    code = [text for kind, text in tool().cells(script) if kind == "code"]
    page = (ROOT / "docs" / "tutorial.md").read_text()
    shown = [block.text for block in blocks(page) if block.language == "python"]
    assert shown == code, "run tools/tutorial.py"
