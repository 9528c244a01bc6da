from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpbam.data import DataError
from dpbam.data.pickles import load_batch

from .helpers import python2_pickle, random_pixels


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "batch"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_protocol_gives_back_what_was_written(tmp_path, protocol, order):
    batch = {
        "data": np.asarray(random_pixels(4), order=order),
        "labels": [1, 2, 3, 4],
        "mean": np.linspace(0, 1, 7),
        "big-endian": np.arange(3, dtype=">i4"),
        "wide": [np.int64(5), np.int64(-6)],
        "batch_label": "training batch 1 of 5",
        "filenames": [b"a.png", b"b.png"],
    }
    got = load_batch(written(tmp_path, pickle.dumps(batch, protocol=protocol)))
    assert set(got) == set(batch)
    for key in ("data", "mean", "big-endian"):
        assert got[key].dtype == batch[key].dtype
        assert np.array_equal(got[key], batch[key])
    assert got["labels"] == [1, 2, 3, 4]
    assert np.asarray(got["wide"]).tolist() == [5, -6]
    assert got["batch_label"] == "training batch 1 of 5"
    assert got["filenames"] == ["a.png", "b.png"]


def test_python_2_pickles_as_in_the_official_archives(tmp_path):
    pixels = random_pixels(3)
    raw = python2_pickle({"data": pixels, "labels": [7, 8, 9]})
    assert np.array_equal(pickle.loads(raw, encoding="bytes")[b"data"], pixels)  # it is genuine
    got = load_batch(written(tmp_path, raw))
    assert np.array_equal(got["data"], pixels)
    assert got["labels"] == [7, 8, 9]


class Calls:
    """Pickles to a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.mkdir, "mkdir"), (eval, "eval"), (getattr, "getattr"), (np.load, "load")],
)
def test_a_hostile_pickle_is_refused_before_it_runs(tmp_path, function, name, protocol):
    target = tmp_path / "made-by-the-pickle"
    argument = f"__import__('os').mkdir({str(target)!r})" if function is eval else str(target)
    raw = pickle.dumps({"data": Calls(function, argument)}, protocol=protocol)
    with pytest.raises(DataError, match=rf"asks for \w+\.(\w+\.)?{name}, which no data set needs"):
        load_batch(written(tmp_path, raw))
    assert not target.exists()


def test_the_hostile_pickle_would_have_run(tmp_path):
    """The negative control: pickle itself does what the file says."""
    target = tmp_path / "made-by-the-pickle"
    pickle.loads(pickle.dumps({"data": Calls(os.mkdir, str(target))}))
    assert target.exists()


# {"a": _codecs.encode("b", "latin1")} and {"a": numpy.uint8(98)}, each open for a state
LATIN1 = b"\x80\x02}U\x01ac_codecs\nencode\nX\x01\x00\x00\x00bX\x06\x00\x00\x00latin1\x86R"
SCALAR = (
    b"\x80\x02}U\x01acnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n"
    b"U\x02u1K\x00K\x01\x87RU\x01b\x86R"
)


def test_the_stand_ins_are_built_as_they_should_be(tmp_path):
    assert load_batch(written(tmp_path, LATIN1 + b"s.")) == {"a": "b"}
    assert load_batch(written(tmp_path, SCALAR + b"s.")) == {"a": 98}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (LATIN1 + b"}bs.", "bytes have no state"),
        (SCALAR + b"}bs.", "has its state already"),
        (b"", "not a readable batch file"),
        (b"not a pickle", "not a readable batch file"),
        (pickle.dumps([1, 2]), "holds a list instead of a dict"),
        (pickle.dumps({"data": np.array([None, {}], dtype=object)}), "'O8' are not allowed"),
        (pickle.dumps({"data": np.array(["a"])}), "'U1' are not allowed"),
        (b"\x80\x02}U\x01acnumpy\nndarray\n)\x81s.", "without content"),
        (b"\x80\x02}U\x01ac_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86Rs.", "hex"),
    ],
    ids=[
        "state of bytes",
        "state of a number",
        "empty",
        "text",
        "a list",
        "objects",
        "strings",
        "no content",
        "codec",
    ],
)
def test_what_else_is_refused(tmp_path, content, sentence):
    with pytest.raises(DataError, match=sentence):
        load_batch(written(tmp_path, content))


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none: No such file"):
        load_batch(tmp_path / "none")


GOOD = pickle.dumps({"data": random_pixels(2), "labels": [1, 2]}, protocol=2)
OLD = python2_pickle({"data": random_pixels(2), "labels": [1, 2]})


@given(
    raw=st.sampled_from([GOOD, OLD]),
    cut=st.integers(0, 10_000),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
)
@settings(
    deadline=None,
    max_examples=300,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_damaged_file_is_read_or_refused_but_nothing_else(tmp_path, raw, cut, flips):
    damaged = bytearray(raw[: len(raw) - cut % len(raw)])
    for position, value in flips:
        if position < len(damaged):
            damaged[position] = value
    try:
        content = load_batch(written(tmp_path, bytes(damaged)))
    except DataError:
        return
    assert isinstance(content, dict)


@pytest.mark.parametrize("raw", [GOOD, OLD], ids=["new", "old"])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, raw):
    for end in range(0, len(raw) - 1, 97):
        with pytest.raises(DataError):
            load_batch(written(tmp_path, raw[:end]))
