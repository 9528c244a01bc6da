from __future__ import annotations

import numpy as np
import pytest

from dpbam.data import DataError, from_arrays
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
