"""CIFAR-10, CIFAR-100 and ImageNet32: found, fetched, read, and refused where they are damaged."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpbam.data import DataError, load, load_pair
from dpbam.data.built_in import CLASSES_10, CLASSES_100, RELEASES, SUPERCLASSES_100

from .helpers import binary_cifar, random_pixels, tar_of, write_cifar10, write_imagenet32

BATCHES = [f"data_batch_{k}" for k in range(1, 6)]
REAL = Path.home() / ".cache" / "dpbam" / "cifar-10-batches-bin"


def all_pixels(data):
    return data.images.read(np.arange(len(data)))


def use_archive(monkeypatch, **changes) -> None:
    """Change what is known of the official archive of CIFAR-10."""
    monkeypatch.setitem(RELEASES, "cifar10", replace(RELEASES["cifar10"], **changes))


def test_the_class_names():
    assert (len(CLASSES_10), len(CLASSES_100), len(SUPERCLASSES_100)) == (10, 100, 20)
    assert list(CLASSES_100) == sorted(CLASSES_100)  # the official order is the alphabet's
    assert list(SUPERCLASSES_100) == sorted(SUPERCLASSES_100)


@pytest.mark.parametrize("where", ["parent", "folder", "root"])
def test_binary_cifar10(tmp_path, where):
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin", n=20)
    spec = {"parent": f"cifar10:{tmp_path}", "folder": f"cifar10:{folder}", "root": "cifar10"}
    train, test = load_pair(spec[where], root=tmp_path)
    assert (len(train), len(test), train.shape) == (100, 20, (3, 32, 32))
    assert (train.name, test.name) == ("cifar10/train", "cifar10/test")
    assert train.class_names == CLASSES_10
    expected = np.concatenate([binary_cifar(20, 10, seed=k)[1] for k in range(5)])
    assert np.array_equal(all_pixels(train), expected.reshape(-1, 3, 32, 32))
    assert train.labels.tolist() == [k % 10 for k in range(20)] * 5
    assert np.array_equal(all_pixels(test).reshape(20, -1), binary_cifar(20, 10, seed=5)[1])


def test_cifar100(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for k, name in enumerate(["train", "test"]):
        (folder / f"{name}.bin").write_bytes(binary_cifar(100, 100, seed=k)[0])
    train = load("cifar100", root=tmp_path)
    assert train.labels.tolist() == list(range(100))
    assert train.class_names == CLASSES_100
    assert train.columns["superclass"][21] == "fish"


def test_python_archives_are_not_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in [*BATCHES, "test_batch"]:
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(b"a pickle")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"its archive")
    with pytest.raises(DataError, match=r"put cifar-10-binary.tar.gz"):
        load(f"cifar10:{tmp_path}")


def official_tar(path: Path) -> str:
    files = {
        f"cifar-10-batches-bin/{name}.bin": binary_cifar(10, 10, seed=k)[0]
        for k, name in enumerate([*BATCHES, "test_batch"])
    }
    return tar_of(files, path)


def test_an_archive_in_the_folder_is_unpacked_once(tmp_path, data_folder, monkeypatch):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    use_archive(monkeypatch, md5=official_tar(archive))
    for spec in (f"cifar10:{tmp_path}", f"cifar10:{archive}"):
        assert len(load(spec)) == 50
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]


def test_a_download(tmp_path, data_folder, monkeypatch, server):
    md5 = official_tar(tmp_path / "cifar-10-binary.tar.gz")
    server.content = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
    use_archive(monkeypatch, md5=md5, url=f"{server.url}/cifar-10-binary.tar.gz")
    with pytest.raises(DataError, match=r"no cifar10 in .*: put cifar-10-binary.tar.gz"):
        load("cifar10", download=False)
    assert len(load("cifar10")) == 50
    assert server.requests == 1
    assert len(load("cifar10", download=False)) == 50
    present = sorted(path.name for path in data_folder.iterdir())
    assert present == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


def test_a_wrong_checksum_is_refused_and_nothing_unpacked(tmp_path, data_folder):
    official_tar(tmp_path / "cifar-10-binary.tar.gz")  # its md5 is not the official one
    with pytest.raises(DataError, match=r"md5 .*, not c32a1d4ab5d03f1284b67883e8d87530"):
        load(f"cifar10:{tmp_path}")
    assert list(data_folder.iterdir()) == []


def test_a_truncated_archive(tmp_path, data_folder, monkeypatch):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    official_tar(archive)
    archive.write_bytes(archive.read_bytes()[:50_000])
    use_archive(monkeypatch, md5=hashlib.md5(archive.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"cannot be unpacked"):
        load(f"cifar10:{tmp_path}")
    assert list(data_folder.iterdir()) == []


def test_a_path_without_cifar_says_what_to_put_there(tmp_path):
    with pytest.raises(DataError, match=rf"no cifar100 in {tmp_path}: put cifar-100-binary.tar.gz"):
        load(f"cifar100:{tmp_path}")


def test_a_missing_file_is_named(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_3.bin"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize("size", [0, 10_000])
def test_a_truncated_file_is_named(tmp_path, size):
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_3.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"data_batch_3.bin has .* whole number of records of 3073"):
        load("cifar10", root=tmp_path)


def test_a_label_out_of_range_is_named(tmp_path):
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin")
    raw = bytearray((folder / "data_batch_2.bin").read_bytes())
    raw[3073] = 12
    (folder / "data_batch_2.bin").write_bytes(raw)
    with pytest.raises(DataError, match=r"record 11 has label 12, outside 0\.\.9"):
        load("cifar10", root=tmp_path)


def test_a_superclass_out_of_range(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.bin").write_bytes(b"\x63\x00" + bytes(3072))
    with pytest.raises(DataError, match=r"superclasses outside"):
        load("cifar100", root=tmp_path)


@pytest.mark.skipif(not REAL.is_dir(), reason="no CIFAR-10: dpbam data fetch cifar10")
def test_the_real_cifar10():
    train, test = load_pair("cifar10", root=REAL.parent, download=False)
    assert (len(train), len(test)) == (50_000, 10_000)
    assert np.bincount(train.labels).tolist() == [5000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    first, labels = train.batch(np.array([0, 49_999]))
    assert labels.tolist() == [6, 1]  # a frog, an automobile
    assert first[0, :, 0, 0].tolist() == [59, 62, 63]  # the frog's first pixel, red green blue
    assert len(train.fingerprint()) == 64


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
