from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbam.app.report.charts import Series, confusion_matrix, dots, forest, grid, lines
from dpbam.app.report.figure import Figure, Panel, picture, thinned
from dpbam.app.report.groups import groups
from dpbam.app.report.html import build
from dpbam.app.report.records import read_run
from dpbam.catalogue import FIGURES
from reproduce import drawings
from tests.app.report.synthetic import TASK_FIGURES, write_run

finite = st.floats(-1e6, 1e6)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(finite, min_size=1, max_size=700), st.integers(1, 60))
def test_thinning_keeps_means_within_range_and_few(y: list[float], most: int) -> None:
    rows = Series("a", 0, tuple(map(float, range(len(y)))), tuple(y)).rows("")
    thin = thinned(rows, most)
    assert len(thin) <= most
    means = [row["y"] for row in thin]
    assert min(y) - 1e-6 <= min(means) <= max(means) <= max(y) + 1e-6
    if len(y) <= most:
        assert thin == rows


def test_thinning_passes_over_what_is_no_number() -> None:
    y = (math.nan, 2.0, math.nan, math.nan)
    thin = thinned(Series("a", 0, (0.0, 1.0, 2.0, 3.0), y).rows(""), 2)
    assert thin[0]["y"] == 2.0
    assert math.isnan(thin[1]["y"])


def test_thinning_is_per_curve_and_leaves_other_tables_alone() -> None:
    x = tuple(float(k) for k in range(4))
    two = [row for name in "ab" for row in Series(name, 0, x, x).rows("")]
    assert [(row["series"], row["y"]) for row in thinned(two, 1)] == [("a", 1.5), ("b", 1.5)]
    cells = [{"row": str(k), "column": "c", "value": 1.0} for k in range(1000)]
    assert thinned(cells, 10) == cells


PANELS: dict[str, Panel] = {
    "lines": lines("p", "x", "y", [Series("a", 0, (1.0, 2.0), (0.5, math.nan))]),
    "band": lines("p", "x", "y", [Series("a", 0, (1.0, 2.0), (), (0.0, 1.0), (1.0, 2.0))]),
    "dots": dots("p", "accuracy", [Series("a", 0, ("cat", "dog"), (1.0, 2.0), (0.0, 1.0),
                                          (2.0, 3.0))]),
    "forest": forest("", "points", [{"setting": "a", "difference": 1.0, "low": 0.0, "high": 2.0,
                                     "seeds": 3}], ["#3b78c4"], [True]),
    "grid": grid("p", "layer", [("r", "c", 1.0), ("r", "d", math.nan)], "cosine"),
    "confusion": confusion_matrix("p", [("r", "r", 1.0)]),
    "arrows": drawings.clipping().panels[0],
}  # fmt: skip


def a_difference(setting: str, mean: float, half: float) -> dict[str, object]:
    return {"setting": setting, "difference": mean, "low": mean - half, "high": mean + half}


def reach(*useful: bool) -> tuple[float, float]:
    """The ends of the axis of two arms that are near zero, and of one that diverged."""
    rows = [a_difference("a", 1.0, 2.0), a_difference("b", -1.0, 3.0), a_difference("c", -84.0, 1)]
    panel = forest("", "points", rows, ["#000"] * 3, useful)
    least, most = panel.view["layer"][0]["encoding"]["x"]["scale"]["domain"]
    return least, most


def test_the_axis_of_a_forest_is_that_of_its_useful_arms() -> None:
    least, most = reach(True, True, False)
    assert -5 < least < -4
    assert 3 < most < 4
    # controls: an arm that counts as useful stretches the axis, and so do arms of which none is
    assert reach(True, True, True)[0] < -84
    assert reach(False, False, False)[0] < -84


def test_what_lies_outside_of_a_forest_is_marked() -> None:
    rows = [a_difference("a", 1.0, 2.0), a_difference("c", -84.0, 1.0)]
    panel = forest("", "points", rows, ["#000"] * 2, [True, False])
    texts = re.findall(r">(−?[\d.]+)</text>", picture(figure(panel).spec(), ".svg").decode())
    assert "−84" in texts


def figure(panel: Panel, about: str = "public") -> Figure:
    return Figure("f", "", "", about, [panel])


@pytest.mark.parametrize("kind", PANELS)
def test_csv_has_a_head_and_one_row_a_number(kind: str) -> None:
    panel = PANELS[kind]
    text = figure(panel).to_csv()
    head, *rows = csv.reader(io.StringIO(text))
    assert tuple(head) == panel.columns
    assert len(rows) == len(panel.rows)
    assert "nan" not in text


@pytest.mark.parametrize("kind", PANELS)
def test_a_specification_is_json_without_nan_and_compiles(kind: str) -> None:
    spec = figure(PANELS[kind], "training").spec()
    assert json.loads(json.dumps(spec, allow_nan=False))["concat"]
    assert spec["title"]["text"] == "not protected by privacy: do not share"
    assert vl_convert.vegalite_to_vega(spec)["marks"]


def test_marks_go_with_the_data() -> None:
    panel = PANELS["lines"]
    assert figure(panel, "training").to_csv().startswith("# not protected by privacy: do")
    assert figure(panel, "test").to_csv().startswith("# test records")
    assert figure(panel).to_csv().startswith("panel,")


def test_a_screen_reader_hears_where_curves_end() -> None:
    both = [Series("a", 0, (1.0, 2.0), (1.0, 0.5)), Series("1", 0, (1.0,), (9.0,), style="seed")]
    spec = Figure("f", "Title", "", "test", [lines("p", "x", "y", both)]).spec()
    assert spec["description"] == "Title. p, a ends at 0.5. test records: publish only if public"


def test_a_group_has_one_colour_in_all_panels() -> None:
    one = lines("p", "x", "y", [Series("a", 0, (1.0,), (1.0,)), Series("b", 1, (1.0,), (1.0,))])
    other = lines("q", "x", "y", [Series("b", 1, (1.0,), (1.0,))])
    spec = Figure("f", "", "", "public", [other, one]).spec()
    first, second = (panel["encoding"]["color"]["scale"] for panel in spec["concat"])
    assert first == second
    assert first["domain"] == ["b", "a"]


def test_specifications_fit_the_schema_of_vega_lite(tmp_path: Path) -> None:
    """A property that Vega-Lite does not know would be ignored, not refused."""
    altair = pytest.importorskip("altair", reason="altair is in the dev extra, for its schema")
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**altair.load_schema(), "$ref": "#/definitions/TopLevelConcatSpec"}
    valid = jsonschema.Draft7Validator(schema).is_valid
    folders = [write_run(tmp_path / m, method=m, seed=1) for m in ("dp-sgd", "bam")]
    folders += [write_run(tmp_path / "b", method="bam", seed=2)]
    folders += [write_run(tmp_path / "c", method="dp-sgd", batch_size=200)]
    found = groups([read_run(folder) for folder in folders])
    for name in {*FIGURES} - {*TASK_FIGURES}:  # those have a test of their own
        spec = json.loads(json.dumps(build(name, found).spec()))
        for panel in spec["concat"]:
            del panel["data"]["values"][3:]  # all are alike, and checked slowly
        assert valid(spec), name
        assert not valid({**spec, "colums": 2})
        spec["concat"][0]["layer"][0]["encoding"]["colour"] = {"value": "red"}
        assert not valid(spec)
