"""Bad input about tasks: one sentence, exit code 2, and nothing written."""

from __future__ import annotations

import numpy as np
import pytest

from .helpers import QUICK, images, npz, one_sentence, snapshot

FINDINGS = np.random.default_rng(0).integers(0, 2, (40, 3))
VALUES = np.random.default_rng(0).uniform(0, 10, 40)
MASKS = np.random.default_rng(0).integers(0, 3, (40, 8, 8), dtype=np.uint8)


def masks(path, **arrays):
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
    "masks without unet": (masks, {}, [], "pass --model unet"),
    "unet without masks": (npz, {}, ["--model", "unet"], "unet is for segmentation"),
    "float masks": (masks, {"masks": MASKS / 2}, [], "must be uint8"),
    "smaller masks": (masks, {"masks": MASKS[:, :4]}, [], "one mask of its own size"),
    "fewer masks": (masks, {"masks": MASKS[:9]}, [], "40 images but 9 labels"),
    "skipped class": (masks, {"masks": MASKS * 2}, [], "go up to 4 but never hold 1"),
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
