"""Files with one line per step: what a run writes there, reads again and drops."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import asdict, replace
from types import ModuleType

import pytest

from dpbam.app.runs import ConfigError, RunConfig, RunError, execute, prepare, stored_config
from dpbam.app.runs.rows import ComparedRow, TrainingRow, append_row, read_rows, rewind_rows
from dpbam.bias import BiasRecord, ReleasedStatistics
from dpbam.bias.record import Layer, Norms, Reading
from dpbam.privacy.noise import GaussianNoise
from dpbam.tasks.scores import Compared
from dpbam.training.events import EvaluationReport

READING = Reading(1.0, 0.5, 0.6, 0.6, 0.5, True, 0.1, 0.0, 0.9, 0.1, 0.98, 0.5, 0.2, 0.9, math.inf)
BIAS = BiasRecord(
    step=3, method="bam", lam=0.02, clip_norm=1.0, batch_size=64, noise_multiplier=1.5,
    noise_norm=math.nan, non_private_units=60, non_private_broken=0,
    non_private_against_plain=None, non_private_against_own=READING, non_private_lemma2_bound=0.7,
    non_private_norms=Norms((0.1, 0.2), 0.15, (3, 4)), non_private_plain_norms=None,
    non_private_clip_share=0.5, non_private_alignment=None, non_private_flatness_slack=0.1,
    non_private_layers={"0": Layer(None, None, 0.1, 0.2, 0.3)},
)  # fmt: skip
ROWS = [
    TrainingRow(step=1, lr=0.1, seconds=2.5, non_private_batch_size=7, non_private_loss=None),
    ComparedRow(step=1, compared={"accuracy": Compared(0.5, 0.4, 0.1)}),
    EvaluationReport(step=1, epoch=0.5, epsilon=math.inf, scores={"auc": 0.5}, loss=2.0, records=9),
    ReleasedStatistics(0, (0.5, 1.0), (1.5, -2.0, 3.0), 4.0, 1.0),
    BIAS,
]


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # NaN is not equal to itself


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_what_is_written_is_what_is_read(tmp_path, row):
    append_row(tmp_path / "log", row)
    (line,) = (tmp_path / "log").read_text().splitlines()
    json.loads(line, parse_constant=pytest.fail)  # neither NaN nor Infinity
    (read,) = read_rows(tmp_path / "log", type(row))
    assert same(read, row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_a_line_of_another_kind_is_refused_with_its_place(tmp_path, row):
    append_row(tmp_path / "log", row)
    with (tmp_path / "log").open("a") as file:
        file.write('{"step": "third"}\n')
    with pytest.raises(RunError, match=r"log line 2 is damaged \(.+\): restore"):
        read_rows(tmp_path / "log", type(row))


def test_nan_is_null_in_a_metrics_line_and_comes_back(tmp_path):
    row = replace(ROWS[2], scores={"accuracy": 0.5, "auc": math.nan}, epsilon=1.5)
    append_row(tmp_path / "log", row)
    assert json.loads((tmp_path / "log").read_text())["auc"] is None
    assert math.isnan(read_rows(tmp_path / "log", EvaluationReport)[0].scores["auc"])


def test_a_missing_loss_stays_missing_and_is_not_nan(tmp_path):
    append_row(tmp_path / "log", ROWS[0])
    assert read_rows(tmp_path / "log", TrainingRow)[0].non_private_loss is None


def test_rows_after_a_step_are_dropped_and_the_rest_is_untouched(tmp_path):
    path = tmp_path / "log"
    for step in range(4):
        append_row(path, replace(ROWS[0], step=step))
    lines = path.read_text().splitlines(keepends=True)
    assert [row.step for row in rewind_rows(path, TrainingRow, 2)] == [0, 1, 2]
    assert path.read_text() == "".join(lines[:3])
    assert rewind_rows(tmp_path / "none", TrainingRow, 2) == []
    assert not (tmp_path / "none").exists()


def test_the_fields_of_a_metrics_line_stand_next_to_its_scores(tmp_path):
    append_row(tmp_path / "log", ROWS[2])
    fields = json.loads((tmp_path / "log").read_text())
    assert list(fields) == ["step", "epoch", "epsilon", "auc", "loss", "records"]
    assert {**asdict(ROWS[2]), **fields}["epsilon"] == "infinite"


def test_what_is_not_private_is_kept_apart(tiny, tmp_path):
    out = execute(tiny, tmp_path / "run").out
    assert "non_private" not in (out / "metrics.jsonl").read_text()
    assert "non_private_loss" in (out / "non-private" / "training.jsonl").read_text()


def test_curves_go_to_the_non_private_folder(tiny, tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def flush(self):
            pass

        def close(self):
            written.append(("close",))

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr("dpbam.app.runs.preparation.find_spec", lambda name: name)
    out = tmp_path / "run"
    execute(tiny.replace(tensorboard=True), out)
    assert written[0] == ("open", str(out / "non-private" / "tensorboard"), 1)
    assert written[-1] == ("close",)
    names = {entry[0] for entry in written[1:-1]}
    assert names == {"epsilon", "lr", "non_private/batch_size", "non_private/loss",
                     "test/accuracy", "test/loss"}  # fmt: skip
    assert [step for name, step in written[1:-1] if name == "lr"] == list(range(1, 9))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("dpbam.app.runs.preparation.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dpbam\[tensorboard\]'"):
        prepare(RunConfig(noise_multiplier=1.0, tensorboard=True))


@pytest.mark.parametrize(("seed", "times"), [(None, 5 + 8), (5, 8)])
def test_evaluations_are_counted_across_restarts(tiny, tmp_path, monkeypatch, seed, times):
    """Five were made before the crash, and eight after: the statement said eight.

    A seeded run makes the same five again, which tell nothing new.
    """
    config, out = tiny.replace(seed=seed, checkpoint_every=1e9), tmp_path / "run"
    real = GaussianNoise.add

    def add(self, sums, std, at, **more):
        if at == 5:
            raise RuntimeError("dead")
        return real(self, sums, std, at, **more)

    monkeypatch.setattr(GaussianNoise, "add", add)
    with pytest.raises(RuntimeError, match="dead"):
        execute(config, out)
    monkeypatch.undo()
    shutil.rmtree(out / "checkpoints")  # the crash came before the first
    for _ in range(2):  # a finished run that is resumed evaluates nothing anew
        execute(stored_config(out), out, resume=True)
        statement = json.loads((out / "privacy-statement.json").read_text())
        assert statement["evaluated_on"]["times"] == times
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize("text", ["balanced_accuracy", "constant", "chance"])
def test_the_comparison_with_a_constant_is_for_the_operator_alone(tiny, tmp_path, text):
    """It is computed from the test records, and no file outside non-private/ has it."""
    result = execute(tiny, tmp_path / "run")
    assert {*result.evaluations[-1].compared} == {"accuracy", "balanced_accuracy"}
    files = [path for path in result.out.rglob("*") if path.is_file()]
    public = [p for p in files if "non-private" not in p.parts and "checkpoints" not in p.parts]
    having = [p.name for p in public if f'"{text}":' in p.read_text(errors="replace")]
    assert having == []
    rows = (result.out / "non-private" / "evaluations.jsonl").read_text()
    assert f'"{text}":' in rows  # the search finds it where it is


def test_a_resumed_run_knows_the_comparison(tiny, tmp_path):
    first = execute(tiny, tmp_path / "run").evaluations[-1]
    again = execute(tiny, tmp_path / "run", resume=True).evaluations[-1]
    assert first.compared
    assert again.compared == first.compared
