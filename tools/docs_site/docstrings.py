"""A griffe extension: our docstrings as Markdown.

Docstrings are written to be read in the terminal, with tables drawn in characters and roles such as
``:class:``. The site wants Markdown.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^(?P<indent> *)Example: *(?P<title>.*)$", re.MULTILINE)
_RULE = re.compile(r"^ *=+( +=+)+ *$")


class Markdown(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each object."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Tables, roles, examples and literal blocks as Markdown.

    Example:
        >>> to_markdown("See :class:`~dpbam.nn.ResNet9`.")
        'See `ResNet9`.'
    """
    text = _ROLE.sub(lambda m: f"`{m[1].rsplit('.', 1)[-1]}`", text)
    text = _EXAMPLE.sub(_examples_section, text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return _tables(text)


def _examples_section(match: re.Match[str]) -> str:
    """``Example: of what.`` as the section that griffe knows, its title a first line of text."""
    indent, title = match["indent"], match["title"]
    return f"{indent}Examples:" + (f"\n{indent}    {title}\n" if title else "")


def _tables(text: str) -> str:
    """Every table. It begins with a rule, and ends with a rule that nothing follows."""
    out: list[str] = []
    block: list[str] = []
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        rule = bool(_RULE.match(line))
        if not block and not rule:
            out.append(line)
            continue
        block.append(line)
        if rule and len(block) > 1 and not after.strip():
            out += _table(block)
            block = []
    return "\n".join([*out, *block])


def _table(block: list[str]) -> list[str]:
    """The lines of one table. A line whose first column is empty continues the row above."""
    indent = " " * (len(block[0]) - len(block[0].lstrip()))
    starts = [m.start() for m in re.finditer(r"=+", block[0])]
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    for line in block:
        if _RULE.match(line) or not line.strip():
            continue
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        if rows and not cells[0]:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    if sum(bool(_RULE.match(line)) for line in block) == 2:  # a table without a head
        rows.insert(0, [""] * len(starts))
    drawn = [indent + "| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
    return ["", drawn[0], indent + "|---" * len(starts) + "|", *drawn[1:], ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
