from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from dpbam.data import load, load_pair


def test_it_is_all_of_scikit_learns_digits():
    raw = load_digits()
    train, test = load_pair("digits")
    assert (train.name, test.name) == ("digits/train", "digits/test")
    got = sorted(
        (int(label), pixels.tobytes())
        for part in (train, test)
        for label, pixels in zip(part.labels, part.images.read(np.arange(len(part))), strict=True)
    )
    expected = sorted(
        (int(label), (image / 16 * 255).round().astype(np.uint8).tobytes())
        for label, image in zip(raw.target, raw.images, strict=True)
    )
    assert got == expected


def test_the_split_is_stratified_and_full_range_is_used():
    train, test = load_pair("digits")
    share = np.bincount(test.labels) / np.bincount(np.r_[train.labels, test.labels])
    assert (abs(share - 0.2) < 0.01).all()
    pixels = train.images.read(np.arange(len(train)))
    assert (pixels.min(), pixels.max()) == (0, 255)


def test_one_split_is_that_of_the_pair():
    train, test = load_pair("digits")
    assert load("digits").fingerprint() == train.fingerprint()
    assert load("digits", split="test").fingerprint() == test.fingerprint()
