"""Lines by package: ``python tools/size.py [CHECKOUT]``.

Counts the lines of Python in each package of ``src/dpbam`` and in ``reproduce``, those of templates
and scripts of our own, and the functions: how many, and their median length.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TEMPLATES = {".js", ".css", ".html", ".j2"}


def lines(path: Path) -> int:
    """The lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def by_package(root: Path, depth: int) -> Counter[str]:
    """Lines of Python by folder, down to ``depth`` below ``root``; loose modules by their own."""
    found: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts[:-1][:depth]
        found["/".join((root.name, *parts))] += lines(path)
    return found


def bodies(root: Path) -> Iterator[int]:
    """The length of every function, docstring left out."""
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if body:
                    yield (body[-1].end_lineno or 0) - body[0].lineno + 1


def main() -> None:
    """Print the table."""
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    source = checkout / "src" / "dpbam"
    total = Counter({"src/dpbam": sum(lines(p) for p in source.rglob("*.py"))})
    total += by_package(source, 2)
    if (checkout / "reproduce").is_dir():
        total += by_package(checkout / "reproduce", 0)
    for name, count in total.items():
        print(f"{count:7,}  {name}")
    ours = [path for path in source.rglob("*") if path.suffix in TEMPLATES]
    print(f"{sum(map(lines, ours)):7,}  templates and scripts")
    lengths = list(bodies(source))
    print(f"{len(lengths):7,}  functions, of {statistics.median(lengths):g} lines in the median")


if __name__ == "__main__":
    main()
