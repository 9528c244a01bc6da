"""tools/test_files.py: a forked run is as isolated as a process, and what should be red is red."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "test_files.py"
# by name of the file; they run in the order of their names
FILES = {
    "test_a_pollutes.py": """
import builtins, json.tool, os, sys

def test_it():
    os.environ["LEFT"] = "1"
    os.chdir("/")
    sys.path.append("/left")
    builtins.left = json.left = True
""",
    "test_b_is_not_polluted.py": """
import builtins, json, os, sys

def test_it():
    assert "LEFT" not in os.environ and os.getcwd() != "/" and "/left" not in sys.path
    assert not hasattr(builtins, "left") and not hasattr(json, "left")
    assert "json.tool" not in sys.modules
""",
    "test_c_passes_once.py": """
import builtins

def test_it():
    assert not hasattr(builtins, "left")
    builtins.left = True
""",
    "test_d_needs_an_order.py": """
done = []

def test_first():
    done.append(1)

def test_second():
    assert done
""",
    "test_e_needs_a_fresh_interpreter.py": """
import sys

def test_it():
    assert "this" not in sys.modules
""",
    "test_f_crashes.py": """
import os

def test_it():
    os.kill(os.getpid(), 9)
""",
}
Records = dict[str, dict[str, Any]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("test_files")


def run(folder: Path, *options: str) -> tuple[int, Records, str]:
    out = folder / "records.json"
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder, "--out", out, "--preload", "pytest", "this", *options],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p randomly"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.exists(), ended.stderr
    records = {Path(r["file"]).name: r for r in json.loads(out.read_text())}
    return ended.returncode, records, ended.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Records, str]:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return run(folder, "--orders", "4")


def processes(record: dict[str, Any]) -> set[str]:
    return {run["process"] for run in record["runs"]}


def colours(record: dict[str, Any]) -> list[bool]:
    return [run["green"] for run in record["runs"]]


@pytest.mark.slow
def test_a_file_that_pollutes_its_process_does_not_reach_the_next(finished: Any) -> None:
    _, records, _ = finished
    for name in ("test_a_pollutes.py", "test_b_is_not_polluted.py"):
        assert records[name]["green"]
        assert processes(records[name]) == {"fork"}


@pytest.mark.slow
def test_a_file_that_passes_once_per_process_is_red(finished: Any) -> None:
    _, records, _ = finished
    assert colours(records["test_c_passes_once.py"]) == [True, True, True, True, False]


@pytest.mark.slow
def test_a_file_that_needs_its_order_is_red(finished: Any) -> None:
    _, records, _ = finished
    *orders, twice = colours(records["test_d_needs_an_order.py"])
    assert twice
    assert True in orders
    assert False in orders


@pytest.mark.slow
def test_a_file_that_needs_a_fresh_interpreter_gets_one_and_the_record_says_so(
    finished: Any,
) -> None:
    _, records, _ = finished
    record = records["test_e_needs_a_fresh_interpreter.py"]
    assert record["green"]
    assert processes(record) == {"fresh"}
    assert all("1 failed" in run["in_a_fork"][0] for run in record["runs"][:-1])


@pytest.mark.slow
def test_a_crash_is_red_and_what_follows_runs(finished: Any) -> None:
    code, records, printed = finished
    assert colours(records["test_f_crashes.py"]) == [False] * 5
    assert code == 1
    assert len(records) == len(FILES)
    assert "3 of 6 files green" in printed


def test_files_without_a_record_come_first_then_red_changed_and_old_ones(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "git", lambda *arguments: "changed.py\n")
    row = {"commit": "old", "green": True, "date": "2"}
    records = {
        "old.py": {**row, "date": "1"},
        "red.py": {**row, "green": False},
        "changed.py": row,
        "today.py": {**row, "commit": "now"},
    }

    def ordered(*, changed: bool = False, fresh: bool = False) -> list[str]:
        files = ["today.py", "old.py", "changed.py", "red.py", "new.py"]
        return script.order_files(files, records, "now", changed=changed, fresh=fresh)

    assert ordered() == ["new.py", "red.py", "changed.py", "old.py"]
    assert ordered(changed=True) == ["new.py", "red.py", "changed.py"]
    assert ordered(fresh=True)[-2:] == ["old.py", "today.py"]
