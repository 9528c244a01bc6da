from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dpbam.data import DataError
from dpbam.data.fetch import atomic, download, extract, verify

from .helpers import tar_of

CONTENT = bytes(range(256)) * 9000  # 2.3 MB: several blocks
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def content(server) -> None:
    server.content = CONTENT


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.exists() else []


@pytest.mark.parametrize("progress", [False, True])
def test_a_download_is_checked_and_kept(server, tmp_path, capsys, progress):
    folder = tmp_path / "new" / "folder"
    path = download(f"{server.url}/set.tar.gz", MD5, folder, progress=progress)
    assert path == folder / "set.tar.gz"
    assert path.read_bytes() == CONTENT
    assert leftovers(folder) == ["set.tar.gz"]
    assert ("100%" in capsys.readouterr().err) == progress


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(DataError, match=r"cannot download .*does not match the known hash"):
        download(f"{server.url}/set.tar.gz", hashlib.md5(b"other").hexdigest(), tmp_path)
    assert leftovers(tmp_path) == []


def test_a_download_cut_short_leaves_nothing(server, tmp_path):
    with pytest.raises(DataError, match=r"cannot download"):
        download(f"{server.url}/cut", MD5, tmp_path)
    assert leftovers(tmp_path) == []


def test_no_download_says_which_file_to_put_where(server, tmp_path):
    sentence = rf"cannot download .*404.*get missing by other means and put it into {tmp_path}"
    with pytest.raises(DataError, match=sentence):
        download(f"{server.url}/missing", MD5, tmp_path)
    assert leftovers(tmp_path) == []


def test_no_server_at_all(tmp_path):
    with pytest.raises(DataError, match=r"cannot download"):
        download("http://127.0.0.1:9/set", MD5, tmp_path)


def test_a_damaged_file_that_is_there_is_not_replaced_silently(tmp_path):
    (tmp_path / "set.tar.gz").write_bytes(b"half")
    with pytest.raises(DataError, match=rf"has md5 \w+, not {MD5}: .* remove it and fetch"):
        verify(tmp_path / "set.tar.gz", MD5)
    assert (tmp_path / "set.tar.gz").read_bytes() == b"half"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to"):
        download("http://127.0.0.1:9/set", MD5, tmp_path / "file" / "folder")


def test_a_full_disk_leaves_nothing(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", full)
    with pytest.raises(DataError, match=r"No space left on device"):
        download(f"{server.url}/set", MD5, tmp_path)
    assert leftovers(tmp_path) == []


def test_atomic_writes_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    with atomic(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o077 == 0  # the owner's alone
    assert leftovers(tmp_path) == ["file"]


def test_extract_takes_the_named_files_and_no_others(tmp_path):
    files = {"set/a.bin": b"a", "set/b.bin": b"b", "../evil": b"x", "set/c.bin": b"c"}
    tar_of(files, tmp_path / "set.tar.gz")
    extract(tmp_path / "set.tar.gz", ["set/a.bin", "set/b.bin"], tmp_path / "in" / "set")
    assert sorted(leftovers(tmp_path / "in" / "set")) == ["a.bin", "b.bin"]
    assert (tmp_path / "in" / "set" / "b.bin").read_bytes() == b"b"
    assert leftovers(tmp_path / "in") == ["set"]
    assert not (tmp_path / "evil").exists()


def test_extract_leaves_a_folder_that_another_process_made(tmp_path):
    tar_of({"set/a.bin": b"new"}, tmp_path / "set.tar.gz")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.bin").write_bytes(b"theirs")
    extract(tmp_path / "set.tar.gz", ["set/a.bin"], tmp_path / "set")
    assert (tmp_path / "set" / "a.bin").read_bytes() == b"theirs"
    assert sorted(leftovers(tmp_path)) == ["set", "set.tar.gz"]


def test_extract_makes_nothing_of_a_wrong_or_truncated_archive(tmp_path):
    path = tmp_path / "set.tar.gz"
    tar_of({"set/a.bin": bytes(100_000), "set/b.bin": b"b"}, path)
    with pytest.raises(DataError, match=r"has no file set/z.bin"):
        extract(path, ["set/a.bin", "set/z.bin"], tmp_path / "out" / "set")
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"cannot be unpacked .* truncated"):
        extract(path, ["set/a.bin", "set/b.bin"], tmp_path / "out" / "set")
    assert leftovers(tmp_path / "out") == []
