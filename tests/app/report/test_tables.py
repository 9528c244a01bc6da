from __future__ import annotations

from pathlib import Path

from dpbam.app.report.groups import groups
from dpbam.app.report.records import Run, read_run
from dpbam.app.report.tables import results, side_by_side
from tests.app.report.synthetic import write_run


def test_settings_that_differ_come_first_and_are_marked() -> None:
    runs = [
        Run("a", {"model": "mlp", "method": "bam", "lr": 0.1, "seed": 1}, {}),
        Run("b", {"model": "mlp", "method": "bam", "lr": 0.2, "seed": 1}, {}),
    ]
    table = side_by_side(groups(runs), lambda run: run.config)
    assert [row[0] for row in table.rows] == ["lr", "model", "method", "seed"]
    assert table.differing == 1
    assert table.rows[0] == ("lr", "0.1", "0.2")


def test_seeds_of_one_group_share_a_cell() -> None:
    runs = [Run(str(k), {"method": "bam", "seed": k}, {}) for k in (3, 5)]
    table = side_by_side(groups(runs), lambda run: run.config)
    assert table.rows[1] == ("seed", "3, 5")
    assert table.differing == 0


def test_every_epsilon_is_rounded_up() -> None:
    budget = {"epsilon": 1.00001, "taken": 0.99991}
    run = Run("a", {"method": "bam", "epsilon": 2.97654, "budget": budget}, {})
    rows = dict(side_by_side(groups([run]), lambda run: run.config).rows)
    assert rows["epsilon"] == "2.977"
    assert rows["budget"] == "epsilon 1.001, taken 1"


def test_results_are_means_with_their_spread(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    runs = [read_run(folder) for folder in folders]
    table = results(groups(runs))
    last = [run.metrics[-1]["accuracy"] for run in runs]
    spread = abs(last[0] - last[1]) / 2**0.5
    assert table.rows[0][2] == f"{sum(last) / 2:.1%} ± {spread:.1%}"
    assert [head in table.marked for head in table.heads] == [False, False, False, True, True]


def test_results_without_measurements_have_no_columns_for_them(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", measured=False))
    assert results(groups([run])).heads == ("setting", "runs", "final accuracy")
