"""mkdocs calls these functions while it builds the site (``hooks`` in mkdocs.yml)."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from docs_site import command_line, configuration, guarantees, reference, sources
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: Pages that live elsewhere in the repository, and where the site shows them.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/privacy-statement.md": "example-statement.md",
}
#: The generated pages of the studies and their figures, and where the site shows them.
STUDIES, SHOWN = "reproduce/pages", "studies"
# LaTeX in a page becomes MathML, which every current browser shows without script or font
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made while building."""
    texts = {
        file.src_uri: Path(file.abs_src_path).read_text(encoding="utf-8")
        for file in files.documentation_pages()
        if file.abs_src_path
    }
    made = {target: _of_the_root(path) for path, target in ELSEWHERE.items()}
    made |= reference.pages()
    made["reference/command-line.md"] = command_line.page()
    made["reference/configuration.md"] = configuration.page()
    made["guarantees.md"] = texts["guarantees.md"] = guarantees.page()
    for path in sources.linked(texts.values()):
        made[sources.page_name(path)] = sources.page(ROOT, path)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / STUDIES).rglob("*.*")):
        name = f"{SHOWN}/{path.relative_to(ROOT / STUDIES).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links to the repository's files lead to pages of the site."""
    for path, target in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{path})", f"]({target})")
    markdown = markdown.replace(f"](../{STUDIES}/", f"]({SHOWN}/").replace("](../../docs/", "](../")
    return sources.rewrite(markdown, page.url, ROOT)


def _of_the_root(path: str) -> str:
    """Return a file of the repository; its links to docs/ become links within the site."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("](../docs/", "](")


def on_page_content(content: str, page: Page, config: Any, files: Files) -> str:
    """Formulas as MathML."""
    content = _INLINE.sub(lambda m: _mathml(m[1], "inline"), content)
    return _DISPLAY.sub(lambda m: f'<div class="formula">{_mathml(m[1], "block")}</div>', content)


def _mathml(latex: str, display: str) -> str:
    return str(convert(html.unescape(latex).strip(), display=display))
