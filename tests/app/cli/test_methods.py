"""``dpbam methods`` lists what configurations take."""

from __future__ import annotations

import json

import pytest

from dpbam.app.cli import main
from dpbam.catalogue import CLIPPINGS, FILTERS, METHODS


def test_every_part_of_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for flag, kind in (("--method", METHODS), ("--clipping", CLIPPINGS), ("--filter", FILTERS)):
        assert [row["name"] for row in rows if row["flag"] == flag] == list(kind)
    assert all(row["formula"] and row["cost"] and row["use"] for row in rows)
