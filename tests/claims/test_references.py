"""Every test that the proof in docs/privacy.md points to is there, and is one that runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "privacy.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("assumption of the proof")[2]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \|$", TABLE, re.MULTILINE)
ROWS = [row for row in ROWS if set(row[0]) != {"-"}]


def functions() -> dict[str, set[str]]:
    """The names of all functions in the tests, and of all names that the tests mention."""
    defined, mentioned = set(), set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                mentioned.add(node.id)
    return {"defined": defined, "mentioned": mentioned}


def lost(cell: str, known: dict[str, set[str]]) -> list[str]:
    """What a row names and the tests do not have: a file, a test, or a check that nothing uses."""
    names = re.findall(r"`([^`]+)`", cell)
    missing = [n for n in names if n.startswith(("tests/", "test_")) and not _there(n, known)]
    checks = [n for n in names if n.startswith("check_")]
    used = known["defined"] & known["mentioned"]
    return missing + [n for n in checks if n not in used]


def _there(name: str, known: dict[str, set[str]]) -> bool:
    if name.startswith("tests/"):
        return (TESTS.parent / name).exists()
    if name.endswith(".py"):
        return any(TESTS.rglob(name))
    return name in known["defined"]


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return functions()


def test_every_assumption_points_to_tests_that_exist(known: dict[str, set[str]]) -> None:
    assert len(ROWS) > 15
    assert {row[0]: lost(row[1], known) for row in ROWS if lost(row[1], known)} == {}
    assert [row[0] for row in ROWS if "`" not in row[1]] == []


def test_a_reference_to_nothing_is_found_out(known: dict[str, set[str]]) -> None:
    gone = "`check_that_was_renamed`, `test_nothing.py`, `tests/nowhere`, `test_of_nothing`"
    assert len(lost(gone, known)) == 4
