"""A report's page, parsed as a browser would parse it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What a browser would see: tags, addresses, the text of every script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.figures: set[str] = set()
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action")]
        self.figures |= {v or "" for k, v in attrs if k == "data-figure"}
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        found = json.loads(self.scripts[0])
        assert isinstance(found, dict)
        return found
