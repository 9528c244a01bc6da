"""The committed results: every record fits its recipe, and the page's numbers are theirs."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from reproduce.bias_claims import figure2
from reproduce.index import PAPERS, outcomes
from reproduce.outcome import Study
from reproduce.recipes import load_recipe, recipe_names
from reproduce.records import finished as done
from reproduce.records import read_records, records_file
from reproduce.results_page import PAGE_SCALES, pages, section
from tests.reproduce.synthetic import best_lambda, best_rate, best_trial

ROOT = Path(__file__).parents[2]
RESULTS, STUDIES = ROOT / "reproduce" / "results", ROOT / "reproduce" / "pages"


@cache
def runs_by_records(scale):
    """The names of the runs of all recipes, by where their records are."""
    names = defaultdict(set)
    for recipe in (load_recipe(name, scale) for name in recipe_names(scale)):
        names[recipe.records] |= {run.name for run in recipe.runs()}
    return names


@pytest.mark.parametrize(
    ("scale", "name"), [(scale, name) for scale in PAGE_SCALES for name in recipe_names(scale)]
)
def test_committed_records_fit_their_recipe(scale, name):
    recipe = load_recipe(name, scale)
    records = done(recipe, RESULTS)  # refuses other settings, and runs that are no pair
    assert (
        set(read_records(records_file(recipe, RESULTS))) <= runs_by_records(scale)[recipe.records]
    )
    for record in records:
        assert record.epsilon <= (record.config.get("epsilon") or record.epsilon) + 1e-6
        assert 0 < record.accuracy < 1


@pytest.fixture(scope="module")
def generated():
    return pages({scale: outcomes(PAPERS, scale, RESULTS) for scale in PAGE_SCALES})


@pytest.mark.parametrize(
    "name", ["docs/results.md", "reproduce/pages/desk.md", "reproduce/pages/pocket.md"]
)
def test_the_pages_are_generated_from_the_records(name, generated):
    assert (ROOT / name).read_text(encoding="utf-8") == generated[name]


def test_the_first_page_answers_before_it_explains(generated):
    """A paragraph, two figures, and some 15 claims of the paper, each once."""
    opening, table = generated["docs/results.md"].split("## The paper's claims")
    assert len(opening.split("\n\n")[1].split()) < 200
    assert opening.count(".svg)") == 2
    rows = [row for row in table.split("## ")[0].splitlines() if row.startswith("| ")][1:]
    assert 12 <= len(rows) <= 20
    claims = [row.split(" | ")[1] for row in rows]
    assert len(set(claims)) == len(claims)
    assert all("**" in row for row in rows)


def test_a_changed_record_would_be_noticed():
    """Negative control: one accuracy is a point higher, and the page's part is another one."""
    recipe = load_recipe("methods")
    records = done(recipe, RESULTS)
    planted = [replace(records[0], accuracy=records[0].accuracy + 0.01), *records[1:]]
    text = (STUDIES / "pocket.md").read_text(encoding="utf-8")
    true, false = (
        section(figure2([Study(recipe, found, len(recipe.runs()))]), None)
        for found in (records, planted)
    )
    assert true in text
    assert false not in text


def test_the_pages_figures_are_there(generated):
    figures = [
        (ROOT / name).parent / figure
        for name, text in generated.items()
        for figure in re.findall(r"\]\(([^)]+\.svg)\)", text)
    ]
    assert len(figures) >= 10
    for figure in figures:
        assert figure.stat().st_size > 100


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


def tuned(trials, data):
    """Trials at desk scale, the recipe that depends on them, and that one's records."""
    recipe, table = load_recipe(f"{trials}-{data}", "desk"), load_recipe(f"table1-{data}", "desk")
    return Study(recipe, done(recipe, RESULTS), len(recipe.runs())), table, done(table, RESULTS)


@pytest.mark.parametrize("data", ["cifar10", "pneumonia"])
def test_desk_scale_trains_with_the_best_rate(data):
    study, table, records = tuned("tune", data)
    if len(study.records) < study.asked:
        assert not records  # trials come first
        return
    best = best_trial(study, "dp-sgd")["lr"]
    assert {run.config.lr for run in table.runs(1)} == {best}
    assert {run.config.lr for run in load_recipe(f"tune-lambda-{data}", "desk").runs()} == {best}


@pytest.mark.parametrize("data", ["cifar10", "pneumonia"])
@pytest.mark.parametrize("method", ["dp-sat", "bam"])
def test_desk_scale_trains_with_the_best_lambda(method, data):
    study, table, records = tuned("tune-lambda", data)
    tried = [arm for arm, fields in study.recipe.arms.items() if fields["method"] == method]
    if not set(tried) <= set(study.arms()):
        assert method not in {record.config["method"] for record in records}  # trials come first
        return
    best = best_lambda(study, method)
    arms = {**load_recipe("exact", "desk").arms, **table.arms}  # exact BAM takes BAM's
    assert {a["lam"] for a in arms.values() if a["method"] == method} == {best}
