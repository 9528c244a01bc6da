"""The example in the documentation is built as today's statements are."""

from __future__ import annotations

import re

import pytest

from dpbam.app.runs import RunConfig, prepare
from dpbam.app.runs.documents import Identity
from dpbam.app.runs.statement import statement
from dpbam.app.runs.statement_text import to_markdown
from tests.docs.pages import ROOT


def outline(text: str) -> list[str]:
    """Headings, the first words of paragraphs in bold, and the names in tables."""
    digits = re.sub(r"[\d.,e-]+%?", "N", text)
    return re.findall(r"^(?:#+ .*|\*\*[^*]+\*\*|\| [^|]+ \|)", digits, re.MULTILINE)


@pytest.fixture(scope="module")
def today() -> str:
    config = RunConfig(model="mlp", epsilon=3, epochs=2, operator="o", curator="c", purpose="p",
                       unit_reason="r")  # fmt: skip
    prepared = prepare(config)
    ledger = prepared.plan.ledger()
    for step in range(prepared.plan.steps):
        ledger.charge("s", step, noise_multiplier=prepared.plan.noise_multiplier,
                      sampling_rate=prepared.plan.sampling_rate)  # fmt: skip
    files = {"model.safetensors": "0" * 64, "model.json": "1" * 64}
    identity = Identity(date="2026-11-17", files=files, configuration_sha256="2" * 64, versions={})
    return to_markdown(
        statement(prepared, ledger, run="r", steps=len(ledger), evaluations=1, identity=identity)
    )


def test_the_example_has_the_outline_of_todays_statements(today, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import statements

    page = statements.PAGE.read_text(encoding="utf-8")
    assert outline(page) == outline(statements.page(today)), (
        "write it anew: python tools/statements.py --train"
    )
    assert "epsilon = 3, delta = 1e-06" in page


def test_every_field_has_a_row_with_its_flag_and_default(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from docs_site import configuration

    rows = [line for line in configuration.page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(RunConfig.model_fields)
    assert "| `lr` | `--lr` | chosen by auto; 0.005 for a net | Learning rate. |" in rows
    assert all("\n" not in row and row.count("|") == 5 for row in rows)
