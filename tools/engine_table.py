"""Write the table of docs/engine.md: ``python tools/engine_table.py``, again when engines change.

Each model of the tests' catalogue takes its first step with each engine and method. An engine
serves what does not raise. All rows are in benchmarks/results/engines.json; the page counts them by
kind and lists the models that some engine does not support. With names as arguments, only these
rows are made anew.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engine.md"
RECORD = ROOT / "benchmarks" / "results" / "engines.json"
START, END = "<!-- table: engines -->", "<!-- end -->"
TITLES = {
    "vision": "images", "sequence": "sequences", "code": "parameters in ordinary code",
    "training": "parametrised, random draws, mixed precision", "huggingface": "Hugging Face",
}  # fmt: skip
ENGINES = ("fused", "functional", "loop")
Rows = dict[str, list[str]]
sys.path.insert(0, str(ROOT / "tests" / "engines"))


def row(name: str) -> list[str]:
    """Return of each engine "yes", "no", or the methods that it supports for the model."""
    import catalogue

    cells = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for engine in ENGINES:
            served = [m for m in catalogue.METHODS if not catalogue.first_step(name, engine, m)]
            every = len(served) == len(catalogue.METHODS)
            cells.append("yes" if every else ", ".join(served) or "no")
    return cells


def recorded() -> Rows:
    """Return the cells of each engine by model."""
    return dict(json.loads(RECORD.read_text(encoding="utf-8")))


def table(rows: Rows) -> str:
    """Return the number of models by kind and engine, and the models that one does not support."""
    import catalogue

    head = f"| models | {' | '.join(ENGINES)} |\n|{'---|' * (len(ENGINES) + 1)}"
    kinds = [(title, [n for n in rows if catalogue.KINDS[n] == k]) for k, title in TITLES.items()]
    counts = [
        _line(f"{len(names)}: {title}", _supported([rows[n] for n in names]))
        for title, names in [*kinds, ("in all", list(rows))]
    ]
    exceptions = [_line(n, cells) for n, cells in rows.items() if set(cells) != {"yes"}]
    return "\n".join([head, *counts, "", "All but:", "", head, *exceptions])


def _supported(rows: list[list[str]]) -> list[str]:
    return [str(sum(cells[k] == "yes" for cells in rows)) for k in range(len(ENGINES))]


def _line(first: str, cells: list[str]) -> str:
    return f"| {first} | " + " | ".join(cells) + " |"


def filled(page: str, rows: Rows) -> str:
    """Return the page with its table made anew."""
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{PAGE.name} has no place for the table: put {START} and {END} there")
    return pattern.sub(lambda _: f"{START}\n\n{table(rows)}\n\n{END}", page)


if __name__ == "__main__":
    from catalogue import load

    names = list(load())
    known = {**recorded(), **{n: row(n) for n in sys.argv[1:] or names}}
    rows = {n: known[n] for n in names if n in known}
    lines = ",\n".join(f" {json.dumps(n)}: {json.dumps(cells)}" for n, cells in rows.items())
    RECORD.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
