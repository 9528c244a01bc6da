"""Run examples/tutorial.py and write docs/tutorial.md: text, code, and what the code printed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, PAGE = ROOT / "examples" / "tutorial.py", ROOT / "docs" / "tutorial.md"
_HEAD = (
    "<!-- Written by tools/tutorial.py from examples/tutorial.py: change that, and run it. -->\n"
)


def cells(script: str) -> list[tuple[str, str]]:
    r"""("markdown" or "code", text) of each ``# %%`` cell.

    Example:
        >>> cells("# %% [markdown]\n# Hello\n# %%\nprint(1)\n")
        [('markdown', 'Hello'), ('code', 'print(1)')]
    """
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        mark, _, body = part.partition("\n")
        if "[markdown]" in mark:
            lines = (line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", body.strip()))
    return found


def run(code: str, names: dict[str, Any]) -> str:
    """What the code printed, with the temporary folder's name taken out."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(code, SCRIPT.name, "exec"), names)
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+/", "", said.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def page(script: str) -> str:
    """The page."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    parts = [_HEAD]
    for kind, text in cells(script):
        if kind == "markdown":
            parts.append(text + "\n")
        else:
            parts.append(f"```python\n{text}\n```\n")
            if printed := run(text, names):
                parts.append(f"```text\n{printed}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"  # how wide tables are drawn
    PAGE.write_text(page(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")
