"""A file that names code (module:function) runs none of it, unless the user names it, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from app.cli.helpers import QUICK, one_sentence
from dpbam.app.runs import RunConfig
from tests.results import run_facts

OWN = """
from pathlib import Path
from torch import nn

def small(mark, num_classes):
    Path(mark).touch()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once the module's function has been called."""
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mark"


@pytest.fixture
def run(tmp_path: Path, mark: Path) -> Path:
    """The two files of a model, and the facts of its run, from who knows whom."""
    folder = tmp_path / "run"
    (folder / "non-private").mkdir(parents=True)
    facts = {"model": "own_nets:small", "model_options": {"mark": str(mark)}}
    (folder / "model.json").write_text(
        json.dumps(
            {
                "format": 4,
                "dpbam": "0",
                "input": "",
                "method": "bam",
                "model_options": {},
                "task": "single-label",
                "image_shape": [1, 8, 8],
                "class_names": list("0123456789"),
                **facts,
            }
        )
    )
    weights = torch.nn.Linear(64, 10).state_dict()
    (folder / "model.safetensors").write_bytes(save({f"1.{k}": v for k, v in weights.items()}))
    config = RunConfig(noise_multiplier=1.0, data="digits", **facts)
    run_facts(config).write(folder / "non-private" / "run.json")
    return folder


@pytest.mark.parametrize(
    "args",
    [
        ["evaluate", "RUN", "--data", "digits"],
        ["evaluate", "RUN", "--data", "digits", "--model", "another:one"],
        ["predict", "RUN", "one.png"],
        ["bias", "RUN"],
        ["train", "--resume", "--out", "RUN"],
    ],
)
def test_a_run_folder_that_names_code(args: list[str], run: Path, mark: Path, dpbam) -> None:
    ended = dpbam(*[str(run) if arg == "RUN" else arg for arg in args])
    one_sentence(ended, "names code to run, own_nets:small")
    assert not mark.exists()


def test_the_user_may_name_it(run: Path, mark: Path, dpbam) -> None:
    ended = dpbam("evaluate", str(run), "--data", "digits", "--model", "own_nets:small", "--json")
    assert ended.code == 0, ended.err
    assert mark.exists()


def test_a_run_folder_whose_data_is_code(run: Path, dpbam) -> None:
    path = run / "non-private" / "run.json"
    path.write_text(path.read_text().replace('"digits"', '"own_nets:small"'))
    ended = dpbam("evaluate", str(run), "--model", "own_nets:small")
    one_sentence(ended, "--data own_nets:small")


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("name", ["model", "data"])
def test_a_configuration_that_names_code(command, name, mark, tmp_path, dpbam) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'epsilon = 3\n{name} = "own_nets:small"\nmodel_options.mark = "{mark}"\n')
    ended = dpbam(command, "--config", str(file), "--out", str(tmp_path / "out"))
    one_sentence(ended, f"--{name} own_nets:small")
    assert not mark.exists()


def test_code_on_the_command_line_runs(mark: Path, tmp_path: Path, dpbam) -> None:
    own = ["--model", "own_nets:small", "--model-option", f"mark={mark}"]
    ended = dpbam("train", "--data", "digits", *QUICK, *own, "--out", str(tmp_path / "out"))
    assert ended.code == 0, ended.err
    assert mark.exists()
