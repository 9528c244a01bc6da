"""Extras are optional in truth: without the package, the import error names the extra."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MODULES = {
    "opacus": ("opacus", "opacus"),
    "lightning": ("lightning", "lightning"),
    "huggingface": ("transformers", "transformers"),
}


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_package_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = MODULES[module]
    home = f"dpbam.interop.{module}"
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, home, raising=False)
    with pytest.raises(ImportError, match=rf"{home} needs .*pip install 'dpbam\[{extra}\]'"):
        importlib.import_module(home)


def test_accelerate_is_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "dpbam.interop.huggingface", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'dpbam\[transformers\]'"):
        importlib.import_module("dpbam.interop.huggingface")


def test_the_package_of_interops_asks_for_nothing() -> None:
    code = (
        "import sys, dpbam.interop; "
        "print({'torch', 'opacus', 'lightning', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_what_is_installed_is_within_the_ranges() -> None:
    """So that the suite's result speaks of the ranges that are promised."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("opacus", "lightning", "transformers"):
        for line in project["optional-dependencies"][extra]:
            wanted = Requirement(line)
            assert version(wanted.name) in wanted.specifier, line
