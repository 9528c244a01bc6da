from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpbam.data import DataError, load, load_pair
from dpbam.data.cifar import LAYOUTS
from dpbam.data.cifar_names import CIFAR10, CIFAR100, CIFAR100_SUPERCLASSES

from .helpers import binary_cifar, python2_pickle, random_pixels, tar_of, write_cifar10

BATCHES = [f"data_batch_{k}" for k in range(1, 6)]
REAL = Path.home() / ".cache" / "dpbam" / "cifar-10-batches-bin"


def all_pixels(data):
    return data.images.read(np.arange(len(data)))


def use_archive(monkeypatch, name: str, which: int, **changes) -> None:
    """Change what is known of one of the official archives."""
    layouts = list(LAYOUTS[name])
    layouts[which] = replace(layouts[which], archive=replace(layouts[which].archive, **changes))
    monkeypatch.setitem(LAYOUTS, name, tuple(layouts))


def test_the_class_names():
    assert (len(CIFAR10), len(CIFAR100), len(CIFAR100_SUPERCLASSES)) == (10, 100, 20)
    assert list(CIFAR100) == sorted(CIFAR100)  # the official order is the alphabet's
    assert list(CIFAR100_SUPERCLASSES) == sorted(CIFAR100_SUPERCLASSES)


@pytest.mark.parametrize("where", ["parent", "folder", "root"])
def test_binary_cifar10(tmp_path, where):
    folder = write_cifar10(tmp_path / "cifar-10-batches-bin", n=20)
    spec = {"parent": f"cifar10:{tmp_path}", "folder": f"cifar10:{folder}", "root": "cifar10"}
    train, test = load_pair(spec[where], root=tmp_path)
    assert (len(train), len(test), train.shape) == (100, 20, (3, 32, 32))
    assert (train.name, test.name, train.class_names) == ("cifar10/train", "cifar10/test", CIFAR10)
    expected = np.concatenate([binary_cifar(20, 10, seed=k)[1] for k in range(5)])
    assert np.array_equal(all_pixels(train), expected.reshape(-1, 3, 32, 32))
    assert train.labels.tolist() == [k % 10 for k in range(20)] * 5
    assert np.array_equal(all_pixels(test).reshape(20, -1), binary_cifar(20, 10, seed=5)[1])


def test_python_cifar10_is_the_same_set(tmp_path):
    write_cifar10(tmp_path / "bin" / "cifar-10-batches-bin", n=20)
    folder = tmp_path / "py" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for k, name in enumerate([*BATCHES, "test_batch"]):
        _, pixels, labels = binary_cifar(20, 10, seed=k)
        raw = python2_pickle({"data": pixels, "labels": labels.tolist()})
        (folder / name).write_bytes(raw)
    for a, b in zip(
        load_pair("cifar10", root=tmp_path / "bin"),
        load_pair("cifar10", root=tmp_path / "py"),
        strict=True,
    ):
        assert a.fingerprint() == b.fingerprint()


def test_cifar100_in_both_forms(tmp_path):
    binary, python = tmp_path / "cifar-100-binary", tmp_path / "py" / "cifar-100-python"
    for folder in (binary, python):
        folder.mkdir(parents=True)
    for k, name in enumerate(["train", "test"]):
        raw, pixels, labels = binary_cifar(100, 100, seed=k)
        (binary / f"{name}.bin").write_bytes(raw)
        coarse = (labels % 20).tolist()
        batch = {"data": pixels, "fine_labels": labels.tolist(), "coarse_labels": coarse}
        (python / name).write_bytes(python2_pickle(batch))
    one, two = load("cifar100", root=tmp_path), load("cifar100", root=tmp_path / "py")
    assert one.labels.tolist() == list(range(100))
    assert one.class_names == CIFAR100
    assert one.columns["superclass"][21] == "fish"
    assert one.fingerprint() == two.fingerprint()


def official_tar(path: Path) -> str:
    files = {
        f"cifar-10-batches-bin/{name}.bin": binary_cifar(10, 10, seed=k)[0]
        for k, name in enumerate([*BATCHES, "test_batch"])
    }
    return tar_of(files, path)


def test_an_archive_in_the_folder_is_unpacked_once(tmp_path, data_folder, monkeypatch):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    use_archive(monkeypatch, "cifar10", 0, md5=official_tar(archive))
    for spec in (f"cifar10:{tmp_path}", f"cifar10:{archive}"):
        assert len(load(spec)) == 50
    assert [path.name for path in data_folder.iterdir()] == ["cifar-10-batches-bin"]


def test_a_download(tmp_path, data_folder, monkeypatch):
    md5 = official_tar(tmp_path / "away.tar.gz")
    url = (tmp_path / "away.tar.gz").as_uri()
    use_archive(monkeypatch, "cifar10", 0, md5=md5, url=url)
    with pytest.raises(DataError, match=r"no cifar10 in .*: put cifar-10-binary.tar.gz"):
        load("cifar10", download=False)
    assert len(load("cifar10")) == 50
    (tmp_path / "away.tar.gz").unlink()
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
    use_archive(monkeypatch, "cifar10", 0, md5=hashlib.md5(archive.read_bytes()).hexdigest())
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


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"labels": [0]}, "has no 'data'"),
        ({"data": random_pixels(2), "labels": [0]}, "uint8 data .* with a label each"),
        ({"data": random_pixels(2)[:, :100], "labels": [0, 1]}, "uint8 data"),
        ({"data": random_pixels(2).astype(float), "labels": [0, 1]}, "uint8 data"),
        ({"data": random_pixels(2), "labels": ["a", "b"]}, "uint8 data"),
    ],
)
def test_python_batches_of_another_form(tmp_path, batch, sentence):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*BATCHES, "test_batch"]:
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=sentence):
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
