"""Every command on every page is run, or at least checked (the rule is in ``pages.py``)."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dpbam.app.cli import main
from dpbam.app.cli.app import command
from tests.docs.pages import PAGES, ROOT, Block, blocks

LANGUAGES = {"python", "bash", "text", "toml", "json", "csv", "yaml"}
SHORTENED = {"train", "compare"}
SLOW = {"docs/bench.md", "docs/cookbook.md", "docs/from-opacus.md"}
LAUNCHERS = {"torchrun", "python", "jupyter"}


def check(words: list[str]) -> None:
    """That a command which is not run could be: everything it names is there."""
    program, *rest = words
    if program == "dpbam":
        check_dpbam(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), f"no such make target: {rest}"
    elif program in {"pip", "uv"} or rest[:2] == ["-m", "pip"]:
        check_extras(words)
    elif program in LAUNCHERS or program.endswith("/python"):
        check_python(rest)
    else:
        known = {"git", "cd", "tensorboard", "openssl"}
        assert program in known, f"the tests do not know {program}"


def check_dpbam(words: list[str]) -> None:
    found, name = command(), "dpbam"
    while words and getattr(found, "commands", None) and not words[0].startswith("-"):
        assert words[0] in found.commands, f"no such command: dpbam {words[0]}"
        name, found, words = words[0], found.commands[words[0]], words[1:]
    if not getattr(found, "commands", None):
        with found.make_context(name, list(words), resilient_parsing=False):
            pass  # a wrong flag or value raises


def check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra.strip()
        for listed in re.findall(r"\[([\w, -]+)\]", " ".join(words))
        for extra in listed.split(",")
    }
    assert named <= set(project["optional-dependencies"]), f"no such extra: {named}"


def runs_as_main(module: str) -> bool:
    """Whether ``python -m module`` does something."""
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        return importlib.util.find_spec(f"{module}.__main__") is not None
    return bool(
        found and found.origin and '__name__ == "__main__"' in Path(found.origin).read_text()
    )


def check_python(words: list[str]) -> None:
    if "-m" in words:
        module = words[words.index("-m") + 1]
        assert module == "venv" or runs_as_main(module), f"no such program: {module}"
        return
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts or "-c" in words, f"what is run? {words}"
    assert all((ROOT / script).exists() for script in scripts), f"no such file: {scripts}"


def run(words: list[str], folder: Path) -> None:
    """Run one command in the folder; it has to succeed."""
    line = shlex.join(words)
    if words[0] == "dpbam":
        assert main(words[1:]) == 0, f"failed: {line}"
        return
    if words[0] == "python":
        words = [sys.executable, *words[1:]]
    done = subprocess.run(
        shlex.join(words), shell=True, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, f"failed: {line}\n{done.stderr}"


def perform(block: Block, folder: Path) -> None:
    """One block of a page's session."""
    if block.title:
        (folder / block.title).write_text(block.text + "\n")
    elif block.language == "bash":
        for words in block.commands():
            if block.long:
                check(words)
            else:
                shortened = words[0] == "dpbam" and words[1] in SHORTENED
                run([*words, *block.added] if shortened else words, folder)


def has_session(page: str) -> bool:
    found = list(blocks((ROOT / page).read_text()))
    return any(block.title or block.language == "bash" for block in found)


def session(page: str) -> object:
    """The page, marked where its commands take a minute."""
    return pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())


@pytest.mark.parametrize("page", [session(page) for page in PAGES if has_session(page)])
def test_the_commands_of_a_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dpbam.app.audit.accountant._POINTS", 2**15)  # a wider bracket, sooner
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # module:function of a file that the page has shown
    for block in blocks((ROOT / page).read_text()):
        if block.title:  # another page may have a module of the same name
            sys.modules.pop(Path(block.title).stem, None)
        try:
            perform(block, tmp_path)
        except Exception as error:
            said = capsys.readouterr()
            raise AssertionError(f"{page}:{block.line}: {error}\n{said.out}{said.err}") from error


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks((ROOT / page).read_text()):
        where = f"{page}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: language {block.language!r}"
        if block.language == "python" and not block.title:
            first = next(iter(block.text.splitlines()), "")
            assert first.startswith(">>> "), f"{where}: python that no test runs"


WRONG = {
    "an unknown flag": "dpbam train --data digits --epsilonn 3",
    "an unknown command": "dpbam trian",
    "an unknown target": "make coffee",
    "an unknown extra": "pip install 'dpbam[coffee]'",
    "an unknown module": "python -m dpbam.coffee",
    "a module that is no program": "python -m reproduce.laptop --epsilon 1",
    "an unknown script": "python tools/coffee.py",
    "an unknown program": "coffee --hot",
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_the_check_catches(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|do not know"):
        check(shlex.split(line))


def test_a_failing_command_fails_its_page(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="failed: dpbam"):
        perform(Block("bash", "dpbam epsilon --noise-multiplier -1", 1), tmp_path)
    with pytest.raises(AssertionError, match="failed: false"):
        perform(Block("bash", "false", 1), tmp_path)
