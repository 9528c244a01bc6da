"""Names that users give: suggestions, and functions by their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dpbam._names import did_you_mean, load_function
from dpbam.errors import ArgumentError


def test_the_nearest_choice_is_suggested_and_otherwise_all_are_listed() -> None:
    assert did_you_mean("digit", ["digits", "cifar10"]) == "did you mean 'digits'?"
    assert did_you_mean("xyz", ["digits", "cifar10"]) == "choose from digits, cifar10"
    assert did_you_mean(3, ["digits"], "give a path") == "give a path"


def test_a_function_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_names.py").write_text("def make():\n    return 7\n\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_function("mine_of_names:make")() == 7
    assert sys.path == before
    with pytest.raises(ArgumentError, match="has no function 'mkae': did you mean 'make'"):
        load_function("mine_of_names:mkae")
    with pytest.raises(ArgumentError, match="is a int, not a function"):
        load_function("mine_of_names:number")


def test_an_installed_module_is_preferred_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fractions.py").write_text("raise SystemExit('a file of the current folder ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fractions")
    assert load_function("fractions:Fraction").__module__ == "fractions"


@pytest.mark.parametrize("name", ["", "module", ":function", "module:"])
def test_a_name_without_module_or_function_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="must read 'module:function'"):
        load_function(name)


def test_a_missing_module_is_named_and_a_broken_one_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_of_names.py").write_text("import not_installed_at_all\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="there is no module 'absent_of_names' to import"):
        load_function("absent_of_names:make")
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        load_function("broken_of_names:make")
