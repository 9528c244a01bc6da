"""The tree of commands: help with examples everywhere, no torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dpbam._version import __version__
from dpbam.app.cli import demo, main
from dpbam.app.cli.app import command
from dpbam.catalogue import CLIPPINGS, COMMANDS, FILTERS, METHODS


def commands():
    """Every command there is, as a list of words."""
    tree = command().commands
    return [[name] for name in tree] + [
        [name, inner] for name, group in tree.items() for inner in getattr(group, "commands", {})
    ]


SPY = """
import sys
from dpbam.app.cli import main
code = main(sys.argv[1:])
print("LOADED", *sys.modules)
sys.exit(code)
"""
HEAVY = {"torch", "sklearn", "vl_convert"}


def loaded(*args, before=""):
    """The modules that a command has imported by its end."""
    done = subprocess.run(
        [sys.executable, "-c", before + SPY, *args], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", [[], *commands()], ids=" ".join)
def test_every_help_has_examples(command, dpbam):
    ended = dpbam(*command, "--help")
    assert ended.code == 0
    assert "Example" in ended.out
    assert f"$ dpbam {' '.join(command)}".strip() in ended.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_sentence_of_each_help(name):
    first = command().commands[name].help.split("\n\n")[0]
    assert COMMANDS[name].summary == first


def test_the_commands_that_users_were_promised():
    promised = ["train", "compare", "demo", "evaluate", "predict", "epsilon", "calibrate", "data"]
    assert set(promised) <= {words[0] for words in commands()}
    assert {("data", "list"), ("data", "fetch"), ("data", "check")} <= set(map(tuple, commands()))


def test_version(dpbam):
    assert dpbam("--version") == (0, f"dpbam {__version__}\n", "")


def test_no_command_shows_the_help(dpbam):
    ended = dpbam()
    assert ended.code == 2
    assert ended.out.startswith("Usage: dpbam")
    assert ended.err == ""


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_command_and_no_library(flag):
    """Both take about the time of ``import typer``."""
    modules = loaded(flag)
    assert not {"numpy", "pydantic", "typer.rich_utils", "dpbam.app.cli.train"} & modules
    assert not HEAVY & modules


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--help"],
        ["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.1", "--steps", "5",
         "--delta", "1e-5", "--accountant", "rdp"],
        pytest.param(
            ["calibrate", "--epsilon", "8", "--sampling-rate", "0.1", "--steps", "5",
             "--delta", "1e-5", "--accountant", "rdp"],
            marks=pytest.mark.slow,
        ),
        ["data", "list"],
    ],
    ids=lambda args: " ".join(args[:2]),
)  # fmt: skip
def test_loads_no_torch(args):
    assert not HEAVY & loaded(*args)


def test_the_spy_sees_what_is_imported():
    """Negative control: the same spy where a heavy library and a command's module are imported."""
    modules = loaded("--version", before="import dpbam.app.cli.train, vl_convert\n")
    assert {"vl_convert", "numpy", "dpbam.app.cli.train"} <= modules
    assert HEAVY & modules


def test_python_m_dpbam():
    done = subprocess.run(
        [sys.executable, "-m", "dpbam", "trian"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: No such command 'trian'. Did you mean 'train'?\n"


def test_every_part_of_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for flag, kind in (("--method", METHODS), ("--clipping", CLIPPINGS), ("--filter", FILTERS)):
        assert [row["name"] for row in rows if row["flag"] == flag] == list(kind)
    assert all(row["formula"] and row["cost"] and row["use"] for row in rows)


@pytest.fixture
def small(monkeypatch):
    """The demo's settings, of a size for a test."""
    quick = {"model": "mlp", "epochs": 1.0, "batch_size": 128, "measure_bias": 4,
             "accountant": "rdp", "model_options": {"hidden": [8]}}  # fmt: skip
    monkeypatch.setattr(demo, "SETTINGS", {**demo.SETTINGS, **quick})


def test_the_accuracy_comes_first_and_the_bias_is_measured(small, dpbam, tmp_path):
    out = tmp_path / "demo"
    ended = dpbam("demo", "--seeds", 2, "--jobs", 1, "--out", out)
    assert ended.code == 0, ended.err
    said = ended.out.splitlines()
    assert said[0].startswith("Test accuracy at epsilon 2.99") or said[0].startswith(
        "Test accuracy at epsilon 3, "
    )
    result = json.loads((out / "comparison.json").read_text())
    best = result["contenders"]["bam-0.02"]["accuracy"]["mean"]
    assert f"{100 * best:.1f}% with bam-0.02" in said[0]
    sentence = next(line for line in said if line.startswith("Bias: "))
    assert "of 2 seeds" in sentence
    assert "not for publication" in sentence
    assert "The bias was not measured" not in (out / "report.html").read_text()
