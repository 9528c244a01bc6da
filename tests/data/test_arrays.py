"""Data sets of arrays, and of a user's own function."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from dpbam.data import DataError, DataSet, from_arrays, load, load_pair
from dpbam.data.arrays import as_images
from dpbam.data.labels import class_order, number_labels

from .helpers import random_pixels


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 8, 9), (5, 1, 8, 9)),
        ((5, 8, 9, 1), (5, 1, 8, 9)),
        ((5, 8, 9, 3), (5, 3, 8, 9)),
        ((5, 1, 8, 9), (5, 1, 8, 9)),
        ((5, 3, 8, 9), (5, 3, 8, 9)),
    ],
)
def test_the_layouts_people_have(shape, expected):
    array = random_pixels(5, 0, shape[1:])
    images = as_images(array, "x")
    assert images.shape == expected
    assert np.shares_memory(images, array)
    channels_last = len(shape) == 4 and shape[3] in (1, 3)
    expected_pixel = array[2, 3, 4] if channels_last else array.reshape(expected)[2, :, 3, 4]
    assert np.array_equal(images[2, :, 3, 4], np.atleast_1d(expected_pixel))


@pytest.mark.parametrize("shape", [(5, 64), (5, 8, 8, 4), (5, 2, 8, 8), (5, 3, 2, 8, 8), (5,)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(DataError, match=r"x have shape .* must be \[N, H, W\]"):
        as_images(np.zeros(shape, np.uint8), "x")


def test_channels_that_could_be_either_axis_are_refused():
    with pytest.raises(DataError, match=r"axis 1 or axis 3"):
        as_images(np.zeros((5, 3, 8, 3), np.uint8), "x")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint16, bool])
def test_only_uint8_images(dtype):
    with pytest.raises(DataError, match=r"must be uint8 .* convert them first"):
        from_arrays(np.zeros((2, 8, 8), dtype), [0, 1])


@pytest.mark.parametrize(
    "labels",
    [[0, 1, 2], np.array([[0], [1], [2]], np.uint8), np.array([0, 1, 2], np.int8)],
)
def test_whole_numbers_are_labels(labels):
    data = from_arrays(random_pixels(3, 0, (4, 4)), labels)
    assert data.labels.tolist() == [0, 1, 2]
    assert data.class_names == ("0", "1", "2")


@pytest.mark.parametrize("dtype", ["U", "S"])
def test_strings_are_labels_in_sorted_order(dtype):
    labels = np.array(["well", "ill", "well"]).astype(dtype)
    data = from_arrays(random_pixels(3, 0, (4, 4)), labels)
    assert data.class_names == ("ill", "well")
    assert data.labels.tolist() == [1, 0, 1]


def test_names_that_are_numbers_sort_as_numbers():
    assert class_order(["10", "9", "1"]) == ["1", "9", "10"]
    assert class_order(["10", "9", "a"]) == ["10", "9", "a"]


def test_splits_are_numbered_alike():
    numbers, names = number_labels({"a": np.array(["y", "x"]), "b": np.array(["z"])})
    assert names == ("x", "y", "z")
    assert (numbers["a"].tolist(), numbers["b"].tolist()) == ([1, 0], [2])


def test_a_class_may_be_missing_from_one_split():
    numbers, names = number_labels({"a": np.array([0, 1]), "b": np.array([2, 2])})
    assert names == ("0", "1", "2")
    assert numbers["b"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0, 1, 5], "go up to 5 but skip 2, 3, 4: number the classes"),
        ([1, 2, 3], "skip 0"),
        ([0, 1, 10**12], r"skip 2, 3, 4, 5, 6, \.\.\."),
        ([0, -1, 1], "out of range: record 1 has -1"),
        ([0.0, 1.0, 0.0], "could be classes or measurements: pass --task"),
        ([0.5, np.nan, 1.0], "record 1 has nan, which is not a number"),
        ([[0, 1], [1, 0], [1, -1]], "record 2 has -1 for finding 1, but a finding is 0 or 1"),
        ([[0, 1], [1, 0], [1, 0]], "exactly one of 2 findings, which could be one class each"),
        (["|", "No Finding", ""], "hold no finding at all"),
        (np.zeros((3, 4, 4), int), r"masks of arrays are int64 .* must be uint8"),
        (np.array([0, "a", None], dtype=object), "must be numbers or strings"),
    ],
)
def test_labels_that_are_refused(labels, sentence):
    with pytest.raises(DataError, match=sentence):
        from_arrays(random_pixels(3, 0, (4, 4)), labels)


def test_class_names_allow_gaps_but_not_labels_beyond_them():
    images = random_pixels(3, 0, (4, 4))
    data = from_arrays(images, [0, 2, 2], class_names=["a", "b", "c"])
    assert data.num_classes == 3
    with pytest.raises(DataError, match=r"label 3, outside 0\.\.2"):
        from_arrays(images, [0, 3, 1], class_names=["a", "b", "c"])
    with pytest.raises(DataError, match=r"'d', which is not among class_names"):
        from_arrays(images, ["a", "d", "b"], class_names=["a", "b", "c"])


def test_columns_hold_numbers_or_strings():
    images = random_pixels(2, 0, (4, 4))
    data = from_arrays(images, [0, 1], columns={"age": [3, 4.5], "id": np.array([b"x", b"y"])})
    assert data.columns["age"].tolist() == [3, 4.5]
    assert data.columns["id"].tolist() == ["x", "y"]
    with pytest.raises(DataError, match=r"arrays: who must hold one number or string"):
        from_arrays(images, [0, 1], columns={"who": np.array([None, 1], dtype=object)})
    with pytest.raises(DataError, match=r"one number or string per record"):
        from_arrays(images, [0, 1], columns={"who": np.zeros((2, 2))})


MODULE = """
import numpy as np
from dpbam.data import DataSet, Images, from_arrays

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

def listed(split):
    data = from_arrays(pixels(6, 0), ["x", "y"] * 3)
    return DataSet("listed", data.images, data.labels, ["x", "y"], {"age": [1, 2, 3, 4, 5, 6]})

def gives_up(split):
    raise SystemExit("no table")

def mixed(split):
    return listed(split) if split == "train" else both(split)

class Broken(Images):
    shape = (6, 1, 4, 4)
    def read(self, indices):
        raise KeyError("no such row")

def unreadable(split):
    return DataSet("u", Broken(), [0, 1] * 3, ("x", "y"))

class Misshapen(Broken):
    def read(self, indices):
        return pixels(len(indices), 0)

def misshapen(split):
    return DataSet("m", Misshapen(), [0, 1] * 3, ("x", "y"))

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
        ("my_data:gives_up", r"\('train'\) failed with SystemExit: no table"),
        ("my_data:mixed", "got DataSet for one split and arrays for the other"),
        ("my_data:wrong", r"must return \(images, labels\).* got list"),
        ("my_data:apart", "different class names"),
        ("bad_import:x", "importing bad_import failed: No module named 'not_installed"),
        ("bad_code:x", "importing bad_code failed with ZeroDivisionError"),
    ],
)
def test_errors_are_sentences(spec, sentence):
    with pytest.raises(DataError, match=sentence):
        load(spec)


def test_class_names_and_columns_may_be_lists():
    train, _ = load_pair("my_data:listed")
    assert train.class_names == ("x", "y")
    assert train.columns["age"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "says"),
    [("unreadable", "cannot be read: KeyError: 'no such row'"), ("misshapen", r"\[2, 4, 4\], not")],
)
def test_images_of_the_users_own_that_fail(name, says):
    with pytest.raises(DataError, match=says):
        load(f"my_data:{name}").batch(np.arange(2))


class NoArray:
    def __array__(self, *args, **options):
        raise RuntimeError("two\nlines")


PIXELS = np.zeros((6, 4, 4), np.uint8)
WRONG = {
    "None": None, "a number": 3, "text": "xy", "bytes": b"xy", "a list": [1, 2], "a dict": {1: 2},
    "a set": {1}, "rows that differ": [[1], [2, 3]], "a tensor": torch.zeros(3),
    "objects": [{}] * 6, "a gradient": torch.zeros(6, requires_grad=True),
    "complex": np.zeros(6, complex),
    "dates": np.array(["2020"] * 6, "M8[Y]"), "nothing": [], "a type": int, "no array": NoArray(),
    "too large": [10**400] * 6, "shares": np.full((6, 2), 0.5), "one value": np.array(1),
}  # fmt: skip
RIGHT = {("masks", "None"), ("unit", "None"), ("unit", "text"), ("name", "text"),
         ("notes", "nothing")}  # fmt: skip


def data_set(key, value):
    fields = {"name": "mine", "images": from_arrays(PIXELS, [0, 1] * 3).images,
              "labels": [0, 1] * 3, "class_names": ["a", "b"]}  # fmt: skip
    return DataSet(**{**fields, key: value})


def arrays(key, value):
    return from_arrays(**{"images": PIXELS, "labels": [0, 1] * 3, key: value})


FIELDS = [
    (data_set, key)
    for key in ("name", "images", "labels", "class_names", "columns", "notes", "masks", "unit")
]
FIELDS += [(arrays, key) for key in ("images", "labels", "columns", "unit")]  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("make", "key"), FIELDS)
def test_a_field_of_a_wrong_type_is_one_sentence(make, key, kind):
    if (key, kind) in RIGHT or (make is arrays and (key, kind) == ("columns", "None")):
        assert make(key, WRONG[kind]).unit in (None, "xy")
        return
    with pytest.raises(DataError) as refused:
        make(key, WRONG[kind])
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_columns_of_a_data_frame_are_taken(tmp_path, monkeypatch):
    code = (
        "import numpy as np\n"
        "class Frame:\n"
        "    def keys(self):\n"
        "        return ['patient']\n"
        "    def __getitem__(self, name):\n"
        "        return list('aabb')\n"
        "def good(split):\n"
        "    return np.zeros((4, 8, 8), 'uint8'), [0, 1, 0, 1], Frame()\n"
        "def bad(split):\n"
        "    return np.zeros((4, 8, 8), 'uint8'), [0, 1, 0, 1], list('aabb')\n"
    )
    (tmp_path / "framed_set.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert load("framed_set:good").columns["patient"].tolist() == list("aabb")
    with pytest.raises(DataError, match="got columns of type list, not a dict from names to valu"):
        load("framed_set:bad")
