"""Run folders that are damaged, taken, or not what a command wants: one sentence, no change."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpbam.app.cli import main

from .helpers import QUICK, npz, one_sentence, snapshot


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    args = [*QUICK, "--seed", "1", "--checkpoint-every", "0", "--quiet", "--out", str(out)]
    assert main(["train", *args]) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def damage(path, content=b"damaged"):
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def checkpoints(run):
    return sorted((run / "checkpoints").iterdir())


def wrong_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


RESUME = {
    "checkpoint damaged": (
        lambda r: [damage(p) for p in checkpoints(r)],
        "safetensors is damaged: delete it",
    ),
    "checkpoint truncated": (
        lambda r: [cut(p) for p in checkpoints(r)],
        "safetensors is damaged: delete it",
    ),
    "a bit of a checkpoint": (
        lambda r: [wrong_byte(p) for p in checkpoints(r)],
        "safetensors is damaged: delete it",
    ),
    "ledger damaged": (
        lambda r: damage(r / "ledger.jsonl", b"{}\n"),
        "line 1 is not a ledger entry",
    ),
    "ledger lost": (lambda r: (r / "ledger.jsonl").unlink(), "ledger.jsonl is missing"),
    "ledger emptied": (lambda r: (r / "ledger.jsonl").write_text(""), "holds 0 steps"),
    "a ledger's 1e300": (
        lambda r: (r / "ledger.jsonl").write_text(
            (r / "ledger.jsonl")
            .read_text()
            .replace('"noise_multiplier": 1', '"noise_multiplier": 1e300, "x": 1')
        ),
        "line 1 is not a ledger entry",
    ),
    "ledger of another run": (
        lambda r: (r / "ledger.jsonl").write_text(
            (r / "ledger.jsonl")
            .read_text()
            .replace('"noise_multiplier": 1', '"noise_multiplier": 2')
        ),
        "not this run's ledger",
    ),
    "facts damaged": (lambda r: damage(r / "non-private" / "run.json"), "run.json is damaged"),
    "facts lost": (lambda r: shutil.rmtree(r / "non-private"), "there is no run in"),
}


@pytest.mark.parametrize(("harm", "says"), RESUME.values(), ids=RESUME)
def test_resuming_a_damaged_run(harm, says, dpbam, run):
    harm(run)
    before = snapshot(run)
    one_sentence(dpbam("train", "--resume", "--out", run, "--quiet"), says)
    assert snapshot(run) == before


CHANGED = {
    "lr": ["--lr", 1],
    "data": ["--data", "cifar10"],
    "batch size": ["--batch-size", 32],
    "clip norm": ["--clip-norm", 2],
    "sigma": ["--noise-multiplier", 2],
    "method": ["--method", "bam"],
    "seed": ["--seed", 2],
    "delta": ["--delta", 1e-5],
}


@pytest.mark.parametrize("flags", CHANGED.values(), ids=CHANGED)
def test_resuming_with_other_flags(flags, dpbam, run):
    before = snapshot(run)
    one_sentence(dpbam("train", "--resume", "--out", run, *flags), "when the run began")
    assert snapshot(run) == before


def test_resuming_a_finished_run_changes_nothing(dpbam, run):
    before = snapshot(run)
    ended = dpbam("train", "--resume", "--out", run, "--quiet")
    assert ended.code == 0, ended.err
    after = snapshot(run)
    for name in ("model.safetensors", "ledger.jsonl", "metrics.jsonl", "privacy-statement.json"):
        assert after[name] == before[name]


def test_other_data_behind_the_runs_back(dpbam, tmp_path):
    data, out = npz(tmp_path / "a.npz"), tmp_path / "out"
    args = [*QUICK, "--batch-size", 8, "--data", data, "--out", out]
    assert dpbam("train", *args, "--quiet").code == 0
    npz(data, labels=np.arange(40) // 3 % 2)
    before = snapshot(out)
    one_sentence(dpbam("train", "--resume", "--out", out), "not the data that the run began with")
    assert snapshot(out) == before


def test_a_second_run_in_a_folder(dpbam, run):
    before = snapshot(run)
    one_sentence(dpbam("train", *QUICK, "--out", run), "holds a run already")
    assert snapshot(run) == before


def test_a_folder_of_something_else(dpbam, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    one_sentence(dpbam("train", *QUICK, "--out", tmp_path), "is not empty")
    assert list(snapshot(tmp_path)) == ["thesis.txt"]


def test_a_file_in_place_of_a_folder(dpbam, tmp_path):
    (tmp_path / "out").write_text("a file")
    one_sentence(dpbam("train", *QUICK, "--out", tmp_path / "out"), "cannot be made")
    one_sentence(dpbam("train", *QUICK, "--out", tmp_path / "out" / "x"), "cannot be made")


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_in_one_folder_at_once(resume, dpbam, run, tmp_path):
    """The lock is the system's: another process that holds it is a run at work."""
    out = run if resume else tmp_path / "new"
    out.mkdir(exist_ok=True)
    holder = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        args = ["--resume"] if resume else QUICK
        one_sentence(dpbam("train", *args, "--out", out), "another run is at work")
    finally:
        os.close(holder)


def test_resuming_nothing(dpbam, tmp_path):
    one_sentence(dpbam("train", "--resume", "--out", tmp_path / "no"), "there is no run in")
    one_sentence(dpbam("train", "--resume", "--out", tmp_path), "there is no run in")
    assert list(tmp_path.iterdir()) == []


def test_resume_and_a_configuration_file(dpbam, run):
    ended = dpbam("train", "--resume", "--out", run, "--config", run / "config.toml")
    one_sentence(ended, "leave --config out")


BUDGETS = {
    "missing": (None, "there is no budget file"),
    "damaged": ("hello", "budget.json is damaged"),
}


@pytest.mark.parametrize(("content", "says"), BUDGETS.values(), ids=BUDGETS)
def test_a_budget_that_cannot_be_read(content, says, dpbam, tmp_path):
    budget = tmp_path / "budget.json"
    if content:
        budget.write_text(content)
    before = snapshot(tmp_path)
    one_sentence(dpbam("train", *QUICK, "--budget", budget, "--out", tmp_path / "out"), says)
    assert snapshot(tmp_path) == before


MODEL = {
    "weights damaged": (lambda r: damage(r / "model.safetensors"), "model.safetensors"),
    "weights truncated": (lambda r: cut(r / "model.safetensors"), "model.safetensors"),
    "weights lost": (lambda r: (r / "model.safetensors").unlink(), "there is no model"),
    "facts damaged": (lambda r: damage(r / "model.json"), "model.json"),
    "facts incomplete": (lambda r: damage(r / "model.json", b"{}"), "model.json"),
    "no run": (shutil.rmtree, "no model"),
}


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(("harm", "says"), MODEL.values(), ids=MODEL)
def test_a_damaged_model(harm, says, command, dpbam, run, tmp_path):
    harm(run)
    files = [npz(tmp_path / "a.npz")] if command == "predict" else []
    one_sentence(dpbam(command, run, *files), says)


EVALUATE = {
    "unknown data": (["--data", "digitz"], "did you mean 'digits'?"),
    "column": (["--by", "sex"], "no column 'sex'"),
    "split": (["--split", "exam"], "no split 'exam'"),
}


@pytest.mark.parametrize(("args", "says"), EVALUATE.values(), ids=EVALUATE)
def test_evaluating_what_is_not_there(args, says, dpbam, finished):
    one_sentence(dpbam("evaluate", finished, *args), says)


def test_evaluating_images_of_another_shape(dpbam, finished, tmp_path):
    data = npz(tmp_path / "a.npz", images=np.zeros((40, 9, 9), np.uint8))
    ended = dpbam("evaluate", finished, "--data", data, "--split", "all")
    one_sentence(ended, "the model takes")


def bad_image(path):
    path.write_text("not an image")
    return path


PREDICT = {
    "text file": (lambda p: [bad_image(p / "a.png")], "a.png"),
    "missing": (lambda p: [p / "no.png"], "no.png"),
    "folder": (lambda p: [p], "no images"),
    "format": (lambda p: [npz(p / "a.npz"), "--format", "cvs"], "did you mean 'csv'?"),
    "nothing": (lambda p: [], "FILES"),
    "out": (lambda p: [npz(p / "a.npz"), "--out", p / "no" / "p.csv"], "cannot be written"),
}


@pytest.mark.parametrize(("make", "says"), PREDICT.values(), ids=PREDICT)
def test_predicting_what_is_not_there(make, says, dpbam, finished, tmp_path):
    args = make(tmp_path)
    before = snapshot(tmp_path)
    ended = dpbam("predict", finished, *args)
    one_sentence(ended, says)
    assert ended.out == ""
    assert snapshot(tmp_path) == before


COMPARE = {
    "the same method twice": (["--method", "bam:0.1", "--method", "bam:0.1"], "once"),
    "no lambda": (["--method", "bam:much"], "bam:0.02"),
    "unknown method": (["--method", "bma"], "did you mean 'bam'?"),
    "no seeds": (["--seeds", 0], "--seeds"),
    "no jobs": (["--jobs", 0], "jobs"),
    "batch above n": (["--batch-size", 5000], "exceeds"),
    "freeze": (["--freeze", "conv9.*"], "matches no parameter"),
    "data": (["--data", "digitz"], "did you mean 'digits'?"),
}


@pytest.mark.parametrize(("args", "says"), COMPARE.values(), ids=COMPARE)
def test_comparing_what_cannot_be(args, says, dpbam, tmp_path):
    base = ["--data", "digits", "--noise-multiplier", 1, "--accountant", "rdp"]
    one_sentence(dpbam("compare", *base, "--out", tmp_path / "out", *args), says)
    assert not (tmp_path / "out").exists()


DISK = "dpbam.app.runs.files.os.fsync"


def test_a_full_disk(dpbam, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DISK, full)
    one_sentence(dpbam("train", *QUICK, "--out", tmp_path / "out"), "No space left on device")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small disk may be mounted: run the tests as root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_really_fills_up(dpbam, small_disk, tmp_path):
    """The model alone needs 38 KiB and the checkpoint three times that: then room is made."""
    out = small_disk / "out"
    one_sentence(dpbam("train", *QUICK, "--out", out, "--quiet"), "No space left on device")
    spent = len((out / "ledger.jsonl").read_text().splitlines())
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert dpbam("train", "--resume", "--out", out, "--quiet").code == 0
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert statement["charged_steps"] >= spent


@pytest.mark.parametrize(("lr", "useless"), [("1e-9", True), ("0.5", False)])
def test_a_useless_model_is_called_useless(dpbam, tmp_path, lr, useless):
    flags = ["--data", "digits", "--model", "mlp", "--noise-multiplier", "0.5", "--accountant",
             "rdp", "--batch-size", "200", "--epochs", "2", "--seed", "1", "--lr", lr,
             "--optimizer", "sgd", "--out", tmp_path / "run"]  # fmt: skip
    ended = dpbam("train", *flags)
    assert ended.code == 0
    assert "best constant      accuracy 1" in ended.out  # of ten classes, 10 to 11%
    assert ("warning: this model is useless: it is not better" in ended.err) is useless
    assert ("try another --lr" in " ".join(ended.err.split())) is useless
    evaluated = dpbam("evaluate", tmp_path / "run")
    assert ("warning: this model is useless: it is not better" in evaluated.err) is useless
    assert "warning: this model is useless" not in (tmp_path / "run" / "README.md").read_text()


def test_predict_reports_a_damaged_file_and_continues(dpbam, run, tmp_path):
    folder, out = tmp_path / "new", tmp_path / "p.csv"
    folder.mkdir()
    for k in range(4):
        Image.fromarray(np.full((8, 8), k, np.uint8)).save(folder / f"{k}.png")
    (folder / "1.png").write_bytes(b"damaged")
    ended = dpbam("predict", run, folder, "--out", out)
    assert ended.code == 1
    assert "1.png" in ended.err
    assert "1 of 4 files could not be read, and are left out" in ended.err
    rows = out.read_text().splitlines()[1:]
    assert [Path(row.partition(",")[0]).name for row in rows] == ["0.png", "2.png", "3.png"]
    for path in folder.iterdir():
        path.write_bytes(b"damaged")
    ended = dpbam("predict", run, folder, "--out", tmp_path / "none.csv")
    assert ended.code == 2
    assert "none of the 4 files could be read: nothing was written" in ended.err
    assert not (tmp_path / "none.csv").exists()


def test_the_end_of_a_run_has_what_is_left_of_a_budget(dpbam, tmp_path):
    budget = tmp_path / "budget.json"
    budget.write_text('{"epsilon": 50.0, "delta": 1e-4, "accountant": "rdp"}')
    args = [*QUICK, "--delta", 1e-4, "--budget", budget]
    left = []
    for name in ("first", "second"):
        said = " ".join(dpbam("train", *args, "--out", tmp_path / name).out.split())
        figures = re.search(
            r"epsilon (\S+) of 50 is taken at delta 0.0001, about (\S+) is left", said
        )
        assert figures is not None, said
        taken, rest = map(float, figures.groups())
        assert taken + rest == pytest.approx(50, rel=1e-3)
        left.append(rest)
    assert left[1] < left[0]


def test_predict_counts_what_it_resizes(dpbam, run, tmp_path):
    for name, size in (("a", (8, 8)), ("b", (9, 8)), ("c", (20, 30))):
        Image.new("L", size).save(tmp_path / f"{name}.png")
    ended = dpbam("predict", run, *(tmp_path / f"{name}.png" for name in "abc"))
    assert (ended.code, len(ended.out.splitlines())) == (0, 4)
    assert "2 images were resized to 8x8\n" in ended.err
    assert "resized" not in dpbam("predict", run, tmp_path / "a.png").err


def test_evaluate_takes_what_train_takes(dpbam, tmp_path, monkeypatch):
    """Images of 24 channels, from a function of the user's own."""
    (tmp_path / "spectra.py").write_text(
        "import numpy as np\nfrom dpbam.data import DataSet\n"
        "from dpbam.data.base import ArrayImages\n\n\n"
        "def load(split):\n"
        "    rng = np.random.default_rng(len(split))\n"
        "    images = ArrayImages(rng.integers(0, 255, (40, 24, 8, 8), dtype=np.uint8))\n"
        "    return DataSet(f'spectra/{split}', images, np.arange(40) % 2, ('a', 'b'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = [*QUICK, "--batch-size", "20", "--quiet", "--out", tmp_path / "run"]
    assert dpbam("train", *flags, "--data", "spectra:load").code == 0
    ended = dpbam("evaluate", tmp_path / "run", "--data", "spectra:load", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["test_set_of_the_run"] is True


@pytest.mark.parametrize("flags", [["--seed", 1], []])
def test_the_end_of_a_seeded_run_does_not_invite_to_publish(dpbam, tmp_path, flags):
    ended = dpbam("train", *QUICK, *flags, "--out", tmp_path / "out")
    said = " ".join(ended.out.split())
    assert ended.code == 0, ended.err
    assert ("publish of sensitive data nothing, since the run is seeded" in said) == bool(flags)
    assert ("publish model.safetensors" in said) != bool(flags)
