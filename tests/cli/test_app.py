"""The tree of commands: help with examples everywhere, no torch where none is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dpbam._version import __version__
from dpbam.cli.app import command


def commands():
    """Every command there is, as a list of words."""
    tree = command().commands
    return [[name] for name in tree] + [
        [name, inner] for name, group in tree.items() for inner in getattr(group, "commands", {})
    ]


SPY = """
import sys
from dpbam.cli import main
code = main(sys.argv[1:])
heavy = {"torch", "sklearn", "matplotlib"} & set(sys.modules)
print("HEAVY", sorted(heavy))
sys.exit(code)
"""


@pytest.mark.parametrize("command", [[], *commands()], ids=" ".join)
def test_every_help_has_examples(command, dpbam):
    ended = dpbam(*command, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert f"$ dpbam {' '.join(command)}".strip() in ended.out


def test_the_commands_that_users_were_promised():
    promised = ["train", "compare", "demo", "evaluate", "predict", "epsilon", "calibrate", "data"]
    assert set(promised) <= {words[0] for words in commands()}
    assert {("data", "list"), ("data", "fetch"), ("data", "check")} <= set(map(tuple, commands()))


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
