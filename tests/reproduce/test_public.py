"""The experiments use dpbam as any user would: documented modules, and no private names."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.docs_site import reference

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "reproduce").glob("*.py"))
REFERENCE = "".join(reference.pages().values())
DOCUMENTED = {"dpbam", *re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)}


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of everything that is imported from dpbam."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dpbam":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] == "dpbam")


def private(source: str) -> list[tuple[str, str]]:
    """What is imported and not public: a module without a page, a name that its module hides."""
    return [
        (module, name)
        for module, name in imported(source)
        if module not in DOCUMENTED or not is_public(module, name)
    ]


def is_public(module: str, name: str) -> bool:
    names = getattr(importlib.import_module(module), "__all__", None)
    return name in names if names is not None else not name.startswith("_")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_public_names_are_imported(path: Path) -> None:
    assert private(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from dpbam import _validate",
        "import dpbam._validate",
        "from dpbam.app.cli.boundary import guarded",
        "def f():\n    from dpbam.app.runs.files import _anything",
        "from dpbam.app.runs import build",
    ],
)
def test_a_private_import_is_noticed(source: str) -> None:
    """Negative control."""
    assert len(private(source)) == 1
