from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from sklearn.datasets import load_digits

import dpbam.data
from dpbam import catalogue
from dpbam.app.cli import main
from dpbam.catalogue import SOURCES
from dpbam.data import DataError, built_in, data_root, from_arrays, load, load_pair
from dpbam.data.registry import is_function, is_public

from .helpers import random_pixels, write_image


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("cifar-10", "no data set is called 'cifar-10': did you mean 'cifar10'"),
        ("Digits", "did you mean 'digits'"),
        ("imagenet", "did you mean 'imagenet32'"),
        ("xyz", "choose digits, cifar10, cifar100, imagenet32, hf, or give a path"),
        ("", "no data set was named: choose digits"),
        ("./none", "there is no folder or file './none'"),
        ("~/no/such", "there is no folder or file"),
        ("some/file.png", "there is no folder or file"),
        ("scans.parquet", "write hf:scans.parquet"),
        ("hf:", "hf needs a name"),
    ],
)
def test_names_that_mean_nothing(spec, sentence):
    with pytest.raises(DataError, match=sentence):
        load(spec)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "scans.zip").write_bytes(b"")
    with pytest.raises(DataError, match=r"scans.zip is a file that no source reads"):
        load(str(tmp_path / "scans.zip"))


def test_a_split_that_is_not_there():
    with pytest.raises(DataError, match=r"digits has no split 'val': it has train, test"):
        load("digits", split="val")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"image_size": 0}, "image_size must be one or two numbers"),
        ({"image_size": (8, 10**6)}, "image_size must be"),
        ({"image_size": (8, 8, 8)}, "image_size must be"),
        ({"channels": 2}, "channels must be 1"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(DataError, match=sentence):
        load("digits", **options)


def test_a_unit_must_be_a_column():
    with pytest.raises(DataError, match=r"no column 'patient': it has no columns"):
        load_pair("digits", unit="patient")
    assert len(load_pair("digits", unit="record").train) == 1438


def test_splits_of_two_shapes_are_refused(tmp_path):
    labels = np.arange(4) % 2
    np.savez(
        tmp_path / "x.npz",
        x_train=random_pixels(4, 0, (8, 8)),
        y_train=labels,
        x_test=random_pixels(4, 0, (9, 8)),
        y_test=labels,
    )
    with pytest.raises(DataError, match=r"\(1, 8, 8\) but .* \(1, 9, 8\): bring them to one shape"):
        load_pair(str(tmp_path / "x.npz"))


def test_a_user_may_call_a_folder_like_a_source(tmp_path, monkeypatch):
    """A bare name is the source; with a slash it is the folder."""
    monkeypatch.chdir(tmp_path)
    for k in range(8):
        write_image(tmp_path / "digits" / "ab"[k % 2] / f"{k}.png", seed=k)
    assert load("digits").num_classes == 10
    assert load("./digits").num_classes == 2


def test_every_source_can_be_opened():
    for entry in SOURCES.values():
        assert callable(entry.load())
        assert entry.summary
        assert entry.spec


def open_toy(argument, options):
    images = np.zeros((4, 8, 8), np.uint8)
    return {"train": from_arrays(images, [0, 1, 0, 1], name=f"toy {argument}")}


def test_a_source_is_added_by_one_entry(capsys):
    """It is listed, loaded by its name, and not taken for public on its own word."""
    SOURCES.register(catalogue.Source("toy", f"{__name__}:open_toy", "a toy", spec="toy[:A]",
                                      public=True))  # fmt: skip
    try:
        assert load("toy:a", split="all").name == "toy a"
        assert not is_function("toy:a")
        assert not is_public("toy")
        assert is_public("digits")
        assert not is_public("cifar10:elsewhere")
        assert main(["data", "list"]) == 0
        assert "toy[:A]" in capsys.readouterr().out
        with pytest.raises(DataError, match="did you mean 'toy'"):
            load("toys")
    finally:
        SOURCES.remove("toy")
    assert is_function("toy:a")


def test_where_data_lives(monkeypatch, tmp_path):
    assert data_root(tmp_path) == tmp_path
    monkeypatch.setenv("DPBAM_DATA", "~/data")
    assert data_root() == Path.home() / "data"
    monkeypatch.delenv("DPBAM_DATA")
    assert data_root() == Path.home() / ".cache" / "dpbam"


def test_all_names_are_there_and_importing_is_light():
    assert all(hasattr(dpbam.data, name) for name in dpbam.data.__all__)
    code = (
        "import sys, dpbam.data as d; d.load; "
        "print([m for m in ('torch', 'sklearn', 'datasets', 'pooch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    built_in._split_digits.cache_clear()
    try:
        load_pair("digits")
        load("digits")
        load("digits", split="test")
    finally:
        built_in._split_digits.cache_clear()
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
