from __future__ import annotations

import numpy as np
import pytest

from dpbam.data import DataError, load, load_pair

from .helpers import random_pixels, write_imagenet32


def test_the_batch_files_are_one_set(tmp_path):
    expected = write_imagenet32(tmp_path / "in")
    train, test = load_pair(f"imagenet32:{tmp_path / 'in'}")
    assert (len(train), len(test), train.shape, train.num_classes) == (40, 4, (3, 32, 32), 1000)
    assert np.array_equal(train.images.read(np.arange(40)), expected)
    assert np.array_equal(train.images.read(np.array([39, 0, 17])), expected[[39, 0, 17]])
    assert train.labels.tolist() == list(range(40))  # 1..40 in the files
    assert train.class_names[:2] == ("1", "2")


def test_converted_once_and_memory_mapped(tmp_path, data_folder, monkeypatch):
    write_imagenet32(tmp_path)
    first = load(f"imagenet32:{tmp_path}")
    assert isinstance(first.images._parts[0]._array.base.base, np.memmap)
    assert len(list((data_folder / "converted").iterdir())) == 10
    monkeypatch.setattr("dpbam.data.npz.NpzFile._unpack", None)  # would fail if called
    assert load(f"imagenet32:{tmp_path}").fingerprint() == first.fingerprint()


def test_a_changed_file_is_converted_anew(tmp_path):
    write_imagenet32(tmp_path)
    before = load(f"imagenet32:{tmp_path}").fingerprint()
    batch = {"data": random_pixels(5, seed=99), "labels": [1, 2, 3, 4, 5]}
    np.savez(tmp_path / "train_data_batch_4.npz", **batch)
    after = load(f"imagenet32:{tmp_path}")
    assert len(after) == 41
    assert after.fingerprint() != before


def test_the_default_place_and_class_names(data_folder):
    write_imagenet32(data_folder / "imagenet32")
    (data_folder / "imagenet32" / "map_clsloc.txt").write_text("n02119789 1 kit_fox\n")
    assert load("imagenet32", split="test").class_names[:2] == ("kit_fox", "2")


def test_the_folders_that_the_archives_unpack_to(tmp_path):
    expected = write_imagenet32(tmp_path / "Imagenet32_train_npz")
    write_imagenet32(tmp_path / "Imagenet32_val_npz")
    train, test = load_pair(f"imagenet32:{tmp_path}")
    assert np.array_equal(train.images.read(np.arange(40)), expected)
    assert len(test) == 4


def test_what_is_missing_is_named(tmp_path, data_folder):
    with pytest.raises(
        DataError, match=r"there is no folder .*imagenet32: unpack Imagenet32_train_npz.zip"
    ):
        load("imagenet32")
    write_imagenet32(tmp_path)
    (tmp_path / "train_data_batch_7.npz").unlink()
    with pytest.raises(DataError, match=r"lacks train_data_batch_7.npz"):
        load(f"imagenet32:{tmp_path}")


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"data": random_pixels(2), "labels": [0, 1]}, r"labels outside 1\.\.1000"),
        ({"data": random_pixels(2), "labels": [1, 1001]}, r"labels outside 1\.\.1000"),
        ({"data": random_pixels(2), "labels": [1]}, "with a label each"),
        ({"data": random_pixels(2), "labels": [[1, 2]]}, "with a label each"),
        ({"data": random_pixels(2), "labels": [1.0, 2.0]}, "with a label each"),
        ({"data": random_pixels(2)[:0], "labels": np.zeros(0, int)}, "with a label each"),
        ({"data": random_pixels(2)[:, :100], "labels": [1, 2]}, "uint8 data"),
        ({"data": random_pixels(2).astype(float), "labels": [1, 2]}, "uint8 data"),
        ({"data": random_pixels(2)}, "has no 'labels'"),
        ({"labels": [1, 2]}, "has no 'data'"),
        ({"data": np.full((2, 3072), None, object), "labels": [1, 2]}, "pickled objects"),
    ],
)
def test_files_of_another_form_leave_nothing_behind(tmp_path, data_folder, batch, sentence):
    write_imagenet32(tmp_path)
    np.savez(tmp_path / "train_data_batch_1.npz", **batch)
    with pytest.raises(DataError, match=sentence):
        load(f"imagenet32:{tmp_path}")
    assert not (data_folder / "converted").exists()


def test_a_truncated_file(tmp_path):
    write_imagenet32(tmp_path)
    path = tmp_path / "train_data_batch_1.npz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"train_data_batch_1.npz cannot be read .* truncated"):
        load(f"imagenet32:{tmp_path}")
