"""The pages for auditors: how much there is to read, and the figures of what attacks the code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def record(name: str) -> dict[str, Any]:
    """Return a record of ``benchmarks/results``."""
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def test_the_audit_page_has_the_figures_of_the_records() -> None:
    page = " ".join((ROOT / "docs" / "audit.md").read_text(encoding="utf-8").split())
    prove, fuzz, soak = record("prove"), record("fuzz")["mutated"].values(), record("soak")
    seconds = prove["gallery_processor_seconds"] + prove["attacks_processor_seconds"]
    assert all(one["right"] for one in prove["gallery"])
    assert (
        f"{len(prove['gallery'])} mistakes planted, none uncaught, in {seconds:.0f} processor"
    ) in page
    inputs, read, refused = (sum(one[key] for one in fuzz) for key in ("inputs", "read", "refused"))
    assert sum(one["tracebacks"] for one in fuzz) == 0
    assert f"{inputs:,} inputs: {read:,} read, {refused:,} refused, 0 tracebacks" in page
    assert f"at most {max(one['memory, MiB'] for one in fuzz)} MiB" in page
    share = record("secure_noise")["share of the step"]
    assert f"{share['secure']:.2%} of the step, standard noise {share['standard']:.2%}" in page
    lost = soak["maltreated"]
    assert (
        f"memory +{soak['watched']['memory, MiB']['slope a minute']:.2f} MiB per minute; "
        f"{lost['steps charged']} steps charged, {lost['charged but lost']} of them lost"
    ) in page
    assert lost["under-counted"] == 0
