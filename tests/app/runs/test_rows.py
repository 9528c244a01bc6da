import json
import math
from dataclasses import asdict, replace

import pytest

from dpbam.app.runs import RunError
from dpbam.app.runs.rows import ComparedRow, TrainingRow, append_row, read_rows, rewind_rows
from dpbam.bias import BiasRecord, ReleasedStatistics
from dpbam.bias.record import Layer, Norms, Reading
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
