"""A search with each task: scored by the task's metric, its best published with all it released."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpbam.app.cli.search import show
from dpbam.app.runs import ConfigError, load_run_model
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.predict import predict_files
from dpbam.app.search.search import Search, parse_space
from dpbam.app.search.study import BEST, SearchResult, conclude, do_trials
from dpbam.data.dataset import TASKS
from dpbam.tasks.scores import metric_label, metric_text
from tests.app.runs.test_task_combinations import METRICS, SETTINGS, config_of, write_data
from tests.data.helpers import random_pixels

QUICK = ("multi-label",)


def a_search(task: str, folder: Path, **changes: Any) -> Search:
    """Two trials of dp-sgd; classes are weighted by counts that every trial releases."""
    weights = "none" if task == "regression" else "counts"
    row = {name: values[0] for name, values in SETTINGS.items()} | {"weights": weights}
    settings = config_of({**row, "task": task}, write_data(folder, task))
    del settings["method"], settings["epsilon"]
    settings |= {"noise_multiplier": 2.0, "delta": 1e-3, "epochs": 0.5}
    values = {"pay": "nothing", "trials": 2, "settings": settings}
    return Search(**{**values, "space": parse_space(["lr=1e-3..1e-1:log"]), **changes})


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in TASKS]
)
@pytest.mark.slow
def test_a_search_finds_and_publishes_the_best_model_of_a_task(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search, out = a_search(task, tmp_path), tmp_path / "search"
    lines: list[str] = []
    result = conclude(do_trials(search, out, log=lines.append))
    assert result.trial is not None
    _check_shown(result, lines, METRICS[task][0], capsys)
    last = json.loads(result.trial.metrics.read_text().splitlines()[-1])
    assert json.loads((out / "result.json").read_text())["best"]["score"] == last[METRICS[task][0]]
    best = RunFolder(out / BEST)
    stated = json.loads(best.statement_json.read_text())
    assert sorted(stated["may_be_published"]) == sorted(p.name for p in best.path.iterdir())
    assert best.class_counts.exists() == (task != "regression")
    np.savez(tmp_path / "new.npz", images=random_pixels(2, 5, (8, 8)))
    assert len(list(predict_files(load_run_model(best.path), [tmp_path / "new.npz"]))) == 2


def _check_shown(
    result: SearchResult, lines: list[str], metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every score is of its metric's kind: a percentage only where it is an accuracy."""
    assert result.best is not None
    value = result.best.score
    text = f"{metric_label(metric)} {metric_text(metric, value)}"
    assert any(text in line for line in lines)
    capsys.readouterr()
    show(result)
    shown = capsys.readouterr().out
    assert text in shown
    assert ("%" in shown) == (metric == "accuracy")


def test_a_noised_score_is_refused_where_one_record_s_effect_has_no_bound(tmp_path: Path) -> None:
    search = a_search("regression", tmp_path, pay="accounted", score_noise=4.0)
    with pytest.raises(ConfigError, match="r2 has no such bound"):
        search.calibrated()
