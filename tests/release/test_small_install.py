"""``pip install dpbam`` is the library: five packages, and it needs no other."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dpbam.__main__ import APP_PACKAGES
from dpbam.data import DataError
from dpbam.data.base import require

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALONE = Path(__file__).with_name("library_alone.py")
#: Modules are imported under other names than packages are installed.
MODULES = {
    "markdown-it-py": "markdown_it",
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "vl-convert-python": "vl_convert",
}

#: A process in which some packages are not installed, running a file or the command line.
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
{then}
"""


def run_without(blocked: tuple[str, ...], then: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(blocked=blocked, then=then)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )


def package(requirement: str) -> str:
    return requirement.partition(">")[0].partition("[")[0]


def test_the_library_has_five_dependencies() -> None:
    names = sorted(map(package, PROJECT["dependencies"]))
    assert names == ["dp-accounting", "numpy", "safetensors", "scipy", "torch"]


def test_what_the_command_line_looks_for_is_what_the_extra_brings() -> None:
    names = map(package, PROJECT["optional-dependencies"]["app"])
    assert sorted(MODULES.get(name, name.replace("-", "_")) for name in names) == sorted(
        APP_PACKAGES
    )


def test_the_library_imports_and_trains_without_the_app() -> None:
    done = run_without(APP_PACKAGES, f"runpy.run_path({str(ALONE)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr


def test_a_library_that_needs_another_package_would_be_noticed() -> None:
    """The control of the test above."""
    blocked = (*APP_PACKAGES, "numpy")
    done = run_without(blocked, f"runpy.run_path({str(ALONE)!r}, run_name='__main__')")
    assert "No module named 'numpy'" in done.stderr


def test_the_command_line_says_in_one_sentence_what_it_needs() -> None:
    then = "sys.argv = ['dpbam', 'train']; from dpbam.__main__ import main; sys.exit(main())"
    done = run_without(("pydantic", "PIL"), then)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "the command line needs packages that are not installed (pydantic, PIL): "
        "pip install 'dpbam[app]'"
    ]


def test_a_data_source_says_what_it_needs() -> None:
    with pytest.raises(DataError, match=r"reading .* needs more packages: pip install 'dpbam\[app"):
        require("no_such_package.at_all", "reading image files")
