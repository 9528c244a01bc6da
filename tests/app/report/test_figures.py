"""The figures' numbers against the records that they are drawn from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.report.catalogue import BUILDERS, SECTIONS, build
from dpbam.app.report.figure import Panel, Row
from dpbam.app.report.groups import Group, groups
from dpbam.app.report.records import read_run
from tests.app.report.synthetic import CLASSES, TASK_FIGURES, write_run


@pytest.fixture
def three(tmp_path: Path) -> tuple[Group, ...]:
    folders = [write_run(tmp_path / m, method=m) for m in ("dp-sgd", "dp-sat", "bam")]
    return groups([read_run(folder) for folder in folders])


@pytest.fixture
def bare(tmp_path: Path) -> tuple[Group, ...]:
    return groups([read_run(write_run(tmp_path / "bare", measured=False, evaluated=False))])


def curve(panel: Panel, series: str) -> list[Row]:
    """The points of one curve."""
    return [row for row in panel.rows if row["series"] == series]


def vectors(panel: Panel) -> dict[str, tuple[float, float]]:
    """Role -> vector, of those in the CSV file."""
    return {
        row["vector"]: (row["x_to"] - row["x_from"], row["y_to"] - row["y_from"])
        for row in panel.rows
    }


def table(panel: Panel) -> dict[str, dict[str, float]]:
    """Row -> column -> value of a grid."""
    found: dict[str, dict[str, float]] = {}
    for cell in panel.rows:
        found.setdefault(cell["row"], {})[cell["column"]] = cell["value"]
    return found


@pytest.mark.parametrize(
    "name", sorted({*BUILDERS} - {"differences", "batch-size", "clipping", *TASK_FIGURES})
)
def test_every_figure_has_panels_and_a_place(name: str, three: tuple[Group, ...]) -> None:
    figure = build(name, three)
    assert figure.name == name
    assert figure.panels
    assert len({panel.columns for panel in figure.panels}) == 1
    assert any(name in section for section in SECTIONS.values())


def test_every_figure_says_why_it_is_empty(bare: tuple[Group, ...]) -> None:
    for name in BUILDERS:
        figure = build(name, bare)
        assert figure.panels or figure.missing.endswith(".")


def test_only_figures_of_public_facts_may_be_published(three: tuple[Group, ...]) -> None:
    about = {name: build(name, three).about for name in BUILDERS}
    assert {n for n, a in about.items() if a == "public"} == {
        "clipping", "released-norms", "released-clipping",
    }  # fmt: skip
    assert {n for n, a in about.items() if a == "test"} == {
        "differences", "accuracy", "classes", "confusion", "groups", *TASK_FIGURES,
    }  # fmt: skip


def test_bias_is_the_recorded_one_against_epochs(three: tuple[Group, ...]) -> None:
    figure = build("bias", three)
    assert len(figure.panels) == 2  # the two readings
    run = three[2].runs[0]
    point = curve(figure.panels[0], "BAM")[5]
    assert point["y"] == run.bias[5]["non_private_against_plain"]["bias"]
    assert point["x"] == pytest.approx(5 * 0.1)  # step * q


def test_figure_seven_is_drawn_to_scale(three: tuple[Group, ...]) -> None:
    panel = build("decomposition", three).panels[2]
    found = vectors(panel)
    bias, length, sideways = found["bias"], found["magnitude"], found["direction"]
    assert bias == pytest.approx((length[0] + sideways[0], length[1] + sideways[1]))
    ends = [row["non_private_against_plain"] for row in three[2].runs[0].bias[-6:]]
    assert 1 + length[0] == pytest.approx(sum(r["a"] for r in ends) / 6)
    ratio = sum(r["c_norm"] / r["reference_norm"] for r in ends) / 6
    assert sideways == pytest.approx((0, ratio))
    x, y = (panel.view["encoding"][axis]["scale"]["domain"] for axis in "xy")
    for layer in (panel.view, *panel.view["layer"]):
        for row in layer.get("data", {}).get("values", ()):
            for at, (low, high) in (("x", x), ("y", y), ("x_to", x), ("y_to", y)):
                assert low <= row.get(at, low) <= high
    width, height = panel.view["width"], panel.view["height"]
    assert width / (x[1] - x[0]) == pytest.approx(height / (y[1] - y[0]))


def test_a_short_clipped_gradient_is_drawn_again_enlarged(three: tuple[Group, ...]) -> None:
    panel = build("decomposition", three).panels[0]  # DP-SGD: a = 0.2, |c| = 0.1
    drawn = panel.view["data"]["values"]
    small, large = drawn[3], drawn[-1]
    assert large["label"] == "g clip, 2×"
    assert len(panel.rows) == 5  # the data know nothing of it
    grown = (large["x_to"] - large["x_from"], large["y_to"] - large["y_from"])
    assert grown == pytest.approx((2 * small["x_to"], 2 * small["y_to"]), rel=1e-3)
    assert len(build("decomposition", three).panels[2].view["data"]["values"]) == 5


def test_where_nothing_is_clipped_there_is_nothing_to_take_apart(tmp_path: Path) -> None:
    figure = build("decomposition", groups([read_run(write_run(tmp_path / "r", method="sgd"))]))
    assert not figure.panels
    assert figure.missing.startswith("Nothing was clipped")


def test_without_a_plain_reading_the_own_one_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sat", method="dp-sat", plain=False)
    panel = build("decomposition", groups([read_run(folder)])).panels[0]
    assert panel.title == "DP-SAT (against its own gradient)"
    figure = build("bias", groups([read_run(folder)]))
    assert len(figure.panels) == 1
    assert figure.panels[0].title == "Against the method's own gradient"
    assert "DP-SAT: against its own gradient alone" in figure.caption


def test_levels_are_the_recorded_ones() -> None:
    from dpbam.app.report.norm_figures import LEVELS
    from dpbam.bias.record import QUANTILES

    assert LEVELS == QUANTILES


def test_norms_show_quantiles_and_c(three: tuple[Group, ...]) -> None:
    panel = build("norms", three).panels[0]
    wide, narrow, median = (curve(panel, s)[0] for s in ("5% to 95%", "25% to 75%", "median"))
    assert (wide["low"], wide["high"]) == (1.0, 8.0)  # the 5% and 95% of the first step
    assert (narrow["low"], median["y"], narrow["high"]) == (2.0, 3.0, 4.0)
    assert marks(panel) == [(1.0, "C = 1")]


def marks(panel: Panel) -> list[tuple[float, str]]:
    """Horizontal lines with a name."""
    named = [layer for layer in panel.view["layer"] if "text" in layer["mark"]]
    return [(layer["encoding"]["y"]["datum"], layer["mark"]["text"]) for layer in named]


def test_without_clipping_there_is_no_c_to_mark(tmp_path: Path) -> None:
    panel = build("norms", groups([read_run(write_run(tmp_path / "r", method="sgd"))])).panels[0]
    assert marks(panel) == []


def test_batch_sizes_need_two_and_are_in_order(tmp_path: Path, three: tuple[Group, ...]) -> None:
    assert not build("batch-size", three).panels
    folders = [write_run(tmp_path / f"b{b}", method="dp-sgd", batch_size=b) for b in (200, 50)]
    panel = build("batch-size", groups([read_run(f) for f in folders])).panels[0]
    assert [row["x"] for row in panel.rows] == [50.0, 200.0]


def test_confusion_is_shaded_by_row(three: tuple[Group, ...]) -> None:
    panel = build("confusion", three).panels[0]
    found = table(panel)
    assert tuple(found) == CLASSES
    assert all(tuple(row) == CLASSES for row in found.values())
    evaluation = three[0].runs[0].evaluation
    assert evaluation is not None
    assert [list(row.values()) for row in found.values()] == evaluation["confusion"]
    total, share = panel.view["transform"]
    assert (total["groupby"], total["joinaggregate"][0]["op"]) == (["row"], "sum")
    assert share["calculate"] == "datum.value / max(datum.total, 1)"
    assert panel.view["layer"][0]["encoding"]["color"]["field"] == share["as"]


def test_the_worst_group_comes_first(three: tuple[Group, ...]) -> None:
    panel = build("groups", three).panels[0]
    assert panel.title == "sex"
    assert list(dict.fromkeys(row["category"] for row in panel.rows)) == ["f (100)", "m (100)"]
    assert all(row["low"] < row["value"] < row["high"] for row in panel.rows)


def test_reference_runs_have_no_budget_to_draw_against(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sgd", method="sgd")
    assert len(build("accuracy", groups([read_run(folder)])).panels) == 1


def test_figure_one_is_the_bias_of_its_own_vectors() -> None:
    (panel,) = build("clipping", []).panels
    by_role: dict[str, list[tuple[float, float]]] = {}
    for row in panel.rows:
        by_role.setdefault(row["vector"], []).append((row["x_to"], row["y_to"]))
    assert all(math.hypot(*cut) <= 1 + 1e-9 for cut in by_role["cut"])
    (k1, k2), (clipped,) = by_role["cut"], by_role["clipped"]
    assert clipped == pytest.approx(((k1[0] + k2[0]) / 2, (k1[1] + k2[1]) / 2))
    assert by_role["bias"] == [clipped]


@pytest.mark.parametrize(("norm", "bias"), [(1.0, 0.67), (2.4, 0.0)])
def test_figure_one_has_a_slider_over_clipping_norms(norm: float, bias: float) -> None:
    figure = build("clipping", [])
    (slider,) = figure.params
    assert slider["bind"]["min"] <= norm <= slider["bind"]["max"]
    rows = figure.panels[0].view["data"]["values"]
    (drawn,) = [r["length"] for r in rows if (r["C"], r["role"]) == (norm, "bias")]
    assert drawn == pytest.approx(bias, abs=0.005)
    clipped = [r["length"] for r in rows if (r["C"], r["role"]) == (norm, "cut")]
    assert max(clipped) <= norm + 1e-4


def test_histograms_are_shares_of_the_recorded_counts(three: tuple[Group, ...]) -> None:
    found = table(build("histogram", three).panels[0])
    columns = [list(column) for column in zip(*(r.values() for r in found.values()), strict=True)]
    counts = [row["non_private_norms"]["counts"] for row in three[0].runs[0].bias]
    assert len(columns) <= 24
    for column in columns:
        assert sum(column) == pytest.approx(1.0)
    assert list(found)[-1] == "≤ 0.5 C"  # the shortest norms that there are, 2^-1 C
    size = math.ceil(len(counts) / 24)
    first = [sum(c[6] for c in counts[:size]), sum(sum(c) for c in counts[:size])]
    assert columns[0][-1] == pytest.approx(first[0] / first[1])


def test_released_figures_are_of_noised_numbers_alone(three: tuple[Group, ...]) -> None:
    share, bias = build("released-clipping", three).panels
    assert curve(bias, "DP-SGD")[0]["y"] == pytest.approx(4.0)  # the square of the released length
    rows = three[0].runs[0].statistics
    size = math.ceil(len(rows) / 20)
    expected = [57 / (97 + row["counts"][0] - 10) for row in rows[:size]]
    assert curve(share, "DP-SGD")[0]["y"] == pytest.approx(sum(expected) / size)


@pytest.mark.parametrize(
    "broken",
    [{}, {"counts": "x"}, {"thresholds": [1, "a"]}, {"counts": [1.0]}, {"clip_norm": 0}],
)
def test_a_strange_line_among_the_released_is_left_out(three, broken) -> None:
    good = three[0].runs[0].statistics[0]
    row = {"step": 1, **broken} if not broken else {**good, **broken}
    run = replace(three[0].runs[0], statistics=(row,))
    for name in ("released-norms", "released-clipping"):
        assert not build(name, [replace(three[0], runs=(run,))]).panels
