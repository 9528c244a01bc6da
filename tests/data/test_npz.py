from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpbam.data import DataError, load, load_pair
from dpbam.data import npz as npz_module

from .helpers import random_pixels

PNEUMONIA = Path(__file__).parents[3] / "shared" / "data" / "pneumoniamnist.npz"


def medmnist(path: Path, shape: tuple[int, ...] = (28, 28), **changes) -> str:
    arrays = {}
    for k, (split, n) in enumerate({"train": 20, "val": 6, "test": 8}.items()):
        arrays[f"{split}_images"] = random_pixels(n, k, shape)
        arrays[f"{split}_labels"] = (np.arange(n) % 2).astype(np.uint8)[:, None]
    arrays |= changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


@pytest.mark.parametrize(("shape", "channels"), [((28, 28), 1), ((28, 28, 3), 3)])
def test_medmnist_has_three_splits(tmp_path, shape, channels):
    spec = medmnist(tmp_path / "x.npz", shape)
    train, test = load_pair(spec)
    val = load(spec, split="val")
    assert (len(train), len(val), len(test)) == (20, 6, 8)
    assert train.shape == (channels, 28, 28)
    assert (train.name, val.name, test.name) == ("x.npz/train", "x.npz/val", "x.npz/test")
    expected = random_pixels(8, 2, shape).reshape(8, 28, 28, channels).transpose(0, 3, 1, 2)
    assert np.array_equal(test.images.read(np.arange(8)), expected)
    assert test.labels.tolist() == [0, 1] * 4


MEDMNIST = {
    "pathmnist (9 classes)": ((28, 28, 3), np.arange(18)[:, None] % 9, None, "single-label", 9),
    "pneumoniamnist (2 classes)": ((28, 28), np.arange(18)[:, None] % 2, None, "single-label", 2),
    "chestmnist (14 findings)": (
        (28, 28), np.arange(18)[:, None] >> np.arange(14) & 1, None, "multi-label", 14),
    "retinamnist (grades)": ((28, 28, 3), np.arange(18)[:, None] % 5, None, "single-label", 5),
    "retinamnist (ordinal)": (
        (28, 28, 3), np.arange(18)[:, None] % 5, "regression", "regression", 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "labels", "task", "found", "classes"), MEDMNIST.values(), ids=MEDMNIST
)
def test_medmnist_of_every_task(tmp_path, shape, labels, task, found, classes):
    arrays = {
        f"{split}_{kind}": random_pixels(18, k, shape) if kind == "images" else labels
        for k, split in enumerate(("train", "val", "test"))
        for kind in ("images", "labels")
    }
    np.savez(tmp_path / "x.npz", **{n: a.astype(np.uint8) for n, a in arrays.items()})
    train, test = load_pair(str(tmp_path / "x.npz"), task=task)
    assert (train.task, train.num_classes, len(train), len(test)) == (found, classes, 18, 18)
    assert np.array_equal(np.asarray(test.labels).reshape(18, -1), labels)


@pytest.mark.skipif(
    not PNEUMONIA.is_file(), reason="no PneumoniaMNIST: pneumoniamnist.npz of MedMNIST"
)
def test_the_real_pneumoniamnist():
    train, test = load_pair(str(PNEUMONIA))
    assert (len(train), len(test), train.shape) == (4708, 624, (1, 28, 28))
    assert np.bincount(test.labels).tolist() == [234, 390]


@pytest.mark.parametrize(
    ("x", "y"), [("x_train", "y_train"), ("images", "labels"), ("data", "target"), ("x", "y")]
)
def test_other_names_and_a_held_out_split(tmp_path, x, y):
    path = tmp_path / "scans.npz"
    np.savez_compressed(path, **{x: random_pixels(20, 0, (8, 8)), y: np.arange(20) % 2})
    train, test = load_pair(str(path))
    assert (len(train), len(test)) == (16, 4)
    assert len(load(str(path), split="all")) == 20


def test_further_arrays_become_columns(tmp_path):
    path = tmp_path / "scans.npz"
    who = np.repeat(["a", "b", "c", "d", "e"], 4)
    np.savez(
        path,
        images=random_pixels(20, 0, (8, 8)),
        labels=np.repeat(["ill", "well", "ill", "well", "ill"], 4),
        patient=who,
        age=np.arange(20),
    )
    train, test = load_pair(str(path), unit="patient")
    assert set(train.columns) == {"age", "patient"}
    assert set(train.columns["patient"]) | set(test.columns["patient"]) == set(who)
    assert not set(train.columns["patient"]) & set(test.columns["patient"])
    assert train.class_names == ("ill", "well")


def test_columns_go_to_the_split_in_their_name(tmp_path):
    ages = {"train_age": np.arange(20), "age_test": np.arange(8), "comment": np.zeros(3)}
    train, test = load_pair(medmnist(tmp_path / "x.npz", **ages))
    assert train.columns["age"].tolist() == list(range(20))
    assert test.columns["age"].tolist() == list(range(8))
    assert set(train.columns) == {"age"}


def test_class_names(tmp_path):
    names = np.array(["normal", "pneumonia", "never seen"])
    assert load(medmnist(tmp_path / "x.npz", class_names=names)).class_names == tuple(names)


def test_large_images_are_memory_mapped(tmp_path, data_folder, monkeypatch):
    small = load(medmnist(tmp_path / "x.npz"))
    monkeypatch.setattr(npz_module, "_IN_MEMORY", 1000)
    large = load(str(tmp_path / "x.npz"))
    assert isinstance(large.images._array.base.base, np.memmap)
    assert large.fingerprint() == small.fingerprint()
    (copy,) = (data_folder / "converted").iterdir()
    assert copy.stat().st_mode & 0o077 == 0


def test_copied_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    copies = []
    unpack = npz_module.NpzFile._unpack

    def counted(self, name, to):
        copies.append(to)
        unpack(self, name, to)

    monkeypatch.setattr(npz_module.NpzFile, "_unpack", counted)
    path = tmp_path / "x.npz"
    for values, expected in (([1, 2], 1), ([1, 2], 1), ([1, 2, 3], 2)):
        if len(copies) < expected:
            np.savez(path, a=values, b=[0])
        mapped = npz_module.NpzFile(path, tmp_path).map_array("a")
        assert isinstance(mapped.base, np.memmap)
        assert mapped.tolist() == values
        assert len(copies) == expected
    npz_module.NpzFile(path, tmp_path).map_array("b")
    assert len(copies) == 3
    assert all(not path.exists() for path in copies)  # they were temporary


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(source, file, size):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    np.savez(tmp_path / "x.npz", a=[1, 2])
    monkeypatch.setattr(npz_module.shutil, "copyfileobj", full)
    with pytest.raises(DataError, match=r"cannot write .*: No space left on device"):
        npz_module.NpzFile(tmp_path / "x.npz", tmp_path).map_array("a")
    assert list((tmp_path / "converted").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_images": random_pixels(20, 0, (28, 28)) / 255}, "float64, but must be uint8"),
        ({"train_images": random_pixels(20)}, r"shape \[20, 3072\]"),
        ({"train_labels": np.zeros((20, 14), np.uint8)}, "1, 14 findings per record"),
        ({"train_labels": np.arange(19) % 2}, "20 images but 19 labels"),
        ({"train_labels": np.arange(20) % 2 * 5}, "skip 2, 3, 4"),
        ({"train_labels": np.arange(20) % 2 - 1}, "record 0 has -1"),
        ({"train_labels": np.array([0, None] * 10, object)}, "'train_labels' .* pickled objects"),
        ({"train_images": np.full(20, None, object)}, "'train_images' .* pickled objects"),
        ({"train_age": np.arange(3)}, "column 'age' must have 20 values"),
        ({"test_labels": None}, "has 'test_images' but not test_labels or y_test"),
        ({"train_labels": None, "train_images": None}, "training needs images"),
        ({"train_labels": np.zeros(20, int)}, "one class only"),
    ],
)
def test_what_is_refused(tmp_path, changes, sentence):
    with pytest.raises(DataError, match=sentence):
        load(medmnist(tmp_path / "x.npz", **changes))


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*none\.npz"):
        load(str(tmp_path / "none.npz"))


@pytest.mark.parametrize("limit", [2**30, 1000], ids=["in memory", "memory-mapped"])
def test_truncated_and_damaged_files(tmp_path, data_folder, monkeypatch, limit):
    monkeypatch.setattr(npz_module, "_IN_MEMORY", limit)
    path = Path(medmnist(tmp_path / "x.npz"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"x\.npz cannot be read .* truncated"):
        load(str(path))
    damaged = bytearray(whole)
    damaged[300:2000] = bytes(1700)  # inside the first array: its checksum no longer holds
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"x\.npz cannot be read"):
        load(str(path))
    assert list(data_folder.glob("converted/*")) == []
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.npz cannot be read"):
        load(str(path))
