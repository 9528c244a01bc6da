"""The documentation's pages as the tests see them: fenced blocks, and how each is to be run.

A page is one session in one empty folder, from top to bottom:

- ``python`` beginning with ``>>>``: a doctest; pytest runs it (``--doctest-glob``).
- any block with ``title="name"``: a file, written into the folder under that name.
- ``bash``: commands, run in the folder. A comment on the line before the block changes that:
  ``<!-- tests add: FLAGS -->`` appends FLAGS to ``dpbam train`` and ``dpbam compare``, to make them
  short; ``<!-- long: WHY -->`` means that the commands are not run, only checked: command, flags,
  files, make targets and extras exist.
- ``text``: output and sketches; nothing to run. A fence must say what it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
)
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^`\n]*)$")
_LONG = re.compile(r"<!-- long: (?P<why>[^>]+) -->")
_ADD = re.compile(r"<!-- tests add: (?P<flags>[^>]+) -->")
_TITLE = re.compile(r'title="(?P<name>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, first line, file name, and its mark if it has one."""

    language: str
    text: str
    line: int
    title: str | None = None
    long: str | None = None
    added: tuple[str, ...] = ()

    def commands(self) -> list[list[str]]:
        """Each command as words; comments dropped, lines ending in a backslash joined."""
        lines = re.sub(r"\\\n\s*", " ", self.text).splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        end = next(
            i for i in range(at + 1, len(lines)) if lines[i].strip() == fence["ticks"]
        )  # an unclosed fence raises StopIteration: a broken page
        above = next((line for line in reversed(lines[:at]) if line.strip()), "")
        yield _block(fence, lines[at + 1 : end], at + 1, above)
        at = end + 1


def _block(fence: re.Match[str], body: list[str], line: int, above: str) -> Block:
    info = fence["info"].strip()
    title, long, added = _TITLE.search(info), _LONG.search(above), _ADD.search(above)
    indent = len(fence["indent"])
    return Block(
        language=info.split(" ")[0],
        text="\n".join(row[indent:] for row in body),
        line=line,
        title=title["name"] if title else None,
        long=long["why"] if long else None,
        added=tuple(shlex.split(added["flags"])) if added else (),
    )
