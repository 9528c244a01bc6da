"""The committed results: every record fits its recipe, and the page's numbers are theirs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.experiments.paper.accuracy_claims import best_lambda, best_rate
from dpbam.experiments.paper.bias_claims import figure2
from dpbam.experiments.paper.index import EXPERIMENTS, outcome
from dpbam.experiments.paper.outcome import Study
from dpbam.experiments.paper.recipes import load_recipe, recipe_names
from dpbam.experiments.paper.reproduce import done, records_folder
from dpbam.experiments.paper.results_page import page, section

ROOT = Path(__file__).parents[3]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"


@pytest.mark.parametrize("name", recipe_names("pocket"))
def test_committed_records_fit_their_recipe(name):
    recipe = load_recipe(name)
    records = done(recipe, RESULTS)  # refuses other settings, and runs that are no pair
    folder = records_folder(recipe, RESULTS)
    known = {run.name for other in recipe_names("pocket") for run in load_recipe(other).runs()
             if load_recipe(other).records == recipe.records}  # fmt: skip
    assert {path.stem for path in folder.glob("*.json")} <= known
    for record in records:
        assert record.epsilon <= record.config["epsilon"] + 1e-6
        assert 0 < record.accuracy < 1


def test_the_page_is_what_the_records_say():
    found = [outcome(name, "pocket", RESULTS) for name in EXPERIMENTS]
    again = page([one for one in found if one is not None])
    assert (DOCS / "results.md").read_text(encoding="utf-8") == again


def test_a_changed_record_would_be_noticed():
    """Negative control: one accuracy is a point higher, and the page's part is another one."""
    recipe = load_recipe("methods")
    records = done(recipe, RESULTS)
    planted = [replace(records[0], accuracy=records[0].accuracy + 0.01), *records[1:]]
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    true, false = (
        section(figure2([Study(recipe, found, len(recipe.runs()))]), "results/")
        for found in (records, planted)
    )
    assert true in text
    assert false not in text


def test_the_pages_figures_are_there():
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    figures = re.findall(r"\]\((results/[^)]+)\)", text)
    assert len(figures) >= 5
    for figure in figures:
        assert (DOCS / figure).stat().st_size > 100


@pytest.mark.parametrize("data", ["cifar10", "pneumonia"])
def test_every_method_trains_with_its_best_rate(data):
    tuning, table = load_recipe(f"tune-{data}"), load_recipe(f"table1-{data}")
    study = Study(tuning, done(tuning, RESULTS), 9)
    assert len(study.records) == study.asked
    for run in table.runs(1):
        assert run.config.lr == best_rate(study, run.config.method)


@pytest.mark.parametrize("data", ["cifar10", "pneumonia"])
def test_lambda_is_the_papers_and_the_best_of_what_was_tried(data):
    tuning, table = load_recipe(f"tune-lambda-{data}"), load_recipe(f"table1-{data}")
    study = Study(tuning, done(tuning, RESULTS), 24)
    assert len(study.records) == study.asked
    for method, papers in (("dp-sat", 0.086), ("bam", 0.02)):
        best = best_lambda(study, method)
        assert table.arms[method]["lam"] == papers
        tuned = table.arms.get(f"{method}-tuned", table.arms[method])
        assert tuned["lam"] == best
