"""The laptop recipe's committed records, and the page that shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from dpbam.app.runs import RunConfig
from reproduce.index import outcome
from reproduce.laptop_page import page
from reproduce.recipes import load_recipe

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "reproduce" / "results" / "laptop.jsonl").read_text().splitlines()
RECORDS = [json.loads(line) for line in LINES]
PAGE = (ROOT / "docs" / "how-good.md").read_text()


def scored(on: str, epsilon: float) -> list[dict[str, Any]]:
    return [r for r in RECORDS if (r["scored_on"], r["epsilon_asked"]) == (on, epsilon)]


def settings(found: dict[str, Any]) -> str:
    lr, clip_norm = found["config"]["lr"], found["config"]["clip_norm"]
    return f"| {found['epsilon_asked']:g} | {lr:g} | {clip_norm:g} | {found['steps']} |"


@pytest.mark.parametrize("row", RECORDS, ids=lambda row: row["run"])
def test_a_record_keeps_its_promise(row: dict[str, Any]) -> None:
    found = row
    tuned = found["scored_on"] != "test"
    assert found["epsilon"] <= found["epsilon_asked"]
    assert found["delta"] == 1e-5
    assert found["n"] == (45_000 if tuned else 50_000)
    assert found["config"]["data"].endswith("_tuning") == tuned


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 8.0])
def test_the_page_has_the_mean_of_five_seeds_with_the_best_settings(epsilon: float) -> None:
    runs, tries = scored("test", epsilon), scored("held-out training records", epsilon)
    assert sorted(r["seed"] for r in runs) == [0, 1, 2, 3, 4]
    best = max(tries, key=lambda r: r["accuracy"])
    recipe = load_recipe("laptop", "desk")
    for run in runs:
        own = {**recipe.variants[f"epsilon-{epsilon:g}"], **recipe.arms["dp-sgd"]}
        now = RunConfig.from_mapping({**recipe.setting, **own})
        own_to_a_run = {"seed": run["seed"], "unit": "record", "device": "auto", "num_workers": 2}
        assert RunConfig.from_mapping(run["config"]) == now.replace(**own_to_a_run)
        assert (now.lr, now.clip_norm, run["steps"]) == (
            best["config"]["lr"], best["config"]["clip_norm"], best["steps"],
        )  # fmt: skip
    accuracies = [100 * r["accuracy"] for r in runs]
    row = f"{settings(runs[0])} 5 | {fmean(accuracies):.2f}% | {stdev(accuracies):.2f} |"
    assert row in PAGE


def test_the_page_has_the_runs_of_the_study() -> None:
    found = outcome("laptop", "desk", ROOT / "reproduce" / "results")
    assert found is not None
    assert page(found) == PAGE
    (table,) = found.tables  # negative control: another accuracy
    rows = [(*row[:5], "99.00", *row[6:]) for row in table.rows]
    assert page(replace(found, tables=[replace(table, rows=rows)])) != PAGE
