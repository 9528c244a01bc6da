"""Files of JSON lines: appends are all or nothing, and a torn last line does no harm."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dpbam import _jsonl
from dpbam.errors import ArgumentError

WHOLE = b'{"step": 0}\n'


def test_an_append_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            return super().write(data[:5])

    path = tmp_path / "log.jsonl"
    _jsonl.append(path, {"step": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode, buffering: Full(self, mode))
        with pytest.raises(OSError, match="No space left on device"):
            _jsonl.append(path, {"step": 1})
    assert path.read_bytes() == WHOLE


def test_an_append_that_fails_keeps_the_rows_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"

    def failing(handle: int) -> None:
        with path.open("ab") as other:
            other.write(WHOLE)
        raise OSError("no space left on device")

    monkeypatch.setattr(_jsonl.os, "fsync", failing)
    with pytest.raises(OSError, match="no space"):
        _jsonl.append_durably(path, {"step": 1})
    assert {"step": 0} in _jsonl.read(path)


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(WHOLE + b'{"step": 1')
    assert _jsonl.read(path) == [{"step": 0}]
    assert _jsonl.read(tmp_path / "missing.jsonl") == []


@pytest.mark.parametrize(
    ("line", "words"), [(b"{", "not JSON"), (b"[1]", "not an object"), (b"[" * 10**5, "not JSON")]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(WHOLE + line + b"\n")
    with pytest.raises(ArgumentError, match=f"log.jsonl line 2 is {words}.*restore"):
        _jsonl.read(path)


@pytest.mark.parametrize(("complete", "kept"), [(True, WHOLE + b"tail\n"), (False, WHOLE)])
def test_repair_completes_or_removes_the_last_line(
    tmp_path: Path, complete: bool, kept: bytes
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(WHOLE + b"tail")
    _jsonl.repair(path, lambda line: complete)
    assert path.read_bytes() == kept
