"""A data set and its images: what is refused, and what is read."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbam.data import DataError, DataSet, from_arrays, to_float
from dpbam.data import base as base_module
from dpbam.data.base import ArrayImages, Concatenated, Images

from .helpers import random_pixels


def small(n: int = 6, seed: int = 0, **changes) -> DataSet:
    arrays = {
        "images": random_pixels(n, seed, (4, 5, 3)),
        "labels": np.arange(n) % 2,
        "columns": {"patient": np.array([f"p{k // 2}" for k in range(n)])},
        "name": "small",
    } | changes
    return from_arrays(arrays.pop("images"), arrays.pop("labels"), **arrays)


def test_what_it_says_about_itself():
    data = small()
    assert (len(data), data.shape, data.num_classes) == (6, (3, 4, 5), 2)
    assert data.class_names == ("0", "1")
    assert repr(data) == "DataSet('small', 6 images (3, 4, 5), 2 classes)"


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_batch_takes_arrays_and_tensors(kind):
    pixels = random_pixels(6, 0, (4, 5, 3))
    images, labels = small().batch(kind([4, 1, 4]))
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert np.array_equal(images.numpy(), pixels.transpose(0, 3, 1, 2)[[4, 1, 4]])
    assert labels.tolist() == [0, 1, 0]


def test_an_empty_batch_is_a_batch():
    images, labels = small().batch(torch.tensor([], dtype=torch.int64))
    assert images.shape == (0, 3, 4, 5)
    assert labels.shape == (0,)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_index_outside_is_refused(index):
    with pytest.raises(IndexError, match=r"records 0\.\.5"):
        small().batch(np.array([0, index]))


def test_it_is_frozen():
    data = small()
    with pytest.raises(FrozenInstanceError):
        data.name = "other"
    with pytest.raises(ValueError, match=r"read-only"):
        data.labels[0] = 1
    with pytest.raises(TypeError):
        data.columns["sex"] = np.zeros(6)


def test_the_caller_keeps_the_labels_array():
    labels = np.array([0, 1, 0, 1, 0, 1])
    data = small(labels=labels)
    labels[0] = 1
    assert data.labels[0] == 0


@pytest.mark.parametrize(
    ("labels", "columns", "sentence"),
    [
        ([0, 1], {}, "3 images but 2 labels"),
        ([0, 1, 2], {}, r"record 2 has label 2, outside 0\.\.1 \(1 such labels\)"),
        ([0, -1, 1], {}, r"record 1 has label -1, outside 0\.\.1"),
        ([0, 1, 1], {"sex": np.array(["m"])}, "column 'sex' must have 3 values"),
    ],
)
def test_inconsistent_sets_cannot_be_made(labels, columns, sentence):
    images = ArrayImages(np.zeros((3, 1, 2, 2), np.uint8))
    with pytest.raises(DataError, match=sentence):
        DataSet("bad", images, np.array(labels), ("a", "b"), columns)


def test_an_empty_set_cannot_be_made():
    with pytest.raises(DataError, match=r"no images"):
        DataSet("none", ArrayImages(np.zeros((0, 1, 2, 2), np.uint8)), np.array([]), ("a", "b"))


def test_subset_keeps_rows_together():
    part = small().subset(np.array([5, 2]), name="part")
    assert part.name == "part"
    assert part.labels.tolist() == [1, 0]
    assert part.columns["patient"].tolist() == ["p2", "p1"]
    assert torch.equal(part.batch(np.array([0]))[0], small().batch(np.array([5]))[0])


def test_subset_refuses_a_record_twice():
    for indices in ([3, 1, 3], [0, -len(small())]):
        with pytest.raises(DataError, match=rf"record {indices[0]} of .* is chosen twice"):
            small().subset(np.array(indices))


def test_space_around_the_text_of_a_column_makes_no_other_unit():
    columns = {"patient": np.array(["ann", "ann ", " ann", "bo"]), "age": np.arange(4)}
    found = small(4, columns=columns).columns
    assert found["patient"].tolist() == ["ann", "ann", "ann", "bo"]
    assert found["age"].tolist() == [0, 1, 2, 3]


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(DataError, match=r"no column 'patent': did you mean 'patient'"):
        small().column("patent")


def changed(index: tuple[int, ...]) -> np.ndarray:
    pixels = random_pixels(6, 0, (4, 5, 3))
    pixels[index] ^= 1
    return pixels


@pytest.mark.parametrize(
    "other",
    [
        {"images": changed((0, 0, 0, 0))},
        {"images": changed((5, 3, 4, 2))},
        {"labels": [1, 0, 0, 1, 0, 1]},
        {"class_names": ["well", "ill"]},
        {"columns": {"patient": np.array(["p0", "p0", "p1", "p1", "p2", "p9"])}},
        {"columns": {}},
        {"n": 5},
    ],
    ids=["first pixel", "last pixel", "labels", "classes", "one patient", "no column", "length"],
)
def test_the_fingerprint_tells_a_change(other):
    assert small(**other).fingerprint() != small().fingerprint()


def test_the_fingerprint_is_of_the_content_alone():
    assert small().fingerprint() == replace(small(), name="elsewhere", notes=("x",)).fingerprint()
    # Spelt out: a fingerprint in a run folder must hold for later versions too.
    zeros = from_arrays(np.zeros((2, 2, 2), np.uint8), [0, 1])
    content = b"((2, 1, 2, 2), ('0', '1'))" + bytes(8) + b"\x01" + bytes(7) + bytes(8)
    assert zeros.fingerprint() == hashlib.sha256(content).hexdigest()


def test_to_float_maps_the_whole_range_to_minus_one_to_one():
    levels = torch.arange(256, dtype=torch.uint8)
    floats = to_float(levels)
    assert floats.dtype == torch.float32
    assert (floats[0], floats[255]) == (-1.0, 1.0)
    assert torch.allclose(floats, levels.double().div(127.5).sub(1).float(), atol=1e-6)
    assert levels[255] == 255  # the images themselves are left alone


def test_to_float_refuses_floats():
    with pytest.raises(TypeError, match=r"uint8"):
        to_float(torch.zeros(2))


def numbered(n: int, start: int = 0) -> np.ndarray:
    return (np.arange(start, start + n, dtype=np.uint8))[:, None, None, None]


@pytest.mark.parametrize(
    "array", [np.zeros((2, 1, 3, 3)), np.zeros((2, 3, 3), np.uint8), np.zeros((2, 9), np.uint8)]
)
def test_only_uint8_with_four_axes(array):
    with pytest.raises(DataError, match=r"uint8 \[N, C, H, W\]"):
        ArrayImages(array)


def test_read_gives_a_contiguous_copy_in_the_order_asked_for():
    array = random_pixels(4, shape=(5, 6, 3))
    images = ArrayImages(array.transpose(0, 3, 1, 2))
    got = images.read(np.array([3, 0, 3]))
    assert got.flags.c_contiguous
    assert np.array_equal(got, array.transpose(0, 3, 1, 2)[[3, 0, 3]])
    got[:] = 0
    assert np.array_equal(images.read(np.array([3])), array.transpose(0, 3, 1, 2)[[3]])


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    picks=st.lists(st.integers(0, 10**6), max_size=12),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_concatenated_is_concatenation(sizes, picks):
    starts = np.cumsum([0, *sizes])
    parts = [ArrayImages(numbered(n, s)) for n, s in zip(sizes, starts[:-1], strict=True)]
    whole = Concatenated(parts)
    assert len(whole) == sum(sizes)
    indices = np.array([p % sum(sizes) for p in picks], dtype=np.int64)
    assert whole.read(indices).ravel().tolist() == indices.tolist()


def test_concatenated_refuses_two_shapes():
    with pytest.raises(DataError, match="one shape"):
        Concatenated([ArrayImages(numbered(1)), ArrayImages(np.zeros((1, 1, 2, 2), np.uint8))])


def test_selected_reads_and_names_the_records_of_the_other_set():
    some = ArrayImages(numbered(10)).select(np.array([7, 2]))
    again = some.select(np.array([1]))
    assert some.read(np.array([1, 0])).ravel().tolist() == [2, 7]
    assert again.read(np.array([0])).ravel().tolist() == [2]
    assert some.describe(0) == "record 7"
    assert again.describe(0) == "record 2"


def test_walk_covers_every_record_once_in_chunks(monkeypatch):
    monkeypatch.setattr(base_module, "_CHUNK", 4)
    seen = list(ArrayImages(numbered(10)).walk())
    assert [len(part) for part, _ in seen] == [4, 4, 2]
    assert np.concatenate([pixels.ravel() for _, pixels in seen]).tolist() == list(range(10))


def test_hashing_covers_all_of_a_small_set_and_evenly_some_of_a_large_one(monkeypatch):
    images = ArrayImages(numbered(100))
    assert images.hashed_records().tolist() == list(range(100))
    monkeypatch.setattr(base_module, "_HASH_WHOLE", 99)
    monkeypatch.setattr(base_module, "_HASH_RECORDS", 10)
    assert images.hashed_records().tolist() == list(range(0, 100, 11))


def test_hashing_decodes_few():
    class Slow(Images):
        decodes = True
        shape = (1000, 1, 1, 1)

        def read(self, indices):
            return numbered(len(indices))

    assert len(Slow().hashed_records()) == 256


def test_an_empty_batch_has_the_right_shape():
    nothing = np.array([], dtype=np.int64)
    one = ArrayImages(numbered(3))
    for images in (one, Concatenated([one, one]), one.select(np.array([0]))):
        assert images.read(nothing).shape == (0, 1, 1, 1)
