"""What a release promises: version, changelog, extras, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dpbam import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STATED = [
    *PROJECT["dependencies"],
    *(d for extra in PROJECT["optional-dependencies"].values() for d in extra),
]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SEMVER = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")


def versions(changelog: str) -> dict[str, str]:
    """The text under each version's heading."""
    parts = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def without_privacy_heading(changelog: str) -> list[str]:
    return [
        version
        for version, text in versions(changelog).items()
        if not re.search(r"^### Privacy-relevant changes\n\S", text, re.MULTILINE)
    ]


def test_every_version_says_what_touches_privacy() -> None:
    assert versions(CHANGELOG)
    assert not without_privacy_heading(CHANGELOG)
    assert without_privacy_heading("## [1.0.0]\n### Added\n- much\n") == ["1.0.0"]


def test_versions_are_semantic() -> None:
    assert SEMVER.fullmatch(__version__)
    assert all(SEMVER.fullmatch(v) for v in versions(CHANGELOG) if v != "Unreleased")


def test_every_dependency_that_moves_fast_has_an_upper_bound() -> None:
    """torch's internals, and the libraries that we enter from."""
    extras = PROJECT["optional-dependencies"]
    moving = [
        *(d for d in PROJECT["dependencies"] if d.startswith(("torch", "dp-accounting"))),
        *(d for extra in ("opacus", "lightning", "docs") for d in extras[extra]),
    ]
    assert all("<" in dependency for dependency in moving)


def test_the_oldest_versions_that_are_checked_are_the_ranges_own() -> None:
    text = (ROOT / "tools" / "check_versions.py").read_text()
    oldest = dict(re.findall(r'"(\w+)": "([\d.]+)\.\*"', text))
    ranges = dict(m.groups() for d in STATED if (m := re.match(r"(\w+)>=([\d.]+),<", d)))
    assert oldest == {name: ranges[name] for name in oldest}
    assert set(oldest) == {"torch", "transformers", "lightning", "opacus"}


def test_the_constraints_are_within_the_ranges_and_name_no_index() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    unpinned = ("dpbam", "jax", "tensorboard", "build", "twine")  # not in the development extra
    wanted = [Requirement(d) for d in STATED if not d.startswith(unpinned)]
    outside = [r for r in wanted if not r.specifier.contains(pins.get(r.name.lower(), "0"))]
    assert not outside
    assert not any("+" in version or "://" in version for version in pins.values())


#: An environment without any extra: each statement's error, as JSON.
WITHOUT_EXTRAS = """
import contextlib, io, json, sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else found(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)  # dill calls it on an instance
said = {{}}
for extra, statement in {statements!r}.items():
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(statement)
        except (ImportError, ValueError) as error:
            errors.write(str(error))
    said[extra] = errors.getvalue()
print(json.dumps(said))
"""
BLOCKED = {
    "datasets", "cryptography", "tensorboard", "opacus", "lightning", "transformers", "peft",
    "accelerate",
}  # fmt: skip
COMMAND = "from dpbam.app.cli import main; assert main({!r}.split()) == 2"
STATEMENTS = {
    "hf": COMMAND.format("train --epsilon 3 --epochs 1 --data hf:mnist"),
    "secure": COMMAND.format("train --data digits --epsilon 3 --noise secure --out a"),
    "tensorboard": COMMAND.format("train --data digits --epsilon 3 --tensorboard --out b"),
    "opacus": "import dpbam.interop.opacus",
    "lightning": "import dpbam.interop.lightning",
    "transformers": "import dpbam.interop.huggingface",
}


@pytest.mark.slow  # a process that imports everything
def test_what_needs_an_extra_names_it(tmp_path: Path) -> None:
    code = WITHOUT_EXTRAS.format(blocked=BLOCKED, statements=STATEMENTS)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(STATEMENTS) <= set(PROJECT["optional-dependencies"])
    assert not {e: text for e, text in said.items() if f"dpbam[{e}]" not in text}


def completed(words: str) -> list[str]:
    """What the shell would be offered for the last word."""
    asked = {"_DPBAM_COMPLETE": "complete_bash", "COMP_WORDS": words}
    done = subprocess.run(
        [sys.executable, "-m", "dpbam"], capture_output=True, text=True, check=False,
        env={**os.environ, **asked, "COMP_CWORD": str(len(words.split()) - 1)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_the_shell_completes_commands_and_flags() -> None:
    assert completed("dpbam tr") == ["train"]
    assert completed("dpbam train --noise-m") == ["--noise-multiplier"]


def test_completion_can_be_shown_for_bash() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m dpbam --show-completion; exit $?"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "complete -o default -F _dpbam_completion dpbam" in done.stdout
