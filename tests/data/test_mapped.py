from __future__ import annotations

import numpy as np
import pytest

from dpbam.data import DataError
from dpbam.data.mapped import mapped


def test_written_once_and_anew_when_the_source_changes(tmp_path):
    source = tmp_path / "source"
    source.write_text("one")
    calls = []

    def write(path):
        calls.append(path)
        with path.open("wb") as file:
            np.save(file, np.arange(len(calls)))

    assert len(mapped(source, "a", tmp_path, write)) == 1
    assert len(mapped(source, "a", tmp_path, write)) == 1
    assert len(mapped(source, "b", tmp_path, write)) == 2
    source.write_text("other")
    assert len(mapped(source, "a", tmp_path, write)) == 3
    assert all(not path.exists() for path in calls)  # they were temporary


def test_failures_are_sentences_and_leave_nothing(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*none: No such file"):
        mapped(tmp_path / "none", "a", tmp_path, lambda _: None)
    (tmp_path / "source").write_text("x")

    def full(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"cannot write .*: No space left on device"):
        mapped(tmp_path / "source", "a", tmp_path, full)
    assert list((tmp_path / "converted").iterdir()) == []
