"""Figures of runs: what is drawn, by task too, and what may be published of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dpbam import catalogue
from dpbam.app.report import draw
from dpbam.app.report.charts import Series, lines
from dpbam.app.report.figure import Figure, Panel, Row
from dpbam.app.report.groups import Group, groups
from dpbam.app.report.html import build, render, sections
from dpbam.app.report.records import Run, read_run
from dpbam.catalogue import FIGURES
from dpbam.tasks.base import make_task
from tests.app.report.synthetic import CLASSES, TASK_FIGURES, statement, write_run


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


def table(panel: Panel) -> dict[str, dict[str, float]]:
    """Row -> column -> value of a grid."""
    found: dict[str, dict[str, float]] = {}
    for cell in panel.rows:
        found.setdefault(cell["row"], {})[cell["column"]] = cell["value"]
    return found


@pytest.mark.parametrize("name", sorted({*FIGURES} - {"differences", *TASK_FIGURES}))
def test_every_figure_has_panels_and_a_place(name: str, three: tuple[Group, ...]) -> None:
    figure = build(name, three)
    assert figure.name == name
    assert figure.panels
    assert len({panel.columns for panel in figure.panels}) == 1
    assert any(name in section for section in sections().values())


def test_there_are_at_most_fourteen_figures() -> None:
    assert len(FIGURES) <= 14


def test_every_figure_says_why_it_is_empty(bare: tuple[Group, ...]) -> None:
    for name in FIGURES:
        figure = build(name, bare)
        assert figure.panels or figure.missing.endswith(".")


def test_only_figures_of_public_facts_may_be_published(three: tuple[Group, ...]) -> None:
    about = {name: build(name, three).about for name in FIGURES}
    assert {n for n, a in about.items() if a == "public"} == {
        "released-norms", "released-clipping",
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


def test_without_a_plain_reading_the_own_one_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sat", method="dp-sat", plain=False)
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


def toy_figure(groups: Sequence[Group]) -> Figure:
    series = [Series(group.label, group.colour, (1.0, 2.0), (1.0, 2.0)) for group in groups]
    return Figure("toy", "A toy", "Drawn by a plug-in.", "training", [lines("", "x", "y", series)])


def toy_sentence(runs: Sequence[Run]) -> str:
    return f"a toy of {len(runs)} runs"


def test_a_figure_is_added_by_one_entry(three: tuple[Group, ...], tmp_path: Path) -> None:
    """It is in the report with its sentence, in its section, and drawn by name; then gone."""
    name = f"{__name__}:toy_figure"
    entry = catalogue.Figure(
        "toy", name, "a toy", section="Toys", sentence=f"{__name__}:toy_sentence"
    )
    FIGURES.register(entry)
    try:
        runs = [run for group in three for run in group.runs]
        page = render(runs)
        assert 'id="figure-toy"' in page
        assert "a toy of 1 runs." in page
        assert page.index("<h2>Toys</h2>") < page.index('id="figure-toy"')
        assert 'id="figure-toy"' not in render(runs, publishable=True)  # about the training data
        drawn = draw("toy", [write_run(tmp_path / "r")], tmp_path / "toy.svg")
        assert drawn.read_text().startswith("<svg")
    finally:
        FIGURES.remove("toy")
    assert 'id="figure-toy"' not in render(runs)


def test_of_dp_sgd_the_two_readings_are_one_panel(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", method="dp-sgd"))
    same = [
        {**row, "non_private_against_own": row["non_private_against_plain"]} for row in run.bias
    ]
    figure = build("bias", groups([replace(run, bias=tuple(same))]))
    assert [panel.title for panel in figure.panels] == ["Against the plain batch gradient"]


TASKS = ("multi-label", "regression", "segmentation")


@cache
def task_run(task: str) -> Run:
    """A run whose evaluation was computed from random outputs."""
    torch.manual_seed(0)
    made = make_task(
        task, ["age"] if task == "regression" else ["a", "b", "c"],
        target_range=(0.0, 100.0) if task == "regression" else None,
    )  # fmt: skip
    shape = (3, 4, 4) if task == "segmentation" else (len(made.class_names),)
    targets = {
        "multi-label": torch.rand(40, 3) < 0.5,
        "regression": torch.rand(40) * 100,
        "segmentation": torch.randint(0, 3, (40, 4, 4)),
    }[task]
    kept, y = made.summary(torch.randn(40, *shape), targets)
    column = np.array(["f", "m"] * 20)
    found = made.evaluate(kept.double().numpy(), y.numpy(), {"sex": column})
    rows = tuple(
        {"step": k, "epoch": float(k), "epsilon": 1.0 + k, **found.scores, "loss": 1.0,
         "records": 40} for k in (1, 2)
    )  # fmt: skip
    config = {"method": "bam", "data": task, "task": task}
    return Run(
        task,
        config,
        statement(),
        metrics=rows,
        evaluation=json.loads(json.dumps(found.to_dict())),
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_main_metric_of_a_task_is_drawn_and_named(task):
    run = task_run(task)
    label = {"multi-label": "AUC", "regression": "R2", "segmentation": "Dice"}[task]
    figure = build("accuracy", groups([run]))
    assert figure.title == label
    assert [row["y"] for row in figure.panels[0].rows] == [m[run.metric] for m in run.metrics]
    by_sex = build("groups", groups([run])).panels[0]
    assert {row["category"] for row in by_sex.rows} == {"f (20)", "m (20)"}


def test_findings_have_their_curves_and_values_their_points():
    roc = build("roc", groups([task_run("multi-label")])).panels[0]
    assert {row["series"] for row in roc.rows} == {"a", "b", "c"}
    assert all(0 <= row["x"] <= 1 and 0 <= row["y"] <= 1 for row in roc.rows)
    points = build("predicted", groups([task_run("regression")])).panels[0]
    assert len(points.rows) == 40
    dice = build("classes", groups([task_run("segmentation")]))
    assert dice.title == "Dice by class"
    assert build("confusion", groups([task_run("segmentation")])).panels


def test_sentences_are_in_the_words_of_the_task():
    def said(task, name):
        return build(name, groups([task_run(task)])).meaning[0]

    assert said("multi-label", "classes").startswith("finding ")
    assert said("multi-label", "accuracy").startswith("the AUC ends at 0.")
    assert "true one on average" in said("regression", "predicted")
    assert said("segmentation", "confusion").endswith(" pixels.")


def test_a_roc_curve_is_read_at_a_tenth_of_false_positives():
    run = task_run("multi-label")
    curves = {"a": [[0.0, 0.0], [0.2, 0.8], [1.0, 1.0]], "b": [[0.0, 1.0], [1.0, 1.0]], "c": []}
    known = replace(run, evaluation={**run.evaluation, "roc": curves})
    assert build("roc", groups([known])).meaning[0] == (
        "where 10% of the records without a finding are reported as well, 40% of those with a and "
        "100% of those with b are found."
    )


@pytest.mark.parametrize("task", TASKS)
def test_their_specifications_fit_the_schema_of_vega_lite(task):
    altair = pytest.importorskip("altair", reason="altair is in the dev extra, for its schema")
    jsonschema = pytest.importorskip("jsonschema")
    schema = {**altair.load_schema(), "$ref": "#/definitions/TopLevelConcatSpec"}
    valid = jsonschema.Draft7Validator(schema).is_valid
    name = {"multi-label": "roc", "regression": "predicted", "segmentation": "classes"}[task]
    spec = json.loads(json.dumps(build(name, groups([task_run(task)])).spec()))
    for panel in spec["concat"]:
        del panel["data"]["values"][3:]
    assert valid(spec)
    spec["concat"][0]["layer"][0]["encoding"]["colour"] = {"value": "red"}
    assert not valid(spec)


def test_a_page_misses_only_figures_that_its_task_could_have():
    page = render([task_run("segmentation")])
    assert "ROC curves" not in page
    assert "Dice by class" in page


def test_a_figure_can_be_drawn_as_a_file(tmp_path):
    figure = build("predicted", groups([task_run("regression")]))
    assert figure.save(tmp_path / "predicted.svg").read_text().count("<path") > 40
