"""Bad input to ``train``: one sentence, exit code 2, and nothing written."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from .helpers import QUICK, folder, images, npz, one_sentence, snapshot

FLAGS = {
    "epsilon and sigma": (["--epsilon", 3, "--noise-multiplier", 1], "not both"),
    "neither": ([], "give either epsilon"),
    "negative epsilon": (["--epsilon", -3], "epsilon must be positive"),
    "epsilon 0": (["--epsilon", 0], "epsilon must be positive"),
    "epsilon NaN": (["--epsilon", "nan"], "NaN"),
    "epsilon infinite": (["--epsilon", "inf"], "finite"),
    "epsilon no number": (["--epsilon", "small"], "--epsilon"),
    "delta 0": (["--epsilon", 3, "--delta", 0], "delta must lie"),
    "delta 2": (["--epsilon", 3, "--delta", 2], "delta must lie"),
    "data": (["--epsilon", 3, "--data", "digit"], "did you mean 'digits'?"),
    "model": ([*QUICK, "--model", "resnet-9"], "did you mean 'resnet9'?"),
    "method": (["--epsilon", 3, "--method", "dpsgd"], "did you mean 'dp-sgd'?"),
    "optimizer": (["--epsilon", 3, "--optimizer", "adaam"], "did you mean 'adam'?"),
    "clipping": (["--epsilon", 3, "--clipping", "perlayer"], "did you mean 'per-layer'?"),
    "schedule": (["--epsilon", 3, "--schedule", "cosin"], "did you mean 'cosine'?"),
    "gradient": (["--epsilon", 3, "--gradient", "exakt"], "did you mean 'exact'?"),
    "flag": (["--epsilom", 3], "--epsilon"),
    "batch above n": ([*QUICK, "--batch-size", 5000], "exceeds the 1438"),
    "batch 0": (["--epsilon", 3, "--batch-size", 0], "batch_size must be at least 1"),
    "physical batch 0": (["--epsilon", 3, "--physical-batch-size", 0], "physical_batch_size"),
    "lam": (["--epsilon", 3, "--lam", -0.1], "lam must be"),
    "lr": (["--epsilon", 3, "--lr", 0], "lr must be positive"),
    "lr NaN": (["--epsilon", 3, "--lr", "nan"], "NaN"),
    "epochs": (["--epsilon", 3, "--epochs", -1], "epochs must be positive"),
    "clip norm": (["--epsilon", 3, "--clip-norm", 0], "clip_norm must be positive"),
    "ema 1": (["--epsilon", 3, "--ema", 1], "ema must lie"),
    "ema and swa": (["--epsilon", 3, "--ema", 0.9, "--swa", 0.5], "choose one"),
    "head and freeze": (["--epsilon", 3, "--train", "head", "--freeze", "*.bias"], "freeze out"),
    "seed": (["--epsilon", 3, "--seed", -1], "seed must be"),
    "multiplicity": (["--epsilon", 3, "--augment-multiplicity", -1], "augment_multiplicity"),
    "max records": (["--epsilon", 3, "--max-records", 4], "the unit is a record"),
    "sgd with epsilon": (["--epsilon", 3, "--method", "sgd"], "without privacy"),
    "device": ([*QUICK, "--device", "gpu"], "device 'gpu'"),
    "engine": ([*QUICK, "--engine", "fusd"], "engine 'fusd' is unknown"),
    "unit": ([*QUICK, "--unit", "patient"], "no column 'patient'"),
    "freeze": ([*QUICK, "--freeze", "conv9.*"], "matches no parameter"),
    "freeze all": ([*QUICK, "--freeze", "*"], "no trainable parameter"),
    "model option": ([*QUICK, "--model-option", "hiden=3"], "did you mean 'hidden'?"),
    "model option form": ([*QUICK, "--model-option", "width"], "width=0.25"),
    "image size": ([*QUICK, "--image-size", "big"], "64x48"),
    "own model": ([*QUICK, "--model", "no_such_module:make"], "no module 'no_such_module'"),
    "own data": ([*QUICK, "--data", "no_such_module:make"], "no module 'no_such_module'"),
    "shift": ([*QUICK, "--augment-multiplicity", 2, "--shift", 9], "too small to reflect"),
    "resume without out": (["--resume"], "--resume needs --out"),
}


@pytest.mark.parametrize(("args", "says"), FLAGS.values(), ids=FLAGS)
def test_flags(args, says, dpbam, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = [] if args == ["--resume"] else ["--out", tmp_path / "out"]
    one_sentence(dpbam("train", *args, *out), says)
    assert snapshot(tmp_path) == {}
    assert not (tmp_path / "out").exists()


TOML = {
    "unknown key": ("epsilon = 3\nclip_nrom = 1\n", "did you mean 'clip_norm'?"),
    "wrong type": ('epsilon = 3\nepochs = "many"\n', "epochs must be"),
    "wrong list": ("epsilon = 3\nfreeze = 3\n", "freeze must be"),
    "not TOML": ("epsilon : 3\n", "is not valid"),
    "not text": (b"\xff\xfe\x00", "is not valid"),
    "value": ("epsilon = -3\n", "epsilon must be positive"),
}


@pytest.mark.parametrize(("text", "says"), TOML.values(), ids=TOML)
def test_configuration_files(text, says, dpbam, tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    one_sentence(dpbam("train", "--config", file, "--out", tmp_path / "out"), says)
    assert not (tmp_path / "out").exists()


def test_a_missing_configuration_file(dpbam, tmp_path):
    one_sentence(dpbam("train", "--config", tmp_path / "no.toml"), "no.toml cannot be read")


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def text(path, content="hello"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def corrupt_image(path):
    truncated(folder(path) / "ill" / "0.png")
    return path


def broken_folder(path, table):
    text(folder(path) / "labels.csv", table)
    return path


def half_a_cifar(path):
    for k in range(1, 6):
        text(path / f"data_batch_{k}.bin", "x" * 5000)
    text(path / "test_batch.bin", "x" * 5000)
    return path


DATA = {
    "missing npz": (lambda p: p / "no.npz", "there is no file"),
    "truncated npz": (lambda p: truncated(npz(p / "a.npz")), "truncated or damaged"),
    "not a zip": (lambda p: text(p / "a.npz"), "truncated or damaged"),
    "no labels": (lambda p: _only_images(p / "a.npz"), "labels"),
    "negative label": (lambda p: npz(p / "a.npz", labels=np.arange(40) - 1), "out of range"),
    "skipped label": (lambda p: npz(p / "a.npz", labels=np.arange(40) % 2 * 5), "skip"),
    "too few labels": (lambda p: npz(p / "a.npz", labels=np.arange(39) % 2), "39 labels"),
    "float labels": (lambda p: npz(p / "a.npz", labels=np.zeros(40)), "whole numbers"),
    "several labels": (lambda p: npz(p / "a.npz", labels=np.zeros((40, 3), int)), "3 values"),
    "one class": (lambda p: npz(p / "a.npz", labels=np.zeros(40, int)), "one class"),
    "float images": (lambda p: npz(p / "a.npz", images=np.zeros((40, 8, 8))), "uint8"),
    "odd images": (lambda p: npz(p / "a.npz", images=np.zeros((40, 8), np.uint8)), "shape"),
    "pickled": (lambda p: npz(p / "a.npz", labels=np.array([{}] * 40)), "pickled"),
    "no images": (lambda p: npz(p / "a.npz", images=images(0), labels=np.arange(0)), "no images"),
    "missing folder": (lambda p: p / "nowhere" / "scans", "no folder or file"),
    "empty folder": (lambda p: (p / "scans").mkdir() or p / "scans", "no images"),
    "corrupt image": (lambda p: corrupt_image(p / "scans"), "0.png"),
    "sizes differ": (lambda p: folder(p / "s", [(8, 8), (8, 9)] * 3), "--image-size"),
    "one class folder": (lambda p: _one_class(p / "s"), "one class"),
    "csv without label": (lambda p: broken_folder(p / "s", "file\nill/0.png\n"), "'label'"),
    "csv of a lost file": (lambda p: broken_folder(p / "s", "file,label\nx.png,1\n"), "x.png"),
    "csv twice": (
        lambda p: broken_folder(p / "s", "file,label\nill/0.png,a\nill/0.png,b\n"), "twice"),
    "csv outside": (lambda p: broken_folder(p / "s", "file,label\n../x,1\n"), "outside"),
    "a text file": (lambda p: text(p / "data.txt"), "no source reads"),
    "parquet": (lambda p: text(p / "data.parquet"), "hf:"),
    "cifar nowhere": (lambda p: f"cifar10:{p / 'c'}", "cifar-10-binary.tar.gz"),
    "cifar checksum": (
        lambda p: f"cifar10:{text(p / 'cifar-10-binary.tar.gz')}", "md5"),
    "cifar truncated": (lambda p: f"cifar10:{half_a_cifar(p / 'c')}", "truncated"),
    "imagenet nowhere": (lambda p: f"imagenet32:{p / 'i'}", "Imagenet32_train_npz.zip"),
}  # fmt: skip


def _only_images(path):
    np.savez(path, images=images())
    return path


def _one_class(path):
    folder(path)
    for image in (path / "well").iterdir():
        image.unlink()
    (path / "well").rmdir()
    return path


@pytest.mark.parametrize(("make", "says"), DATA.values(), ids=DATA)
def test_data(make, says, dpbam, tmp_path, monkeypatch):
    monkeypatch.setenv("DPBAM_DATA", str(tmp_path / "root"))
    data = make(tmp_path)
    before = snapshot(tmp_path)
    ended = dpbam("train", *QUICK, "--batch-size", 4, "--data", data, "--out", tmp_path / "out")
    one_sentence(ended, says)
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "out").exists()


def saved(path, tensors):
    save_file(tensors, path)
    return path


INIT = {
    "missing": (lambda p: p / "w.safetensors", "cannot be read"),
    "text": (lambda p: text(p / "w.safetensors"), "cannot be read"),
    "other model": (
        lambda p: saved(p / "w.safetensors", {"features.0.weight": torch.zeros(3)}), "is missing"),
    "other shape": (
        lambda p: saved(p / "w.safetensors", {"body.0.weight": torch.zeros(9, 9)}), "[9, 9]"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "says"), INIT.values(), ids=INIT)
def test_initial_weights(make, says, dpbam, tmp_path):
    file = make(tmp_path)
    one_sentence(dpbam("train", *QUICK, "--init", file, "--out", tmp_path / "out"), says)
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_take_images_so_small(dpbam, tmp_path):
    data = npz(tmp_path / "a.npz", images=images(size=4))
    args = [*QUICK, "--data", data, "--batch-size", 4, "--model", "resnet9"]
    one_sentence(dpbam("train", *args, "--out", tmp_path / "out"), "8")
    assert not (tmp_path / "out").exists()


def test_a_delta_above_one_over_n_is_warned_of(dpbam):
    ended = dpbam("train", *QUICK, "--delta", 0.01, "--dry-run")
    assert ended.code == 0
    assert ended.err.startswith("warning: delta 0.01 is above 1/n")


def test_a_delta_below_one_over_n_is_not(dpbam):
    ended = dpbam("train", *QUICK, "--delta", 1e-4, "--dry-run")
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train", "--epsilon", "3", "--data", "no/such/folder"], "no folder or file"),
        (["data", "chekc"], "Did you mean 'check'?"),
    ],
)
def test_as_a_process_of_its_own(args, says, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dpbam", *args], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []
