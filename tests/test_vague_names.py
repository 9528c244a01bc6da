"""Packages that have no vague name get none again; ``pyproject.toml`` lists them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "names.py"


@cache
def names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("names_of_tools", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def sources() -> list[tuple[str, str]]:
    return list(names().read_sources())


def vague(text: str) -> list[str]:
    bound = names().bound_names(ast.parse(text))
    return [name for name, _ in bound if name.strip("_") in names().VAGUE]


@pytest.mark.parametrize("package", names().clean_packages())
def test_a_clean_package_has_no_vague_name(package: str) -> None:
    texts = {path: text for path, text in sources() if names().package_of(path) == package}
    assert texts, f"there is no package {package}: correct [tool.dpbam] clean in pyproject.toml"
    assert {path: vague(text) for path, text in texts.items() if vague(text)} == {}


@pytest.mark.parametrize(
    "line",
    [
        "found = 1",
        "for own in []: ...",
        "def f(given): ...",
        "self._kept = 2",
        "[x for part in []]",
    ],
)
def test_a_vague_name_is_seen_where_it_is_bound(line: str) -> None:
    assert len(vague(line)) == 1


def test_a_name_that_says_more_is_not_vague_nor_is_a_call() -> None:
    assert vague("found_rows = owner = own()\npath.parts") == []
