from __future__ import annotations

import numpy as np
import pytest
import sklearn.datasets
from sklearn.datasets import load_digits

from dpbam.data import digits, load, load_pair


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


def test_the_file_is_read_once_per_process(monkeypatch):
    calls = []

    def counting():
        calls.append(1)
        return load_digits()

    monkeypatch.setattr(sklearn.datasets, "load_digits", counting)
    digits._splits.cache_clear()
    try:
        load_pair("digits")
        load("digits")
        load("digits", split="test")
    finally:
        digits._splits.cache_clear()
    assert len(calls) == 1


def test_what_one_caller_changes_no_other_sees():
    first, fingerprint = load("digits"), load("digits").fingerprint()
    images, labels = first.batch(np.arange(5))
    images.zero_()
    labels.zero_()
    with pytest.raises(ValueError, match="read-only"):
        first.labels[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        first.images._images._array[0] = 1
    assert load("digits").fingerprint() == fingerprint
