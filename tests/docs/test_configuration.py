"""The configuration page has every field, as its definition describes it."""

from __future__ import annotations

import sys

from dpbam.app.runs import RunConfig
from tests.docs.pages import ROOT


def test_every_field_has_a_row_with_its_flag_and_default(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from docs_site import configuration

    rows = [line for line in configuration.page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(RunConfig.model_fields)
    assert "| `lr` | `--lr` | 0.005 | Learning rate. |" in rows
    assert all("\n" not in row and row.count("|") == 5 for row in rows)
    sys.modules.pop("docs_site.configuration")
