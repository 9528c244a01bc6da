"""The documentation's table of what each engine serves is what its script writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from catalogue import load

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE = ["mlp", "LSTM", "branch on the data", "einsum", "checkpointing", "use under no grad"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "engine_table.py"
    spec = importlib.util.spec_from_file_location("engine_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_model_has_a_row(tool: ModuleType) -> None:
    known = tool.recorded()
    assert [n for n in load() if n not in known] == [], "run python tools/engine_table.py"


def test_the_page_has_the_table_of_the_record(tool: ModuleType) -> None:
    page, rows = tool.PAGE.read_text(), tool.recorded()
    assert tool.filled(page, rows) == page
    rows["mlp"] = ["no", "yes", "yes"]  # negative control: another record, another table
    assert tool.filled(page, rows) != page


@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_is_up_to_date_on_a_sample(tool: ModuleType, name: str) -> None:
    assert tool.recorded()[name] == tool.row(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in load() if n not in SAMPLE])
def test_the_table_is_up_to_date(tool: ModuleType, name: str) -> None:
    assert tool.recorded()[name] == tool.row(name)
