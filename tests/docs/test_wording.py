"""What is protected is called so: "not private" could be read as "safe to share"."""

from __future__ import annotations

import re
import token
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    *(p for kind in ("py", "js") for p in (ROOT / "src").rglob(f"*.{kind}")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.py"),
    *ROOT.glob("*.md"),
]
# of a fact or a file; "Why a step is private" and "differentially private" are about a mechanism
UNCLEAR = re.compile(
    r"\bnot private\b|\b(?:none|nothing)\b[^.:]{0,60}\bis private\b"
    r"|\bprivate (?:held-out|records)\b",
    re.IGNORECASE,
)


def prose(path: Path) -> str:
    """The text of a file; of code, its strings and comments."""
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    with path.open("rb") as file:
        kinds = ("COMMENT", "STRING", "FSTRING_MIDDLE")
        tokens = [t for t in tokenize.tokenize(file.readline) if token.tok_name[t.type] in kinds]
    return " ".join(t.string.strip("\"'#") for t in tokens)


def unclear(text: str) -> list[str]:
    """The phrases that leave open whether private means protected or secret."""
    return UNCLEAR.findall(" ".join(re.sub(r"non[-_]private\w*", "", text).split()))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_means_one_thing(path: Path) -> None:
    assert unclear(prose(path)) == []


@pytest.mark.parametrize(
    "text",
    ["None of what is shown is private.", "Not private: for the operator", "on private\nrecords"],
)
def test_the_old_words_would_be_found(text: str) -> None:
    assert unclear(text)
