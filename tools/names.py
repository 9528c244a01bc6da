"""Count names and functions that are hard to read, by package: ``python tools/names.py [REV]``.

With a git revision, before and after. A vague name is a variable, parameter or attribute named
after how it came to be in place of what it holds: ``found``, ``given``, ``made`` and the others in
``VAGUE``. A function is a verb and its object, so one that begins with a participle (``_kept``,
``converted_rows``) counts, unless it is a property.

Packages without a vague name are listed in ``pyproject.toml`` under ``[tool.dpbam] clean``, and
``tests/test_vague_names.py`` fails on the first that returns. Whoever clears a package adds it
there.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VAGUE = frozenset(
    "found given made kept part own like some held drawn several whole again wide".split()  # noqa: SIM905
)
#: Participles without -ed, and words in -ed that are none.
_IRREGULAR = frozenset(
    re.findall(
        r"\w+",
        "begun bound broken brought built chosen done drawn driven fallen found given gone grown "
        "held hidden kept known laid left lent lost made meant met paid proven said seen sent "
        "shaken shown sold sought spent spoken stored sworn taken taught thought told torn "
        "understood won worn written",
    )
)
_NO_PARTICIPLES = frozenset("bed embed exceed feed need proceed red seed shed speed".split())  # noqa: SIM905
_PROPERTY = re.compile(r"property$|\.setter$|fixture$")
_DIRECTIVE = re.compile(r"#\s*(fmt|noqa|type|pragma|ruff|mypy|!)")


@dataclass
class Count:
    """What was counted in one package; ``vague`` as (file, line, name)."""

    vague: list[tuple[str, int, str]] = field(default_factory=list)
    participles: list[tuple[str, int, str]] = field(default_factory=list)
    names: int = 0
    loose_dicts: int = 0
    comments: int = 0
    lengths: list[int] = field(default_factory=list)

    def add(self, path: str, text: str) -> None:
        """Count one file."""
        tree = ast.parse(text)
        for name, line in bound_names(tree):
            self.names += 1
            if name.strip("_") in VAGUE:
                self.vague.append((path, line, name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript):
                self.loose_dicts += ast.unparse(node) == "dict[str, Any]"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.lengths.append(body_length(node))
                if is_participle(node):
                    self.participles.append((path, node.lineno, node.name))
        self.comments += sum(1 for _ in full_line_comments(text))

    def columns(self) -> list[float]:
        """Return the figures of the table."""
        longest = statistics.quantiles(self.lengths, n=10)[-1] if len(self.lengths) > 1 else 0
        median = statistics.median(self.lengths or [0])
        return [len(self.vague), len(self.participles), self.loose_dicts, self.comments,
                len(self.lengths), median, longest]  # fmt: skip


HEADER = ("vague", "participles", "dict[str, Any]", "comments", "functions", "median", "p90")


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every variable, parameter and attribute where it is bound, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def is_participle(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function's name begins with a participle, and it is no property.

    Example:
        >>> is_participle(ast.parse("def _kept(): ...").body[0])
        True
        >>> is_participle(ast.parse("def seed_all(): ...").body[0])
        False
    """
    first = node.name.strip("_").partition("_")[0]
    if first in _NO_PARTICIPLES or not (first.endswith("ed") or first in _IRREGULAR):
        return False
    return not any(_PROPERTY.search(ast.unparse(d)) for d in node.decorator_list)


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def full_line_comments(text: str) -> Iterator[str]:
    """Yield comments that have a line of their own, directives to tools left out."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        alone = token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        if alone and not _DIRECTIVE.match(token.string):
            yield token.string


def package_of(path: str) -> str | None:
    """Return the package of a path in the repository: ``dpbam`` for loose modules, or none."""
    parts = Path(path).parts
    if path.startswith("src/dpbam/") and path.endswith(".py"):
        depth = 2 if parts[2] == "app" else 1
        return "/".join(("dpbam", *parts[2:-1][:depth]))
    known = parts[0] in ("reproduce", "tools", "tests", "benchmarks") and path.endswith(".py")
    return parts[0] if known else None


def read_sources(revision: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield path and text of every tracked file of Python, of the checkout or a revision."""
    command = ["git", "-C", str(ROOT)]
    listing = ["ls-tree", "-r", "--name-only", revision] if revision else ["ls-files"]
    listed = subprocess.run([*command, *listing], capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.splitlines() if package_of(path)]
    for path in paths:
        if revision:
            shown = subprocess.run(
                [*command, "show", f"{revision}:{path}"], capture_output=True, text=True, check=True
            )
            yield path, shown.stdout
        elif (ROOT / path).exists():
            yield path, (ROOT / path).read_text(encoding="utf-8")


def count_packages(revision: str | None = None) -> dict[str, Count]:
    """Count every package, and ``dpbam in all``."""
    counts: dict[str, Count] = defaultdict(Count)
    for path, text in read_sources(revision):
        package = package_of(path) or ""
        counts[package].add(path, text)
        if package.startswith("dpbam"):
            counts["dpbam in all"].add(path, text)
    return dict(sorted(counts.items()))


def clean_packages() -> list[str]:
    """Return the packages that have no vague name, and shall have none again."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(settings["tool"]["dpbam"]["clean"])


def main() -> None:
    """Print the table."""
    revision = sys.argv[1] if len(sys.argv) > 1 else None
    after = count_packages()
    before = count_packages(revision) if revision else {}
    print(f"{'':24}" + "".join(f"{name:>16}" for name in HEADER))
    for package in sorted({*after, *before}):
        new = after.get(package, Count()).columns()
        old = before.get(package, Count()).columns()
        cells = [f"{a:g} > {b:g}" if revision else f"{b:g}" for a, b in zip(old, new, strict=True)]
        print(f"{package:24}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
