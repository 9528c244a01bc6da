"""The tree of the architecture page is the tree of the package."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
#: packages of which the page lists every module
WHOLE = (
    "src/dpbam", "src/dpbam/app", "src/dpbam/privacy", "src/dpbam/engines",
    "src/dpbam/engines/fused",
)  # fmt: skip


def listed(page: str) -> list[str]:
    """The paths of the tree, in order."""
    tree = page.split("```text\nsrc/dpbam/")[1].split("```")[0]
    found, parents = [], {}
    for line in ("src/dpbam/" + tree).splitlines():
        name, depth = line.split()[0], len(line) - len(line.lstrip())
        parents[depth] = (parents.get(depth - 2, "") if depth else "") + name
        found.append(parents[depth].rstrip("/"))
    return found


def folders(package: str) -> set[str]:
    """The modules and packages in a package; what begins with two underscores left out."""
    return {
        f"{package}/{path.name}"
        for path in (ROOT / package).iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists())
        and not path.name.startswith("__")
    }


def test_everything_listed_is_there() -> None:
    assert [path for path in listed(PAGE) if not (ROOT / path).exists()] == []


def test_everything_there_is_listed() -> None:
    paths = set(listed(PAGE))
    for package in WHOLE:
        assert folders(package) - paths == set(), package
    assert folders("src/dpbam") - {p for p in paths if "oracle" not in p} == {"src/dpbam/oracle.py"}


def test_the_order_is_that_of_the_imports() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    for name, package in (
        ("layers", "src/dpbam"), ("app", "src/dpbam/app"), ("engines", "src/dpbam/engines"),
        ("fused", "src/dpbam/engines/fused"),
    ):  # fmt: skip
        layers = contracts[f"importlinter:contract:{name}"]["layers"].split("\n")
        rank = {part: k for k, layer in enumerate(layers) for part in re.findall(r"\w+", layer)}
        shown = [Path(path).stem for path in listed(PAGE) if str(Path(path).parent) == package]
        ranks = [rank[part] for part in shown]
        assert ranks == sorted(ranks), shown
