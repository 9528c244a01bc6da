from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpbam.app.report.groups import groups
from dpbam.app.report.html import build, render
from dpbam.app.report.records import Run, read_run
from dpbam.app.report.statement import privacy
from dpbam.app.report.tables import results, side_by_side
from dpbam.app.runs.effects import used_settings
from dpbam.privacy.accounting import Charge, total_epsilon
from tests.app.report.synthetic import statement, write_run


def test_settings_that_differ_come_first_and_are_marked() -> None:
    runs = [
        Run("a", {"model": "mlp", "method": "bam", "lr": 0.1, "seed": 1}),
        Run("b", {"model": "mlp", "method": "bam", "lr": 0.2, "seed": 1}),
    ]
    table = side_by_side(groups(runs), lambda run: run.config)
    assert [row[0] for row in table.rows] == ["lr", "model", "method", "seed"]
    assert table.differing == 1
    assert table.rows[0] == ("lr", "0.1", "0.2")


def test_seeds_of_one_group_share_a_cell() -> None:
    runs = [Run(str(k), {"method": "bam", "seed": k}) for k in (3, 5)]
    table = side_by_side(groups(runs), lambda run: run.config)
    assert table.rows[1] == ("seed", "3, 5")
    assert table.differing == 0


def test_every_epsilon_is_rounded_up() -> None:
    budget = {"epsilon": 1.00001, "taken": 0.99991}
    run = Run("a", {"method": "bam", "epsilon": 2.97654, "budget": budget})
    rows = dict(side_by_side(groups([run]), lambda run: run.config).rows)
    assert rows["epsilon"] == "2.977"
    assert rows["budget"] == "epsilon 1.001, taken 1"


def test_results_are_means_with_their_intervals(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    runs = [read_run(folder) for folder in folders]
    table = results(groups(runs))
    last = [run.metrics[-1]["accuracy"] for run in runs]
    mean, half = sum(last) / 2, 12.7062 * abs(last[0] - last[1]) / 2  # t of one degree of freedom
    assert table.rows[0][2] == f"{mean:.1%} [{mean - half:.1%}, {mean + half:.1%}]"
    assert [head in table.marked for head in table.heads] == [False] * 4 + [True]


def test_results_without_measurements_have_no_columns_for_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", measured=False))
    assert results(groups([run])).heads == ("setting", "runs", "final accuracy", "ε of one run")


def test_a_comparison_has_paired_differences_and_its_constant() -> None:
    scores = {"dp-sgd": (0.80, 0.90), "bam": (0.82, 0.94), "sgd": (0.95, 0.97)}
    constant = {"accuracy": {"score": 0.9, "constant": 0.25, "chance": 0.1}}
    runs = [
        Run(
            f"{method}-{seed}", {"method": method, "seed": seed},
            statement(method, seed, epsilon=2.9991),
            metrics=({"step": 1, "epoch": 1.0, "accuracy": accuracy},),
            compared=({"step": 1, "compared": constant},),
        )
        for method, accuracies in scores.items()
        for seed, accuracy in enumerate(accuracies)
    ]  # fmt: skip
    table = results(groups(runs))
    rows = {row[0]: dict(zip(table.heads, row, strict=True)) for row in table.rows}
    assert rows["BAM"]["difference to DP-SGD"] == "+3.0 [-9.7, +15.7]"  # 2 and 4 points
    assert rows["BAM"]["verdict"] == "no winner"
    assert rows["DP-SGD"]["verdict"] == ""
    assert rows["DP-SGD"]["ε of one run"] == "3"
    assert rows["best constant answer"]["final accuracy"] == "25.0%"
    figure = build("differences", groups(runs))
    assert figure.meaning[0] == (
        "BAM: +3.0 points on average over 2 seeds, 95% interval [-9.7, +15.7]: no winner."
    )
    (panel,) = figure.panels
    drawn = {row["setting"]: row for row in panel.rows}
    assert drawn["BAM"]["difference"] == pytest.approx(3.0)
    assert drawn["SGD, no privacy"]["seeds"] == 2
    alone = build("differences", groups([run for run in runs if run.config["seed"] == 0]))
    assert alone.meaning[0] == "BAM: +2.0 points with one seed, which shows no winner."
    assert '"field": "low", "type": "quantitative", "format"' in json.dumps(panel.view)
    assert '"field": "low", "type": "quantitative", "format"' not in json.dumps(
        alone.panels[0].view
    )
    unpaired = [replace(run, config={**run.config, "seed": None}) for run in runs]
    assert not build("differences", groups(unpaired)).panels


def test_settings_without_effect_are_not_shown() -> None:
    config = {
        "method": "dp-sgd", "gradient": "approximate", "lam_share": 1e-4, "momentum": 0.9,
        "optimizer": "nadam", "shift": 4, "augment_multiplicity": 0, "focal": 0.0, "lr": 0.1,
        "clip_norm": 1.0, "freeze": [], "tensorboard": False,
    }  # fmt: skip
    assert used_settings(config) == {
        "method": "dp-sgd", "optimizer": "nadam", "lr": 0.1, "clip_norm": 1.0,
    }  # fmt: skip
    assert set(used_settings({**config, "augment_multiplicity": 2})) >= {"shift"}
    assert "momentum" in used_settings({**config, "optimizer": "sgd"})
    assert "gradient" in used_settings({**config, "method": "bam"})
    assert "clip_norm" not in used_settings(config, private=False)
    page = render([Run("a", config, statement())])
    assert '<th scope="row">clip_norm</th>' in page
    assert '<th scope="row">gradient</th>' not in page


def test_one_run_in_full_rounded_up(tmp_path: Path) -> None:
    view = privacy(groups([read_run(write_run(tmp_path / "a"))]))
    assert view.epsilon == "2.977"  # of 2.97654: never below the truth
    assert view.promise == "at δ = 0.0001, for every record (one image and its label)"
    assert view.share == 99.3  # of 99.218, shown with one digit
    assert dict(view.facts.rows)["units"] == "1000"
    assert view.publishable == ("model.safetensors", "privacy-statement.json")
    assert view.perhaps == ("metrics.jsonl",)
    assert "non-private/" in view.withheld
    assert view.warnings == ()
    assert view.facts.differing == 0


def test_models_of_the_same_data_add_up(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / m, method=m) for m in ("dp-sgd", "bam", "sgd")]
    view = privacy(groups([read_run(f) for f in folders]))
    together = total_epsilon(
        [Charge(1.4958, 0.1, 60)] * 2, 1e-4, accountant="rdp"
    )  # as charged, released statistics included; the reference has no noise
    assert float(view.epsilon) == pytest.approx(together, rel=1e-3)
    assert float(view.epsilon) >= together
    assert "if all 2 private models are published" in view.promise
    assert ("epsilon", "2.977", "2.977", "infinite") in view.facts.rows


def test_warnings_come_first(tmp_path: Path) -> None:
    seeded = privacy(groups([read_run(write_run(tmp_path / "a", seed=1))]))
    assert [title for title, _ in seeded.warnings] == ["Research only"]
    reference = privacy(groups([read_run(write_run(tmp_path / "b", method="sgd"))]))
    assert (reference.epsilon, reference.share) == ("∞", None)
    assert [title for title, _ in reference.warnings] == ["No privacy"]
    half = privacy(groups([read_run(write_run(tmp_path / "c", finished=False))]))
    assert [title for title, _ in half.warnings] == ["Not finished"]
