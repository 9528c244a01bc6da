import errno
import json
import os

import pytest
import torch

from dpbam.app.runs import RunConfig, RunError, load_run_model
from dpbam.app.runs.files import (
    append_json_line,
    locked,
    plain,
    read_json,
    read_json_lines,
    write_atomic,
)
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.model_file import save_run_model
from dpbam.data import load
from dpbam.nn import build_model


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomic(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*free some space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "log"
    for step in range(4):
        append_json_line(path, {"step": step, "loss": float("nan")})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in read_json_lines(path)] == [0, 1, 2, 3]


def test_json_without_nan_and_infinity():
    assert plain({"a": [float("inf"), float("nan"), 1.5]}) == {"a": ["infinite", None, 1.5]}


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_json_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "a").write_text(content)
    with pytest.raises(RunError):
        read_json(tmp_path / "a")


def test_a_lock_keeps_others_out_and_is_free_afterwards(tmp_path):
    with locked(tmp_path / "lock"), pytest.raises(RunError, match="busy"):  # noqa: SIM117
        with locked(tmp_path / "lock", busy="busy"):
            pass
    with locked(tmp_path / "lock", busy="busy"):
        pass
    with pytest.raises(RunError, match="cannot be written"), locked(tmp_path / "no" / "lock"):
        pass


@pytest.fixture
def saved(tmp_path):
    config = RunConfig(noise_multiplier=1.0, model="mlp", model_options={"hidden": [5]})
    model = build_model("mlp", in_channels=1, image_size=8, num_classes=10, hidden=[5])
    save_run_model(RunFolder(tmp_path), model, config, load("digits"))
    return tmp_path, model


def test_the_two_files_are_enough(saved):
    folder, model = saved
    loaded = load_run_model(folder)
    assert not loaded.module.training
    assert torch.equal(loaded.module.head.weight, model.head.weight)
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", "model.safetensors"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"xx"),
        lambda folder: (folder / "model.json").write_text("{"),
        lambda folder: (folder / "model.json").write_text("{}"),
        lambda folder: _change(folder, model="nothing"),
        lambda folder: _change(folder, model_options={"hidden": [6]}),
        lambda folder: _change(folder, class_names=["a", "b"]),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_a_damaged_model_is_one_sentence(saved, harm):
    folder, _ = saved
    harm(folder)
    with pytest.raises(RunError) as error:
        load_run_model(folder)
    assert "\n" not in str(error.value)


def _change(folder, **values):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
