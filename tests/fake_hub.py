"""A Hugging Face hub on 127.0.0.1: the few routes that downloading a model needs."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the folders ``repositories``, by name; ``asked`` is what was asked for."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.asked = repositories, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless a client closed its connection, perhaps of a test ago."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, *, body: bool) -> None:
        path = urlparse(self.path).path.strip("/")
        self.server.asked.append(f"{self.command} {path}")
        name = next((n for n in self.server.repositories if f"{n}/" in f"{path}/"), None)
        if name is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        folder = self.server.repositories[name]
        if path.startswith("api/models/"):
            values = _files(folder) if "/tree/" in path else _facts(name, folder)
            return self._send(200, json.dumps(values).encode(), {}, body)
        file = folder / path.rpartition("/")[2]
        if not file.is_file():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
        content = file.read_bytes()
        facts = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        return self._send(200, content, facts, body)

    def _send(self, code: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _facts(name: str, folder: Path) -> dict[str, Any]:
    files = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
    return {"id": name, "sha": COMMIT, "siblings": files, "private": False, "tags": []}


def _files(folder: Path) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
        for path in sorted(folder.iterdir())
    ]


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    """Serve in a thread."""
    with Hub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
