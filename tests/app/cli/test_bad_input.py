"""Bad input to ``train``: one sentence, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from dpbam.bias import method_advice

from .helpers import QUICK, folder, images, npz, one_sentence, snapshot

FLAGS = {
    "epsilon and sigma": (["--epsilon", 3, "--noise-multiplier", 1], "not both"),
    "neither": ([], "give either --epsilon (the noise is calibrated to it) or --noise-multiplier"),
    "negative epsilon": (["--epsilon", -3], "epsilon must be positive"),
    "epsilon 0": (["--epsilon", 0], "epsilon must be positive"),
    "epsilon NaN": (["--epsilon", "nan"], "NaN"),
    "epsilon infinite": (["--epsilon", "inf"], "finite"),
    "epsilon no number": (["--epsilon", "small"], "--epsilon"),
    "delta 0": (["--epsilon", 3, "--delta", 0], "delta must lie"),
    "delta 2": (["--epsilon", 3, "--delta", 2], "delta must lie"),
    "data": (["--epsilon", 3, "--data", "digit"], "did you mean 'digits'?"),
    "model": ([*QUICK, "--model", "resnet-9"], "did you mean 'resnet9'?"),
    "model of runs": (
        [*QUICK, "--model", "resnet18"],
        "auto, scattering, onnx:FILE and features:hf:NAME",
    ),
    "batch of auto": (
        ["--data", "digits", "--epsilon", 3, "--batch-size", 5000],
        "which means 1438",
    ),
    "method": (["--epsilon", 3, "--method", "dpsgd"], "did you mean 'dp-sgd'?"),
    "method with lambda": (
        ["--epsilon", 3, "--method", "bam-exact:0.02"],
        "write --method bam --lam 0.02 --gradient exact",
    ),
    "lambda of dp-sgd": (["--epsilon", 3, "--method", "dp-sgd:1"], "write --method dp-sgd"),
    "flag without its value": (
        ["--epsilon", 3, "--measure-bias", "--epochs", 1],
        "--measure-bias needs a value, and the flag --epochs follows it (every=N: ",
    ),
    "optimizer": (["--epsilon", 3, "--optimizer", "adaam"], "did you mean 'adam'?"),
    "clipping": (["--epsilon", 3, "--clipping", "perlayer"], "did you mean 'per-layer'?"),
    "schedule": (["--epsilon", 3, "--schedule", "cosin"], "did you mean 'cosine'?"),
    "gradient": (["--epsilon", 3, "--gradient", "exakt"], "did you mean 'exact'?"),
    "flag": (["--epsilom", 3], "--epsilon"),
    "batch above n": ([*QUICK, "--batch-size", 5000], "exceeds the 1438"),
    "batch 0": (["--epsilon", 3, "--batch-size", 0], "error: --batch-size must be at least 1"),
    "physical batch 0": (["--epsilon", 3, "--physical-batch-size", 0], "--physical-batch-size"),
    "lam": (["--epsilon", 3, "--lam", -0.1], "error: --lam must be"),
    "lam without effect": (
        ["--epsilon", 3, "--method", "dp-sgd", "--lam", 0.1],
        "--lam has no effect with --method dp-sgd",
    ),
    "gradient without effect": (
        ["--epsilon", 3, "--method", "dp-sat", "--gradient", "exact"],
        "has no effect",
    ),
    "momentum without effect": (
        ["--epsilon", 3, "--model", "mlp", "--momentum", 0.5],
        "--optimizer nadam",
    ),
    "flip without effect": (["--epsilon", 3, "--flip", "none"], "--augment-multiplicity 0"),
    "lr": (["--epsilon", 3, "--lr", 0], "lr must be positive"),
    "lr NaN": (["--epsilon", 3, "--lr", "nan"], "NaN"),
    "epochs": (["--epsilon", 3, "--epochs", -1], "epochs must be positive"),
    "clip norm": (["--epsilon", 3, "--clip-norm", 0], "error: --clip-norm must be positive"),
    "ema 1": (["--epsilon", 3, "--ema", 1], "ema must lie"),
    "ema and swa": (["--epsilon", 3, "--ema", 0.9, "--swa", 0.5], "choose one"),
    "head and freeze": (["--epsilon", 3, "--train", "head", "--freeze", "*.bias"], "freeze out"),
    "seed": (["--epsilon", 3, "--seed", -1], "seed must be"),
    "multiplicity": (["--epsilon", 3, "--augment-multiplicity", -1], "--augment-multiplicity"),
    "max records": (
        [*QUICK, "--max-records", 4],
        "--max-records is 4 but the unit is a record: name the column that owns several records "
        "by the setting --unit",
    ),
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
    "value": ("epsilon = -3\n", "error: epsilon must be positive"),
    "value of two words": ("epsilon = 3\nclip_norm = 0\n", "error: clip_norm must be positive"),
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
    "several labels": (lambda p: npz(p / "a.npz", labels=np.zeros((40, 3), int)), "all labels"),
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


@pytest.mark.parametrize("delta", [0.5, 0.01, 1 / 1438])
def test_a_delta_of_one_over_n_or_more_is_refused_with_the_one_to_use(dpbam, tmp_path, delta):
    ended = dpbam("train", *QUICK, "--delta", delta, "--out", tmp_path / "out")
    one_sentence(ended, "is not below 1/n = 0.0007: it would allow publishing a record")
    assert "leave it out, which means 1e-06 here" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_delta_above_one_over_n_is_warned_of_in_a_seeded_run_for_research(dpbam):
    ended = dpbam("train", *QUICK, "--delta", 0.01, "--seed", 1, "--dry-run")
    assert ended.code == 0
    assert ended.err.startswith("warning: delta 0.01 is above 1/n")


def test_a_delta_below_one_over_n_is_taken(dpbam):
    assert dpbam("train", *QUICK, "--delta", 0.999 / 1438, "--dry-run").code == 0


def test_a_dry_run_gives_the_advice_that_needs_no_data(dpbam):
    ended = dpbam("train", *QUICK, "--method", "bam", "--dry-run")
    assert method_advice("bam", averaged=False) in " ".join(ended.out.split())
    ended = dpbam("train", *QUICK, "--method", "dp-sgd", "--swa", 0.5, "--dry-run")
    assert "docs/results.md" not in ended.out


def test_a_delta_below_one_over_n_is_not(dpbam):
    ended = dpbam("train", *QUICK, "--delta", 1e-4, "--dry-run")
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        pytest.param(  # "missing folder" is the same in this process
            ["train", "--epsilon", "3", "--data", "no/such/folder"],
            "no folder or file",
            marks=pytest.mark.slow,
        ),
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


def test_a_dry_run_counts_with_the_budget(dpbam, tmp_path):
    budget = text(tmp_path / "budget.json", '{"epsilon": 30, "delta": 1e-4, "accountant": "rdp"}')
    before = snapshot(tmp_path)
    args = [*QUICK, "--delta", 1e-4, "--budget", budget]
    ended = dpbam("train", *args, "--dry-run", "--json-lines")
    plan = json.loads(ended.out)
    assert plan["budget_epsilon_taken"] == 0
    assert plan["budget_epsilon_with_this_run"] == pytest.approx(plan["epsilon"])
    assert snapshot(tmp_path) == before


def test_a_dry_run_refuses_what_exceeds_the_budget(dpbam, tmp_path):
    budget = text(tmp_path / "budget.json", '{"epsilon": 0.1, "delta": 1e-4, "accountant": "rdp"}')
    ended = dpbam("train", *QUICK, "--budget", budget, "--dry-run")
    one_sentence(ended, "would exceed epsilon 0.1 of the budget")


def test_plot_without_a_name_lists_the_figures(dpbam):
    one_sentence(dpbam("plot"), "one of differences, accuracy, classes, confusion")
    one_sentence(dpbam("plot", "accuracy"), "--out")


def patients(path, *names):
    """Six images of these patients, the last two to test."""
    folder(path)
    rows = [f"{('ill', 'well')[k % 2]}/{k}.png,{k % 2},{name}" for k, name in enumerate(names)]
    lines = [f"{row},{'test' if k > 3 else 'train'}" for k, row in enumerate(rows)]
    (path / "labels.csv").write_text("\n".join(["file,label,patient,split", *lines]))
    return path


@pytest.mark.parametrize("unit", ["patient", "record"])
def test_patients_in_both_sets_are_refused_unless_allowed(unit, dpbam, tmp_path):
    data = patients(tmp_path / "s", *"abcdda")
    args = ["train", *QUICK, "--data", data, "--unit", unit, "--batch-size", 2]
    ended = dpbam(*args, "--out", tmp_path / "out")
    one_sentence(ended, "2 values of 'patient' are in both s/train and s/test")
    assert not (tmp_path / "out").exists()
    assert dpbam(*args, "--allow-shared-units", "--dry-run").code == 0
    assert dpbam("data", "check", data, "--unit", unit).code == 2
    apart = [*args[:-5], patients(tmp_path / "t", *"aabbcd"), *args[-4:]]
    assert dpbam(*apart, "--dry-run").code == 0


def test_the_statement_records_that_shared_units_were_allowed(dpbam, tmp_path):
    data = patients(tmp_path / "s", *"abcdda")
    args = [*QUICK, "--data", data, "--unit", "patient", "--batch-size", 2, "--quiet"]
    assert dpbam("train", *args, "--allow-shared-units", "--out", tmp_path / "out").code == 0
    statement = json.loads((tmp_path / "out" / "privacy-statement.json").read_text())
    assert statement["evaluated_on"]["shared_units_allowed"] is True
    text = (tmp_path / "out" / "privacy-statement.md").read_text()
    assert "allowed units of privacy to be in both" in text


def test_a_check_lists_what_there_is(dpbam, tmp_path):
    ended = dpbam("data", "check", patients(tmp_path / "s", *"aabbcd"), "--unit", "patient")
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "images 4 to train on, 2 to test; grey, 8x8" in lines
    assert "classes 2: 0 (3), 1 (3)" in lines
    assert "patients 2 to train on, 2 to test; 1 to 2 images each" in lines
    assert "columns folder1 (2 values), patient (4 values)" in lines
    assert lines[-1].endswith("s: no problems")
    assert ended.code == 0
    ended = dpbam("data", "check", patients(tmp_path / "t", *"aabbcc"), "--unit", "patient")
    assert "; 2 images each" in ended.out


def with_copies(path, twice):
    """60 images; if twice, some are copies within the training set and between it and the test."""
    pixels = images(60)
    if twice:
        pixels[5] = pixels[3] = pixels[1]
        pixels[45] = pixels[7]
    labels = np.arange(60) % 2
    np.savez(
        path, train_images=pixels[:40], train_labels=labels[:40], test_images=pixels[40:],
        test_labels=labels[40:],
    )  # fmt: skip
    return path


def is_published(path):
    return path.suffix != ".safetensors" and "non-private" not in path.parts


OF_MANY_RUNS = {
    "compare": ["--method", "bam", "--seeds", 1],
    "compare --json": ["--seeds", 1, "--json"],
    "search": ["--trials", 2, "--pay", "nothing", "--vary", "lr=0.01,0.1"],
}


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize(("command", "flags"), OF_MANY_RUNS.items(), ids=OF_MANY_RUNS)
def test_many_runs_warn_of_copies_once_and_on_stderr_alone(dpbam, tmp_path, command, flags, twice):
    data = with_copies(tmp_path / "scans.npz", twice)
    args = [*QUICK, "--batch-size", "8", "--data", str(data), "--out", tmp_path / "out", *flags]
    ended = dpbam(command.split()[0], *args)
    assert ended.code == 0, ended.err
    assert " ".join(ended.err.split()).count("1 image occurs more than once in") == int(twice)
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and is_published(p)]
    assert "more than once" not in ended.out
    assert not any(b"more than once in" in p.read_bytes() for p in files)


@pytest.mark.parametrize("way", [("--dry-run",), ("--quiet",), (), ("--json-lines",)])
@pytest.mark.parametrize("twice", [True, False])
def test_copies_in_the_data_are_warned_of_and_are_in_no_published_file(dpbam, tmp_path, twice, way):
    data, out = with_copies(tmp_path / "scans.npz", twice), tmp_path / "run"
    args = [*QUICK, "--batch-size", "8", "--data", str(data), "--out", str(out), *way]
    ended = dpbam("train", *args)
    assert ended.code == 0, ended.err
    said = " ".join((ended.out + ended.err).split())
    warned = twice and way != ("--json-lines",)  # which prints nothing about the data
    assert (
        "1 image occurs more than once in scans.npz/train: a person who is in all copies has"
        in said
    ) == warned
    assert ("1 image of scans.npz/test is in scans.npz/train too" in said) == warned
    files = [p for p in out.rglob("*") if p.is_file() and is_published(p)]
    assert bool(files) == (way != ("--dry-run",))
    assert not any(b"more than once in" in p.read_bytes() for p in files)
    if files:
        assert (out / "non-private").stat().st_mode & 0o777 == 0o700
        assert (out / "non-private" / "warnings.txt").exists() == twice
    if way == ("--json-lines",):
        assert "if there are any, are in TMP/run/non-private/warnings.txt" in said
    if twice and files:
        assert "1 image occurs more than once in" in (out / "non-private/warnings.txt").read_text()


@pytest.mark.parametrize("command", ["train", "compare", "search"])
def test_a_forgotten_data_set_is_named(command, dpbam, tmp_path):
    flags = ["--pay", "public", "--vary", "lr=0.01,0.1"] if command == "search" else []
    ended = dpbam(command, "--epsilon", 3, *flags, "--out", tmp_path / "out")
    one_sentence(ended, "there is no data set: give --data, a folder of images")


@pytest.mark.parametrize("damage", ["size", "bytes"])
def test_a_dry_run_refuses_what_training_refuses_and_says_the_same(damage, dpbam, tmp_path):
    pixels = images(48)
    for k in range(48):  # more than the headers that are looked at to find the common size
        file = tmp_path / "scans" / "ab"[k % 2] / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[k]).save(file)
    file = tmp_path / "scans" / "a" / "20.png"
    if damage == "size":
        Image.new("L", (9, 8)).save(file)
    else:
        file.write_bytes(file.read_bytes()[:-30])
    args = [*QUICK, "--batch-size", "8", "--data", tmp_path / "scans", "--out", tmp_path / "out"]
    planned, trained = dpbam("train", *args, "--dry-run"), dpbam("train", *args, "--quiet")
    one_sentence(planned, "a/20.png")
    assert (planned.code, planned.err) == (trained.code, trained.err)
    assert not (tmp_path / "out").exists()


def test_the_plan_names_what_is_held_out_and_warns_of_a_weak_epsilon(dpbam):
    weak = ["train", "--data", "digits", "--model", "mlp", "--epsilon", 3000, "--accountant", "rdp"]
    ended = dpbam(*weak, "--dry-run")
    assert "warning: epsilon 3000 is hardly any protection" in ended.err
    said = " ".join(ended.out.split())
    assert "359 records (digits/test) are for evaluation, and are not trained on" in said
    assert "hardly any protection" not in dpbam("train", *QUICK, "--dry-run").err
