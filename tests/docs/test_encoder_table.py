"""The table of the study of public encoders is what its command prints from the records."""

from __future__ import annotations

import runpy

import pytest

from tests.docs.pages import ROOT


def test_the_page_has_the_table_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    study = runpy.run_path(str(ROOT / "examples" / "public_encoder.py"))
    study["table"]()
    printed = capsys.readouterr().out
    assert printed in (ROOT / "docs" / "how-good.md").read_text()
    assert len(study["records"]("compare")) == len(study["ARMS"]) * len(study["SEEDS"])
