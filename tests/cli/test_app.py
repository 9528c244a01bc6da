"""The tree of commands: help with examples everywhere, no torch where none is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dpbam._version import __version__

COMMANDS = [
    ["train"], ["compare"], ["demo"], ["evaluate"], ["predict"], ["epsilon"], ["calibrate"],
    ["data"], ["data", "list"], ["data", "fetch"], ["data", "check"],
]  # fmt: skip
SPY = """
import sys
from dpbam.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "sklearn", "matplotlib"} & set(sys.modules)
print("HEAVY", sorted(heavy))
sys.exit(code)
"""


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_every_help_has_examples(command, dpbam):
    ended = dpbam(*command, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert f"$ dpbam {' '.join(command)}".strip() in ended.out


def test_every_command_is_listed_here(dpbam):
    from dpbam.cli.app import command

    tree = command()
    found = [[name] for name in tree.commands]
    found += [["data", name] for name in tree.commands["data"].commands]
    assert sorted(found) == sorted(COMMANDS)


def test_version(dpbam):
    assert dpbam("--version") == (0, f"dpbam {__version__}\n", "")


def test_no_command_shows_the_help(dpbam):
    ended = dpbam()
    assert ended.code == 2
    assert "Usage: dpbam" in ended.out + ended.err


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["train", "--help"],
        ["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.1", "--steps", "5",
         "--delta", "1e-5", "--accountant", "rdp"],
        ["calibrate", "--epsilon", "8", "--sampling-rate", "0.1", "--steps", "5",
         "--delta", "1e-5", "--accountant", "rdp"],
        ["data", "list"],
    ],
    ids=lambda args: " ".join(args[:2]),
)  # fmt: skip
def test_loads_no_torch(args):
    done = subprocess.run(
        [sys.executable, "-c", SPY, *args], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_the_spy_sees_torch_where_it_is():
    """Negative control: the same spy on a command that needs torch."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + SPY, "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "torch" in done.stdout.splitlines()[-1]


def test_python_m_dpbam():
    done = subprocess.run(
        [sys.executable, "-m", "dpbam", "trian"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: No such command 'trian'. Did you mean 'train'?\n"
