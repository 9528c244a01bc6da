"""GitHub's workflows: valid by their schema, and they run the same scripts as everyone does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is in the dev extra")
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    return subprocess.run(
        [*words, "vendor.github-workflows", *map(str, paths)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_they_are_valid() -> None:
    done = check(*WORKFLOWS)
    assert len(WORKFLOWS) >= 3
    assert done.returncode == 0, done.stdout


def test_the_schema_refuses_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    wrong.write_text(text.replace("runs-on:", "runs-at:"))
    assert check(wrong).returncode != 0


def commands(path: Path) -> list[str]:
    return re.findall(r"^\s*- run: (.+)$", path.read_text(), re.MULTILINE)


def test_they_run_our_own_scripts() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        for command in commands(path):
            program, *rest = command.split()
            if program == "make":
                assert set(rest) <= targets, f"{path.name}: {command}"
            elif not command.startswith(".venv/bin/python -m build"):
                assert (ROOT / program).is_file(), f"{path.name}: {command}"
    assert ".ci/run" in commands(ROOT / ".github" / "workflows" / "test.yml")


def test_the_hooks_before_a_commit_run_the_tools_of_make_lint() -> None:
    hooks = re.findall(r"^\s+entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    recipe = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    steps = [line.strip() for line in recipe.splitlines()[1:]]
    assert hooks == [step.replace("$(BIN)", ".venv/bin") for step in steps]


def test_dependabots_settings_are_valid() -> None:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.dependabot"]
    done = subprocess.run(
        [*words, str(ROOT / ".github" / "dependabot.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
