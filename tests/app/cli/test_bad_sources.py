"""Bad DICOM files, tables, encoders, tasks and uses of a model: a sentence, nothing written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tiny_encoders import edit_json, save_encoder

from .helpers import QUICK, folder, images, npz, one_sentence, snapshot

FINDINGS = np.random.default_rng(0).integers(0, 2, (40, 3))
SAFE = "model.safetensors"


def good(path):
    return npz(path / "good.npz")


def dicom(path, **tags):
    """Twelve files of as many patients, unless ``tags`` name one."""
    pytest.importorskip("pydicom")
    from tests.data.test_dicom import write

    for k in range(12):
        pixels = np.random.default_rng(k).integers(0, 4096, (8, 8), dtype=np.uint16)
        name = path / "scans" / "ab"[k % 2] / f"{k}.dcm"
        write(name, pixels, **{"PatientID": f"P{k}", **tags})
    return path / "scans"


def table(text):
    def make(path):
        (folder(path / "scans") / "labels.csv").write_text(text)
        return path / "scans"

    return make


def masks(path):
    np.savez(path / "m.npz", images=images(), masks=images() % 3)
    return path / "m.npz"


def same(path):
    return dicom(path, PatientID="ANON")


DATA = {
    "window form": (dicom, ["--dicom-window", "400"], "must be CENTER:WIDTH, such as 40:400"),
    "window of nothing": (dicom, ["--dicom-window", "40:0"], "a width of at least 1, got 40:0"),
    "window NaN": (dicom, ["--dicom-window", "nan:400"], "a width of at least 1, got nan:400"),
    "window, no DICOM": (good, ["--dicom-window", "40:400"], "has no DICOM files: leave it out"),
    "one patient": (same, [], "the same PatientID, as if it had been removed"),
    "no patient": (lambda p: dicom(p, PatientID=""), [], "12 of 12 DICOM files have no PatientID"),
    "frames": (lambda p: dicom(p, NumberOfFrames=4), [], "has 4 frames: write each as a file"),
    "palette": (lambda p: dicom(p, PhotometricInterpretation="PALETTE COLOR"), [],
                "convert it to grey"),
    "no table": (good, ["--label-column", "age"], "which has no labels.csv: leave it out"),
    "no such column": (table("file,label\nill/0.png,a\n"), ["--label-column", "age"],
                       "has no column 'age'"),
    "two files": (table("path,image,label\nx,y,a\n"), [], "each of which could be 'file'"),
    "empty table": (table(""), [], "has no column 'file' and no column 'label'"),
    "row of nothing": (table("file,label\n,\n"), [], "has no file and no label"),
    "another split": (table("file,label,split\nill/0.png,a,dev\n"), [], "has split 'dev'"),
    "uncertain": (table("file,a,b\nill/0.png,1,-1\nwell/1.png,0,1\n"),
                  ["--label-column", "a", "--label-column", "b"],
                  "line 2 of labels.csv has -1 for finding 1"),
    "no number": (table("file,label\nill/0.png,3\nwell/1.png,old\n"),
                  ["--task", "regression", "--target-range", "0:9"],
                  "line 3 of labels.csv has 'old'"),
    "no mask": (table("file,mask\nill/0.png,ill/9.png\n"), [], "names ill/9.png, which does not"),
    "range NaN": (lambda p: npz(p / "v.npz", labels=np.linspace(0, 1.5, 40)),
                  ["--target-range", "nan:3"], "--target-range must be a number"),
    "weight of no finding": (lambda p: npz(p / "f.npz", labels=FINDINGS),
                             ["--class-weight", "zz=3"], "choose from 0, 1, 2"),
    "cache, no encoder": (good, ["--feature-cache", "x"], "features of a frozen encoder"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "flags", "says"), DATA.values(), ids=DATA)
def test_what_a_run_cannot_read(make, flags, says, dpbam, tmp_path):
    data = make(tmp_path)
    before, out = snapshot(tmp_path), tmp_path / "out"
    one_sentence(dpbam("train", *QUICK, "--batch-size", 4, "--data", data, *flags, "--out", out),
                 says)  # fmt: skip
    assert snapshot(tmp_path) == before
    assert not out.exists()


def truncated(place):
    (place / SAFE).write_bytes((place / SAFE).read_bytes()[:200])


def nothing(place):
    """Leave the encoder as it is."""


ENCODERS = {
    "no processor": (lambda e: (e / "preprocessor_config.json").unlink(), [], good,
                     "has no preprocessor_config.json"),
    "no JSON": (lambda e: (e / "config.json").write_text("{"), [], good, "cannot be read as JSON"),
    "truncated": (truncated, [], good, "cannot be loaded"),
    "deviation 0": (lambda e: edit_json(e / "preprocessor_config.json", image_std=[0, 0, 0]), [],
                    good, "positive deviations"),
    "masks": (nothing, [], masks, "segmentation needs a model with outputs [3, 8, 8]"),
    "views": (nothing, ["--augment-multiplicity", 2], good, "no random views"),
    "rank 0": (nothing, ["--train", "lora", "--model-option", "lora_rank=0"], good, "at least 1"),
    "rank big": (nothing, ["--train", "lora", "--model-option", "lora_rank=big"], good,
                 "must be a whole number, got 'big'"),
    "cache in a file": (nothing, ["--feature-cache", "good.npz"], good, "cannot be written to"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "flags", "make", "says"), ENCODERS.values(), ids=ENCODERS)
def test_an_encoder_that_cannot_be_used(damage, flags, make, says, dpbam, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, place = make(tmp_path), save_encoder(tmp_path / "vit")
    damage(place)
    before, out = snapshot(tmp_path), tmp_path / "out"
    flags = ["--batch-size", 4, "--data", data, "--model", f"hf:{place}", *flags, "--out", out]
    one_sentence(dpbam("train", *QUICK, *flags), says)
    assert snapshot(tmp_path) == before
    assert not out.exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of one class, and of findings."""
    from dpbam.app.cli import main

    place = tmp_path_factory.mktemp("runs")
    for name, labels in (("one", np.arange(40) % 2), ("findings", FINDINGS)):
        data = npz(place / f"{name}.npz", labels=labels)
        flags = [*QUICK, "--batch-size", 4, "--data", data, "--out", place / name]
        assert main(["train", *map(str, flags)]) == 0
    masks(place)
    (place / "empty").mkdir()
    (place / "no.png").write_bytes(b"no")
    return place


USES = {
    "threshold of classes": (["evaluate", "one", "--threshold", "0.5"], "are for findings"),
    "threshold of nothing": (["evaluate", "findings", "--threshold", "x=0.5"], "is no finding"),
    "threshold form": (["evaluate", "findings", "--threshold", "half"], "must be like 0.3"),
    "threshold 2": (["evaluate", "findings", "--threshold", "2"], "must be like 0.3"),
    "other findings": (["evaluate", "findings", "--data", "one.npz", "--split", "all"],
                       "but the model knows"),
    "masks for classes": (["evaluate", "one", "--data", "m.npz"], "has 'images' but not"),
    "no group": (["evaluate", "one", "--by", "sex"], "has no column 'sex'"),
    "empty folder": (["predict", "one", "empty"], "there are no images in empty"),
    "broken image": (["predict", "one", "no.png"], "no.png is not an image"),
    "masks of classes": (["predict", "one", "one.npz", "--masks", "x"], "is for a segmentation"),
    "format": (["export", "one", "--to", "tflite"], "choose from onnx, hf, safetensors"),
    "export into a file": (["export", "one", "--to", "hf", "--out", "no.png"], "not an empty"),
    "export of nothing": (["export", "empty", "--to", "onnx"], "there is no model in empty"),
}  # fmt: skip


@pytest.mark.parametrize(("command", "says"), USES.values(), ids=USES)
def test_what_a_model_cannot_be_used_for(command, says, dpbam, runs, monkeypatch):
    monkeypatch.chdir(runs)
    before = snapshot(runs)
    one_sentence(dpbam(*command), says)
    assert snapshot(runs) == before


def test_a_window_in_a_file_is_a_list(dpbam, tmp_path):
    (tmp_path / "run.toml").write_text('epsilon = 3\ndicom_window = "40:400"\n')
    ended = dpbam("train", "--config", tmp_path / "run.toml", "--out", tmp_path / "out")
    one_sentence(ended, "dicom_window must be a list, such as [1, 2], got '40:400'")


VALUES = np.random.default_rng(0).uniform(0, 10, 40)
MASKS = np.random.default_rng(0).integers(0, 3, (40, 8, 8), dtype=np.uint8)


def mask_arrays(path, **arrays):
    np.savez(path, **({"images": images(), "masks": MASKS} | arrays))
    return path


CASES = {
    "unknown task": (npz, {}, ["--task", "multilabel"], "did you mean 'multi-label'?"),
    "one-hot": (npz, {"labels": np.eye(2, dtype=int)[np.arange(40) % 2]}, [], "--task multi-label"),
    "whole floats": (npz, {"labels": np.arange(40) % 2 * 1.0}, [], "--task regression"),
    "uncertain finding": (npz, {"labels": FINDINGS - 2 * (FINDINGS > 0)}, [], "0 or 1"),
    "findings as one class": (npz, {"labels": FINDINGS}, ["--task", "single-label"], "single 1"),
    "no range": (npz, {"labels": VALUES}, [], "needs --target-range LOW:HIGH"),
    "empty range": (npz, {"labels": VALUES}, ["--target-range", "5:5"], "low:high"),
    "odd range": (npz, {"labels": VALUES}, ["--target-range", "0-10"], "must be like 0:100"),
    "range of classes": (npz, {}, ["--target-range", "0:1"], "is for a regression"),
    "value NaN": (npz, {"labels": np.where(VALUES > 5, np.nan, VALUES)}, [], "not a number"),
    "focal regression": (npz, {"labels": VALUES}, ["--focal", 2, "--target-range", "0:10"],
                         "not for a regression"),
    "counts of values": (npz, {"labels": VALUES},
                         ["--release-counts", 9, "--target-range", "0:10"], "no classes"),
    "masks without unet": (mask_arrays, {}, [], "pass --model unet"),
    "unet without masks": (npz, {}, ["--model", "unet"], "unet is for segmentation"),
    "float masks": (mask_arrays, {"masks": MASKS / 2}, [], "must be uint8"),
    "smaller masks": (mask_arrays, {"masks": MASKS[:, :4]}, [], "one mask of its own size"),
    "fewer masks": (mask_arrays, {"masks": MASKS[:9]}, [], "40 images but 9 labels"),
    "skipped class": (mask_arrays, {"masks": MASKS * 2}, [], "go up to 4 but never hold 1"),
    "no masks": (npz, {}, ["--task", "segmentation"], "has 'images' but not train_masks"),
    "weight of no class": (npz, {}, ["--class-weight", "ill=3"], "'ill', which is no class"),
    "weight form": (npz, {}, ["--class-weight", "3"], "must be like ill=4"),
    "weight 0": (npz, {}, ["--class-weight", "1=0"], "must be positive"),
    "weights twice": (npz, {}, ["--class-weight", "1=2", "--release-counts", 9], "leave one out"),
    "weights undone": (npz, {}, ["--focal", 2, "--clipping", "automatic"], "have no effect"),
    "negative focal": (npz, {}, ["--focal", -1], "--focal must be zero or positive"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "arrays", "flags", "says"), CASES.values(), ids=CASES)
def test_what_a_task_cannot_use(make, arrays, flags, says, dpbam, tmp_path):
    data = make(tmp_path / "a.npz", **arrays)
    before = snapshot(tmp_path)
    ended = dpbam(
        "train", *QUICK, "--batch-size", 4, "--data", data, *flags, "--out", tmp_path / "out"
    )
    one_sentence(ended, says)
    assert snapshot(tmp_path) == before
