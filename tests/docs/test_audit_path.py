"""The page on the mechanism names what is there to read, and how much it is."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import size  # noqa: E402


def test_the_audit_table_is_what_the_tool_prints() -> None:
    page = (ROOT / "docs" / "mechanism.md").read_text(encoding="utf-8")
    table = page.partition("<!-- audit table -->\n")[2].partition("\n<!-- end")[0]
    assert table == size.audit_table(ROOT / "src" / "dpbam")


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text('"""Two\nlines."""\n\n\ndef f():\n    """One."""\n    # why\n    return 1\n')
    assert size.code_lines(file, "") == (8, 2)
    assert size.code_lines(file, "f") == (4, 2)
