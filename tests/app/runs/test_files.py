import errno
import os

import pytest

from dpbam.app.runs import RunError
from dpbam.app.runs.files import (
    append_json_line,
    locked,
    plain,
    read_json,
    read_json_lines,
    write_atomic,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomic(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*free some space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "log"
    for step in range(4):
        append_json_line(path, {"step": step, "loss": float("nan")})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in read_json_lines(path)] == [0, 1, 2, 3]


def test_json_without_nan_and_infinity():
    assert plain({"a": [float("inf"), float("nan"), 1.5]}) == {"a": ["infinite", None, 1.5]}


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_json_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "a").write_text(content)
    with pytest.raises(RunError):
        read_json(tmp_path / "a")


def test_a_lock_keeps_others_out_and_is_free_afterwards(tmp_path):
    with locked(tmp_path / "lock"), pytest.raises(RunError, match="busy"):  # noqa: SIM117
        with locked(tmp_path / "lock", busy="busy"):
            pass
    with locked(tmp_path / "lock", busy="busy"):
        pass
    with pytest.raises(RunError, match="cannot be written"), locked(tmp_path / "no" / "lock"):
        pass
