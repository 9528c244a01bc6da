from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbam.data import DataError
from dpbam.data import base as base_module
from dpbam.data.base import ArrayImages, Concatenated, Images

from .helpers import random_pixels


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
