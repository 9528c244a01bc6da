from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dpbam.data import DataError
from dpbam.data.fetch import Archive, atomic, extract, obtain

from .helpers import tar_of

CONTENT = bytes(range(256)) * 9000  # 2.3 MB: several blocks


class Handler(BaseHTTPRequestHandler):
    requests = 0

    def do_GET(self):
        type(self).requests += 1
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000] if self.path == "/cut" else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Handler, "requests", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def archive(url: str, content: bytes = CONTENT) -> Archive:
    return Archive("set.tar.gz", url, hashlib.md5(content).hexdigest())


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def test_a_download_is_checked_kept_and_not_repeated(server, tmp_path):
    told = []
    folder = tmp_path / "new" / "folder"
    path = obtain(archive(f"{server}/set"), folder, progress=lambda *a: told.append(a))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert len(told) > 1
    assert obtain(archive(f"{server}/set"), folder) == path
    assert Handler.requests == 1
    assert leftovers(folder) == ["set.tar.gz"]


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(DataError, match=r"has md5 \w+, not \w+: the download is damaged"):
        obtain(archive(f"{server}/set", b"other"), tmp_path)
    assert leftovers(tmp_path) == []


def test_a_download_cut_short_leaves_nothing(server, tmp_path):
    with pytest.raises(DataError, match=r"md5|cannot download"):
        obtain(archive(f"{server}/cut"), tmp_path)
    assert leftovers(tmp_path) == []


def test_no_download_says_which_file_to_put_where(server, tmp_path):
    sentence = rf"cannot download .*404.*get set.tar.gz by other means and put it into {tmp_path}"
    with pytest.raises(DataError, match=sentence):
        obtain(archive(f"{server}/missing"), tmp_path)
    assert leftovers(tmp_path) == []


def test_no_server_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataError, match=r"cannot download"):
        obtain(archive("http://127.0.0.1:9/set"), tmp_path)


def test_a_damaged_file_that_is_there_is_not_replaced_silently(server, tmp_path):
    (tmp_path / "set.tar.gz").write_bytes(b"half")
    with pytest.raises(DataError, match=r"remove it and fetch"):
        obtain(archive(f"{server}/set"), tmp_path)
    assert (tmp_path / "set.tar.gz").read_bytes() == b"half"
    assert Handler.requests == 0


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write to"):
        obtain(archive("http://127.0.0.1:9/set"), tmp_path / "file" / "folder")


def test_a_full_disk_leaves_nothing(server, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpbam.data.fetch._copy", full)
    with pytest.raises(DataError, match=r"No space left on device"):
        obtain(archive(f"{server}/set"), tmp_path)
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
