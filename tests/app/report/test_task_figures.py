"""Figures of runs of each task: the main metric, ROC curves, predicted values, Dice by class."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from dpbam.app.report.groups import groups
from dpbam.app.report.html import build, render
from dpbam.app.report.records import Run
from dpbam.tasks.base import make_task
from tests.app.report.synthetic import statement

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
