from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbam.app.report.figure import Figure
from dpbam.app.report.panels import Arrow, Arrows, Dots, DotSeries, Lines, Matrix, Series

finite = st.floats(-1e6, 1e6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(finite, min_size=1, max_size=700), st.integers(1, 60))
def test_thinning_keeps_means_within_range_and_few(y: list[float], most: int) -> None:
    series = Series("a", 0, tuple(map(float, range(len(y)))), tuple(y))
    thin = series.thinned(most)
    assert len(thin.x) == len(thin.y) <= most
    assert min(y) - 1e-6 <= min(thin.y) <= max(thin.y) <= max(y) + 1e-6
    if len(y) <= most:
        assert thin is series


def test_thinning_passes_over_what_is_no_number() -> None:
    thin = Series("a", 0, (0.0, 1.0, 2.0, 3.0), (math.nan, 2.0, math.nan, math.nan)).thinned(2)
    assert thin.y[0] == 2.0
    assert math.isnan(thin.y[1])


def panels() -> list[Lines | Dots | Matrix | Arrows]:
    return [
        Lines("p", "x", "y", (Series("a", 0, (1.0, 2.0), (0.5, math.nan)),)),
        Dots("p", "accuracy", ("cat", "dog"), (DotSeries("a", 0, (1, 2), (0, 1), (2, 3)),)),
        Matrix("p", "true", "said", ("r",), ("c", "d"), ((1.0, 2.0),), ((0.1, 0.2),)),
        Arrows("p", (Arrow("g", "gradient", (0, 0), (1, 0)),)),
    ]


@pytest.mark.parametrize("panel", panels(), ids=lambda p: p.kind)
def test_csv_has_a_head_and_one_row_a_number(panel: Lines) -> None:
    text = Figure("f", "", "", "nobody", [panel]).to_csv()
    head, *rows = csv.reader(io.StringIO(text))
    assert tuple(head) == panel.header
    assert len(rows) == len(list(panel.rows()))
    assert "nan" not in text


@pytest.mark.parametrize("panel", panels(), ids=lambda p: p.kind)
def test_the_page_gets_json_without_nan(panel: Lines) -> None:
    page = Figure("f", "", "", "training", [panel]).to_page()
    assert json.loads(json.dumps(page, allow_nan=False))["panels"][0]["kind"] == panel.kind
    assert page["mark"] == "not private: operator only"


def test_marks_go_with_the_data() -> None:
    panel = panels()[0]
    assert Figure("f", "", "", "training", [panel]).to_csv().startswith("# not private: operator")
    assert Figure("f", "", "", "test", [panel]).to_csv().startswith("# test records")
    assert Figure("f", "", "", "nobody", [panel]).to_csv().startswith("panel,")
