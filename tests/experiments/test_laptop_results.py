"""The laptop recipe's committed records, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "results" / "laptop").glob("*.json"))


def record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_there_are_records() -> None:
    assert any(record(path)["scored_on"] == "test" for path in RECORDS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_keeps_its_promise_and_is_on_the_page(path: Path) -> None:
    found = record(path)
    config, page = found["config"], (ROOT / "docs" / "laptop.md").read_text()
    assert found["epsilon"] <= found["epsilon_asked"]
    assert found["delta"] == 1e-5
    tuned = found["scored_on"] != "test"
    assert found["n"] == (45_000 if tuned else 50_000)
    assert config["data"].endswith("_tuning") == tuned
    row = (
        f"| {found['epsilon_asked']:g} | {config['lr']:g} | {config['clip_norm']:g} "
        f"| {found['steps']} | {100 * found['accuracy']:.2f}% |"
    )
    assert row in page
