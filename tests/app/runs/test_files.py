"""The files of a run folder: written whole or not at all, in a place of their own, of a format."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest
import torch

from dpbam.app.report.records import read_run
from dpbam.app.runs import RunConfig, execute, load_run_model
from dpbam.app.runs.files import (
    FORMAT,
    append_json_line,
    check_format,
    locked,
    plain,
    read_json,
    read_json_lines,
    read_number,
    write_atomic,
)
from dpbam.app.runs.folder import RunFolder, stored_config
from dpbam.app.runs.model_file import save_run_model
from dpbam.app.runs.rows import TrainingRow, read_rows
from dpbam.app.runs.run import RunError
from dpbam.data import load
from dpbam.nn import build_model
from tests.results import run_facts


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
    values = [math.inf, -math.inf, math.nan, 1.5]
    words = plain({"a": values})["a"]
    assert words == ["infinite", "-infinite", None, 1.5]
    assert [read_number(word) for word in words] == [math.inf, -math.inf, None, 1.5]


def test_a_row_keeps_the_sign_of_infinity(tmp_path):
    path = tmp_path / "training.jsonl"
    numbers = {"lr": math.inf, "seconds": -math.inf, "non_private_loss": None}
    append_json_line(path, {"step": 1, "non_private_batch_size": 2, **numbers})
    (row,) = read_rows(path, TrainingRow)
    assert (row.lr, row.seconds) == (math.inf, -math.inf)


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


def begin(folder: RunFolder, config) -> None:
    folder.non_private.mkdir(exist_ok=True)
    run_facts(config).write(folder.facts)


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), RunFolder(tmp_path / "run").opened(resume=False):
        raise KeyError
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(KeyError), RunFolder(tmp_path / "run").opened(resume=False):
        raise KeyError
    assert (tmp_path / "run").exists()


def test_a_run_that_has_begun_stays_and_can_be_resumed(tmp_path, tiny):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(resume=False):
        begin(folder, tiny)
    assert stored_config(tmp_path / "run") == tiny
    with pytest.raises(RunError, match="holds a run already"), folder.opened(resume=False):
        pass
    with folder.opened(resume=True):
        pass


def test_two_runs_in_one_folder(tmp_path, tiny):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(resume=False):
        with pytest.raises(RunError, match="another run is at work"), folder.opened(resume=False):
            pass
        assert folder.path.exists()  # the second one's refusal did not remove the first one's
        begin(folder, tiny)
        with pytest.raises(RunError, match="another run is at work"), folder.opened(resume=True):
            pass


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="is not empty"), RunFolder(tmp_path).opened(resume=False):
        pass
    with (
        pytest.raises(RunError, match="there is no run in"),
        RunFolder(tmp_path).opened(resume=True),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match="cannot be made"), RunFolder(out).opened(resume=False):
            pass
    with pytest.raises(RunError, match="there is no run in"):
        stored_config(tmp_path / "none")


READERS = {
    "model.json": load_run_model,
    "privacy-statement.json": read_run,
    "non-private/run.json": stored_config,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from dpbam.app.runs import RunConfig

    config = RunConfig(
        model="mlp", model_options={"hidden": [4]}, method="dp-sgd", noise_multiplier=4.0,
        accountant="rdp", batch_size=180, epochs=0.25, seed=0, num_workers=0,
    )  # fmt: skip
    return execute(config, tmp_path_factory.mktemp("formats") / "run").out


@pytest.mark.parametrize("name", READERS)
def test_each_file_has_a_number_and_a_newer_one_is_refused(run, name):
    path = run / name
    text = path.read_text()
    assert json.loads(text)["format"] == FORMAT
    READERS[name](run)
    path.write_text(json.dumps({**json.loads(text), "format": FORMAT + 1}))
    try:
        with pytest.raises(
            RunError, match=f"{path.name} is of format {FORMAT + 1}.*use the dpbam that wrote it"
        ):
            READERS[name](run)
    finally:
        path.write_text(text)


def test_a_newer_run_is_not_resumed(run):
    path = RunFolder(run).facts
    text = path.read_text()
    path.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    try:
        with pytest.raises(RunError, match="use the dpbam that wrote it"):
            execute(stored_config(run), run, resume=True)
    finally:
        path.write_text(text)


@pytest.mark.parametrize("number", [0, "1", None, 1.5, True])
def test_a_number_that_is_none_is_refused(tmp_path, number):
    with pytest.raises(RunError, match="restore it from a backup"):
        check_format(tmp_path / "x.json", {"format": number})
    with pytest.raises(RunError, match="use the dpbam that wrote it"):
        check_format(tmp_path / "x.json", {"format": FORMAT - 1})
