"""A head in closed form as a run: trained, audited, resumed, exported; for every task."""

from __future__ import annotations

import errno
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dpbam.app.audit.check import check_run, passed
from dpbam.app.runs import ConfigError, RunConfig, RunError, checkpoint, execute, load_run_model
from dpbam.app.runs.bias import measure
from dpbam.app.runs.export import export
from dpbam.app.runs.files import disk_error, read_json, read_json_lines
from dpbam.app.runs.predict import evaluate_dataset
from dpbam.app.runs.preparation import prepare
from dpbam.data import load
from dpbam.errors import DPBAMError
from dpbam.heads import class_targets, release_moments
from dpbam.heads.closed_form import BOUND


@pytest.fixture(scope="module")
def asked() -> RunConfig:
    return RunConfig(
        model="auto", head="closed-form", data="digits", epsilon=3.0, accountant="rdp", seed=7,
        num_workers=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(asked, tmp_path_factory):
    out = tmp_path_factory.mktemp("closed") / "run"
    execute(asked, out)
    return out


def test_the_saved_model_predicts_what_training_evaluated(finished):
    test = load("digits", split="test")
    accuracy = evaluate_dataset(load_run_model(finished), test).scores["accuracy"]
    assert accuracy == read_json_lines(finished / "metrics.jsonl")[-1]["accuracy"]
    assert accuracy > 0.6  # the best constant has 0.103


def test_the_run_is_one_charge_within_epsilon_and_passes_the_audit(finished):
    (charge,) = read_json_lines(finished / "ledger.jsonl")
    assert charge["sampling_rate"] == 1.0
    statement = read_json(finished / "privacy-statement.json")
    assert statement["epsilon"] <= 3
    assert statement["clip_norm"] == BOUND
    assert "released once" in statement["method"]
    assert passed(check_run(finished))


def test_a_run_releases_the_moments_of_the_library(finished, asked):
    """The same seed, features and plan: the run's weights are minus what the library releases."""
    prepared = prepare(asked)
    train = prepared.seen.train
    rows, labels = train.batch(np.arange(len(train)))
    library = release_moments(rows.flatten(1), class_targets(labels, 10), prepared.plan, seed=7)
    moments = load_run_model(finished).module.head.moments()
    # the sum's order may differ, the noise may not
    torch.testing.assert_close(moments.cross, library.cross, rtol=0, atol=1e-6)
    torch.testing.assert_close(moments.gram, library.gram, rtol=0, atol=1e-6)
    assert moments.gram_std == pytest.approx(library.gram_std)


def test_a_finished_run_resumes_to_the_same_model(finished, asked):
    before = (finished / "model.safetensors").read_bytes()
    execute(asked, finished, resume=True)
    assert (finished / "model.safetensors").read_bytes() == before


class KilledError(BaseException):
    """Ends a run as a signal does: nothing more is written."""


def _end_before_the_checkpoint(config, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", Mock(side_effect=KilledError))
        with pytest.raises(KilledError):
            execute(config, out)


def test_a_lost_release_is_not_handed_out_as_a_head_of_zeros(asked, tmp_path, monkeypatch):
    config = asked.replace(seed=None)
    _end_before_the_checkpoint(config, tmp_path / "run", monkeypatch)
    for _ in range(2):
        with pytest.raises(RunError, match=r"its first checkpoint: .* charged and lost"):
            execute(config, tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="there is no model"):
        export(tmp_path / "run", "safetensors", tmp_path / "out")
    assert len(read_json_lines(tmp_path / "run" / "ledger.jsonl")) == 1


def test_a_seeded_release_that_was_lost_is_repeated(asked, finished, tmp_path, monkeypatch):
    _end_before_the_checkpoint(asked, tmp_path / "run", monkeypatch)
    execute(asked, tmp_path / "run", resume=True)
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize(("seed", "way_out"), [(7, "then resume"), (None, "start a new run with")])
def test_resuming_is_proposed_only_where_it_is_possible(
    seed, way_out, asked, tmp_path, monkeypatch
):
    full = disk_error(tmp_path / "file", OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(checkpoint, "write_atomic", Mock(side_effect=full))
    with pytest.raises(RunError, match=way_out) as caught:
        execute(asked.replace(seed=seed), tmp_path / "run")
    assert "No space left on device" in str(caught.value)
    assert ("resume" in str(caught.value)) == (seed is not None)


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "safetensors"])
def test_the_exported_model_predicts_the_same(format, finished, tmp_path):
    if format == "onnx":
        pytest.importorskip("onnxscript")
    export(finished, format, tmp_path / format)
    assert (tmp_path / format / "exported.json").exists()


def _written(tmp_path, name: str, **arrays):
    path = tmp_path / f"{name}.npz"
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_other_tasks_learn_in_closed_form(task, tmp_path):
    """The digit as a value, and its properties as findings."""
    digits = load("digits")
    images, number = (values.numpy() for values in digits.batch(np.arange(len(digits))))
    findings = np.stack([number % 2 == 0, number > 4, number == 0], axis=1)
    labels = number / 9 if task == "regression" else findings.astype(np.int64)
    further = {"target_range": (0.0, 1.0)} if task == "regression" else {"head": "closed-form"}
    config = RunConfig(
        model="auto", data=_written(tmp_path, "digits", images=images[:, 0], labels=labels),
        epsilon=8.0, accountant="rdp", seed=1, num_workers=0, task=task, **further,
    )  # fmt: skip
    result = execute(config, tmp_path / "run")
    assert result.spec.config.head == "closed-form"
    assert result.score > (0.2 if task == "regression" else 0.7)  # constants have 0 and 0.5
    module = load_run_model(tmp_path / "run").module
    assert module.head.task == task
    assert passed(check_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "bam"}, "no gradients, so method"),
        ({"measure_bias": 5}, "no gradients, so measure_bias"),
        ({"lr": 0.1}, "no gradients, so lr"),
        ({"swa": 0.5}, "no gradients, so swa"),
        ({"release_counts": 20.0}, "no gradients, so release_counts"),
        ({"model": "small-cnn"}, "head closed-form is for fixed features"),
    ],
)
def test_what_the_closed_form_does_not_have_is_refused(asked, changes, message):
    with pytest.raises(ConfigError, match=message):
        asked.replace(**changes)


def test_part_of_the_units_is_refused(asked):
    with pytest.raises(ConfigError, match="one release from all 1438 units"):
        prepare(asked.replace(batch_size=100))


def test_its_bias_is_not_measured(finished, asked):
    with pytest.raises(DPBAMError, match="has no gradients"):
        measure(asked, run=finished, batches=1)
