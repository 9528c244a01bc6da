"""The site: built strictly, every link leads somewhere, every public name is in the reference."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

import dpbam
from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow  # the site takes a quarter of a minute to build

#: modules whose public names are all that they define; the others say so in ``__all__``
OPEN = ("dpbam", "dpbam.privacy", "dpbam.training")
MODULES = sorted(
    f"{package}.{found.name}"
    for package in OPEN
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__)
    if not found.ispkg and not found.name.startswith("_")
)
PACKAGES = sorted(
    f"{package}.{found.name}"
    for package in ("dpbam", "dpbam.app")
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__)
    if found.ispkg and found.name not in ("app", "cli", "privacy", "training")
)


class Links(HTMLParser):
    """What a page links to and loads, and the places in it that can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.places |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in {"img", "script", "link"} and found.get("rel") != "canonical":
            self.loaded += [found[key] for key in ("src", "href") if key in found]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_it_builds_strictly_without_a_warning(site: Path) -> None:
    log = (site.parent / "site.log").read_text()
    assert "WARNING" not in log
    assert "ERROR" not in log


def test_no_page_is_in_the_navigation_twice() -> None:
    named = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) > 30
    assert not {name for name in named if named.count(name) > 1}


def broken_links(pages: dict[Path, Links]) -> list[str]:
    """Links to a file that is not there, or to a place that its page does not have."""
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            target, place = urldefrag(link)
            if urlparse(link).scheme:
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            known = file not in pages or unquote(place) in pages[file].places
            if not file.exists() or (place and not known):
                broken.append(f"{path.name}: {link}")
    return broken


def test_every_internal_link_leads_somewhere(pages: dict[Path, Links]) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert not broken_links(pages)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<h1 id="here">x</h1><a href="#here">1</a><a href="#gone">2</a><a href="no.html">3</a>'
    )
    assert broken_links({page: Links(page)}) == ["page.html: #gone", "page.html: no.html"]


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links]) -> None:
    loaded = {url for page in pages.values() for url in page.loaded}
    assert loaded
    assert not [url for url in loaded if urlparse(url).scheme or url.startswith("//")]


def test_formulas_are_mathml(site: Path) -> None:
    text = (site / "bias.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text


def inventory(site: Path) -> set[str]:
    """The names that the reference describes."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split(" ")[0] for line in lines}


def exported(path: Path) -> list[str]:
    """A module's ``__all__``, read without importing it: some need an extra."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return []


def public_names() -> list[tuple[str, str]]:
    """(package or module, name) of every public name."""
    source = Path(dpbam.__file__).parent
    found = [
        (package, name)
        for package in PACKAGES
        for path in sorted(source.joinpath(*package.split(".")[1:]).rglob("*.py"))
        for name in exported(path)
    ]
    for module in MODULES:
        members = vars(importlib.import_module(module))
        found += [
            (module, name)
            for name, thing in members.items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == module
            and callable(thing) and getattr(thing, "__doc__", None)
        ]  # fmt: skip
    return found


def missing(names: list[tuple[str, str]], described: set[str]) -> list[str]:
    """The names that no entry of the reference describes."""
    return [
        f"{home}.{name}"
        for home, name in names
        if not any(d.startswith(f"{home}.") and d.endswith(f".{name}") for d in described)
    ]


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    described = inventory(site)
    names = public_names()
    assert len(names) > 150
    assert set(dpbam._HOME.values()) <= {home for home, _ in names}
    assert not missing(names, described), "add it to tools/docs_site/reference.py"
    assert missing([("dpbam.nn", "Coffee")], described) == ["dpbam.nn.Coffee"]
