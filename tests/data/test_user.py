from __future__ import annotations

import sys

import numpy as np
import pytest

from dpbam.data import DataError, load, load_pair

MODULE = """
import numpy as np
from dpbam.data import from_arrays

def pixels(n, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 4), dtype=np.uint8)

def both(split):
    n = {"train": 10, "test": 4}[split]
    return pixels(n, n), np.arange(n) % 2

def with_columns(split):
    return None if split == "test" else (pixels(10, 1), ["a", "b"] * 5, {"who": list("vvwwxxyyzz")})

def ready(split):
    return from_arrays(pixels(6, len(split)), ["x", "y"] * 3, name=f"mine/{split}")

def nothing(split):
    return None

def fails(split):
    raise KeyError("no such table")

def wrong(split):
    return [1, 2]

def apart(split):
    return from_arrays(pixels(2, 0), [f"{split}1", f"{split}2"])

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(MODULE)
    (tmp_path / "bad_import.py").write_text("import not_installed_anywhere")
    (tmp_path / "bad_code.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    for name in ("my_data", "bad_import", "bad_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_arrays_for_each_split():
    path = list(sys.path)
    train, test = load_pair("my_data:both")
    assert (len(train), len(test), train.shape) == (10, 4, (1, 4, 4))
    assert (train.name, test.name) == ("my_data:both/train", "my_data:both/test")
    assert sys.path == path


def test_columns_and_a_held_out_split():
    train, test = load_pair("my_data:with_columns", unit="who")
    assert len(train) + len(test) == 10
    assert not set(train.columns["who"]) & set(test.columns["who"])


def test_data_sets_are_taken_as_they_are():
    train, test = load_pair("my_data:ready")
    assert (train.name, test.name) == ("mine/train", "mine/test")
    assert not np.array_equal(train.images.read(np.arange(6)), test.images.read(np.arange(6)))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("my_dat:both", "there is no module 'my_dat'"),
        ("my_data:bth", "module 'my_data' has no function 'bth'"),
        ("my_data:number", "is a int, not a function"),
        ("my_data:nothing", r"\('train'\) returned None"),
        ("my_data:fails", r"\('train'\) failed with KeyError: 'no such table'"),
        ("my_data:wrong", r"must return \(images, labels\).* got list"),
        ("my_data:apart", "different class names"),
        ("bad_import:x", "importing bad_import failed: No module named 'not_installed"),
        ("bad_code:x", "importing bad_code failed with ZeroDivisionError"),
    ],
)
def test_errors_are_sentences(spec, sentence):
    with pytest.raises(DataError, match=sentence):
        load(spec)
