"""Every pair of settings with each task: train, resume, state, evaluate, predict, report, compare.

The rows cover all pairs of values of the settings below; two of them run in the quick suite, the
others are slow. Each run is interrupted after a step, and resumed. A search per task is in
``tests/app/search/test_search.py``.
"""

from __future__ import annotations

import signal
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from dpbam.app.compare.comparison import Contender, compare, plan_runs
from dpbam.app.report import write_report
from dpbam.app.runs import RunConfig, execute, load_run_model
from dpbam.app.runs.files import read_json
from dpbam.app.runs.predict import evaluate_dataset, predict_files
from dpbam.app.runs.run import RunInterruptedError
from dpbam.data import load
from dpbam.data.dataset import TASKS
from dpbam.training.events import Reporter, StepReport
from tests.data.helpers import random_pixels

SETTINGS = {
    "task": TASKS,
    "method": ("dp-sgd", "dp-sat", "bam", "bam-exact", "disk", "sgd", "sam"),
    "engine": ("fused", "functional", "loop"),
    "unit": ("record", "patient"),
    "clipping": ("flat", "per-layer", "automatic"),
    "noise": ("standard", "secure"),
    "views": (0, 2),
    "weights": ("none", "given", "counts"),
}
NOT_PRIVATE = ("sgd", "sam")
METRICS = {
    "single-label": ["accuracy"],
    "multi-label": ["auc", "micro_auc", "average_precision", "micro_average_precision"],
    "regression": ["r2", "mae", "spearman"],
    "segmentation": ["dice", "iou"],
}
Row = dict[str, object]


def allowed(row: Row) -> bool:
    """Whether the settings given so far can be combined: others are refused, with a sentence."""
    weighted = row.get("weights") not in (None, "none")
    return not (
        (row.get("task") == "regression" and weighted)
        or (row.get("method") in NOT_PRIVATE and row.get("weights") == "counts")
        or (row.get("method") in NOT_PRIVATE and row.get("clipping") not in (None, "flat"))
        or (row.get("clipping") == "automatic" and weighted and row.get("task") == "single-label")
    )


def pairs(row: Row) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering_rows() -> list[Row]:
    """Greedy all-pairs: each row takes, of all values of a setting, the one with most new pairs."""
    left = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(SETTINGS, 2)
        for x, y in product(SETTINGS[a], SETTINGS[b])
        if allowed({a: x, b: y})
    }
    rows: list[Row] = []
    while left:
        row: Row = dict(min(left, key=sorted_text))
        for name, values in SETTINGS.items():
            if name not in row:
                fits = [v for v in values if allowed({**row, name: v})]
                row[name] = max(fits, key=lambda v: len(pairs({**row, name: v}) & left))
        left -= pairs(row)
        rows.append({name: row[name] for name in SETTINGS})
    return rows


def sorted_text(pair: frozenset[tuple[str, object]]) -> str:
    return str(sorted(map(str, pair)))


def write_data(folder: Path, task: str) -> Path:
    """60 images of 30 patients to train on, 20 to test."""
    rng, arrays = np.random.default_rng(0), {}
    for split, n in (("train", 60), ("test", 20)):
        arrays[f"{split}_images"] = random_pixels(n, n, (8, 8))
        arrays[f"{split}_patient"] = np.array([f"{split}{k // 2}" for k in range(n)])
        arrays[f"{split}_{'masks' if task == 'segmentation' else 'labels'}"] = {
            "single-label": np.arange(n) % 3,
            "multi-label": rng.integers(0, 2, (n, 3)),
            "regression": rng.uniform(0, 10, n),
            "segmentation": rng.integers(0, 3, (n, 8, 8), dtype=np.uint8),
        }[task]
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


def config_of(row: Row, data: Path) -> dict[str, object]:
    task, method = str(row["task"]), str(row["method"])
    models = {"segmentation": ("unet", {"width": 4, "depth": 1})}
    model = models.get(task, ("mlp", {"hidden": [4]}))
    values: dict[str, object] = {
        "data": str(data), "model": model[0], "model_options": model[1], "epochs": 1,
        "batch_size": 15, "physical_batch_size": 12, "accountant": "rdp", "num_workers": 0,
        "method": method.removesuffix("-exact"), "engine": row["engine"], "unit": row["unit"],
        "noise": row["noise"], "clipping": row["clipping"], "augment_multiplicity": row["views"],
        "eval_every": 100,
    }  # fmt: skip
    if row["views"]:
        values["shift"] = 1
    if method.endswith("-exact"):
        values["gradient"] = "exact"
    if method not in NOT_PRIVATE:
        values |= {"epsilon": 8.0}
    if task == "regression":
        values["target_range"] = (0.0, 10.0)
    if row["weights"] == "given":
        values |= {"class_weights": {"1": 3.0}, "focal": 2.0}
    if row["weights"] == "counts":
        values["release_counts"] = 10.0
    return values


class Stopping(Reporter):
    """Asks for a stop after the first step, as Ctrl-C does."""

    def on_step(self, report: StepReport) -> None:
        if report.step == 1:
            signal.raise_signal(signal.SIGTERM)


QUICK = ("multi-label", "segmentation")
ROWS = covering_rows()
FIRST = [next(k for k, row in enumerate(ROWS) if row["task"] == task) for task in QUICK]


def test_the_rows_cover_every_allowed_pair():
    covered = set().union(*map(pairs, ROWS))
    for (a, b), row in ((ab, r) for ab in combinations(SETTINGS, 2)
                        for r in product(SETTINGS[ab[0]], SETTINGS[ab[1]])):  # fmt: skip
        pair = {a: row[0], b: row[1]}
        assert not allowed(pair) or pairs(pair) <= covered
    assert all(map(allowed, ROWS))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if k in FIRST else pytest.mark.slow,
                     id="-".join(map(str, row.values())))
        for k, row in enumerate(ROWS)
    ],
)  # fmt: skip
def test_a_run_of_any_combination_is_whole(row, tmp_path):
    data, out = write_data(tmp_path, row["task"]), tmp_path / "run"
    config = RunConfig(**config_of(row, data))
    with pytest.raises(RunInterruptedError):
        execute(config, out, reporter=Stopping())
    assert not (out / "model.safetensors").exists()
    result = execute(config, out, resume=True)
    assert result.steps == result.charged == result.plan.steps
    assert list(result.evaluations[-1].scores) == METRICS[row["task"]]
    again = execute(config, out, resume=True)
    assert (again.charged, again.epsilon) == (result.charged, result.epsilon)
    stated = read_json(out / "privacy-statement.json")
    assert stated["private"] == (row["method"] not in NOT_PRIVATE)
    assert ("class-counts.json" in stated["may_be_published"]) == (row["weights"] == "counts")
    if config.private:
        assert result.epsilon <= 8.0
    model = load_run_model(out)
    found = evaluate_dataset(model, load(str(data), split="test"), by=["patient"])
    assert found.to_dict()["groups"]["patient"]["groups"]
    np.savez(tmp_path / "new.npz", images=random_pixels(2, 5, (8, 8)))
    predictions = list(predict_files(model, [tmp_path / "new.npz"]))
    assert [p.row.mask is not None for p in predictions] == [row["task"] == "segmentation"] * 2
    assert write_report([out], tmp_path).stat().st_size > 10**5


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_methods_are_compared_by_the_tasks_metric(task, tmp_path):
    row = {name: values[0] for name, values in SETTINGS.items()} | {"task": task}
    shared = config_of(row, write_data(tmp_path, task))
    del shared["method"]
    runs = plan_runs(shared, [Contender("dp-sgd"), Contender("bam")], range(2), tmp_path / "both")
    found = compare(runs, tmp_path / "both").to_dict()
    assert METRICS[task][0] in found["contenders"]["bam"]
    assert set(METRICS[task]) <= set(found["runs"][0])
