"""Write the table of docs/engine.md: ``python tools/engine_table.py``, again when engines change.

Each model of the tests' catalogue takes its first step with each engine and method. An engine
serves what does not raise. With names as arguments, only these rows are made anew.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engine.md"
START, END = "<!-- table: engines -->", "<!-- end -->"
TITLES = {
    "vision": "Images", "sequence": "Sequences", "code": "Parameters in ordinary code",
    "training": "Parametrised, random draws, mixed precision", "huggingface": "Hugging Face",
}  # fmt: skip
ENGINES = ("fused", "functional", "loop")
sys.path.insert(0, str(ROOT / "tests" / "engines"))


def row(name: str) -> str:
    """| model | fused | functional | loop |, each "yes", "no", or the methods supported."""
    import catalogue

    cells = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for engine in ENGINES:
            served = [m for m in catalogue.METHODS if not catalogue.first_step(name, engine, m)]
            every = len(served) == len(catalogue.METHODS)
            cells.append("yes" if every else ", ".join(served) or "no")
    return f"| {name} | " + " | ".join(cells) + " |"


def rows_of(page: str) -> dict[str, str]:
    """The rows that a page has, by model."""
    section = page.partition(START)[2].partition(END)[0]
    lines = re.findall(r"^\| [^|]+ \|.*$", section, re.MULTILINE)
    return {line.split("|")[1].strip(): line for line in lines}


def table(rows: dict[str, str]) -> str:
    """All rows by kind, with the number that each engine supports."""
    import catalogue

    parts = []
    for kind, title in TITLES.items():
        named = [n for n in catalogue.load() if catalogue.KINDS[n] == kind]
        of_kind = [rows[n] for n in named if n in rows]
        head = f"| model | {' | '.join(ENGINES)} |\n|{'---|' * (len(ENGINES) + 1)}"
        parts.append(f"### {title}\n\n{head}\n" + "\n".join(of_kind))
    return _counts(rows) + "\n\n" + "\n\n".join(parts)


def _counts(rows: dict[str, str]) -> str:
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in rows.values()]
    whole = [sum(c[k + 1] == "yes" for c in cells) for k in range(len(ENGINES))]
    each = ", ".join(f"{e} {n}" for e, n in zip(ENGINES, whole, strict=True))
    return f"Of {len(cells)} models, all four methods are supported by: {each}."


def filled(page: str, names: list[str]) -> str:
    """The page with the rows of ``names`` made anew."""
    import catalogue

    known = {n: line for n, line in rows_of(page).items() if n in catalogue.load()}
    known |= {n: row(n) for n in names}
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{PAGE.name} has no place for the table: put {START} and {END} there")
    return pattern.sub(lambda _: f"{START}\n\n{table(known)}\n\n{END}", page)


if __name__ == "__main__":
    from catalogue import load

    chosen = sys.argv[1:] or list(load())
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), chosen), encoding="utf-8")
