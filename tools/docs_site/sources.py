"""Links to code: pages of the site that show a file, and the line of a name in it.

A page says ``[BAM](../src/dpbam/methods.py#BAM.direction)``. On GitHub that is the file. On the
site it is the file's page at the line of ``BAM.direction``, found when the site is built: a name
that is not there fails the build, so no link goes stale.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.utils import get_relative_url

_LINK = re.compile(
    r"\[(?P<text>(?:[^\[\]`]|`[^`]*`)+)\]"
    r"\((?:\.\./)+(?P<path>(?:src|tests|benchmarks|tools|examples)/[\w/]+\.py)(?:#(?P<name>[\w.]+))?\)"
)


def linked(texts: Iterable[str]) -> list[str]:
    """The files that the pages link to.

    Example:
        >>> linked(["see [it](../src/dpbam/methods.py#BAM)"])
        ['src/dpbam/methods.py']
    """
    return sorted({match["path"] for text in texts for match in _LINK.finditer(text)})


def page_name(path: str) -> str:
    """The page of a file, as mkdocs names it."""
    return f"source/{path.removesuffix('.py').removeprefix('src/')}.md"


def page(root: Path, path: str) -> str:
    """A page that shows the file, its lines numbered."""
    if not (root / path).is_file():
        raise PluginError(f"a page links to {path}, which is not there")
    code = (root / path).read_text(encoding="utf-8").rstrip()
    head = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    return f'{head}# `{path}`\n\n`````python linenums="1"\n{code}\n`````\n'


def rewrite(markdown: str, url: str, root: Path) -> str:
    """Each link to a file as a link to its page, from the page at ``url``."""

    def replace(match: re.Match[str]) -> str:
        target = page_name(match["path"]).removesuffix(".md") + ".html"
        line = f"#__span-0-{line_of(root / match['path'], match['name'])}" if match["name"] else ""
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", match["text"])
        return f'<a href="{get_relative_url(target, url)}{line}">{text}</a>'

    return _LINK.sub(replace, markdown)


def line_of(path: Path, name: str) -> int:
    """The line on which a function, class, method or constant of that name begins."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((node for node in body if part in _names(node)), None)
        if found is None:
            raise PluginError(f"a page links to {name} in {path.name}, which is not there")
        body = getattr(found, "body", [])
    assert found is not None
    return found.lineno


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
