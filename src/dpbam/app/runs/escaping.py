r"""Text from outside in what is published: names of classes, columns, files and people stay text.

A class may be called ``<script>``, a column may contain a line break, a file's name the bytes that
clear a terminal. Each target has one function, which everything from outside passes on its way:

==================  ==============================  =============================================
target              function                        what a name could do without it
==================  ==============================  =============================================
Markdown            :func:`markdown`                links, images, HTML, headings, table cells
terminal            :func:`visible`, by             clear the screen, write over what was printed
                    ``dpbam.app.cli.output``
a CSV cell          :func:`cell`                    formulas that a spreadsheet evaluates
JSON, YAML          :func:`json_text`               control bytes; YAML reads it as JSON
HTML                ``html.escape``, jinja2's       tags and scripts
                    autoescape
==================  ==============================  =============================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

# What opens a construct within a line; a name never begins a line, so -, + and 1. are harmless.
# An underscore within a word, as of patient_id, opens none.
_MARKS = re.compile(
    r"[\\`*#\[\]<>|~&$@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE
)
_FORMULA = ("=", "+", "-", "@")


def visible(text: str) -> str:
    r"""Return one line without invisible characters: controls, overrides of direction, surrogates.

    Example:
        >>> visible("cat\x1b[2J\nand dog") == "cat\ufffd[2J and dog"
        True
    """
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def markdown(text: str) -> str:
    r"""Return text that any Markdown reader shows as it is, for use within a line.

    Example:
        >>> print(markdown("[a](b)\n# <c>"))
        \[a\](b) \# \<c\>
    """
    return _MARKS.sub(lambda mark: f"\\{mark[0]}", visible(text))


def each_text(values: Any, escape: Callable[[str], str]) -> Any:
    r"""Return a copy of values with ``escape`` of each text; the keys of mappings stay.

    Example:
        >>> each_text({"a*b": ["c*d", 3]}, markdown)
        {'a*b': ['c\\*d', 3]}
    """
    if isinstance(values, BaseModel):
        fields = {
            name: each_text(getattr(values, name), escape) for name in values.model_fields_set
        }
        return values.model_copy(update=fields)
    if isinstance(values, Mapping):
        return {key: each_text(value, escape) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [each_text(value, escape) for value in values]
    return escape(values) if isinstance(values, str) else values


def cell(text: str) -> str:
    """Return the text of a CSV cell, which no spreadsheet takes for a formula.

    Example:
        >>> cell("=cmd|' /C calc'!A0"), cell("cat")
        ("'=cmd|' /C calc'!A0", 'cat')
    """
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def json_text(value: Any, *, indent: int | None = None) -> str:
    r"""Format plain values as JSON that is visible throughout: other characters are escaped.

    Example:
        >>> json_text("caf\u00e9\x9b2J") == '"caf\u00e9\\u009b2J"'
        True
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
