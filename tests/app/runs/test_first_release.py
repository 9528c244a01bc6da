"""The centre of features in a run: used in training and prediction, resumed, audited."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dpbam.app.audit.check import check_run, passed
from dpbam.app.runs import ConfigError, RunConfig, RunError, execute, load_run_model, prepare
from dpbam.app.runs.files import read_json, read_json_lines
from dpbam.app.runs.first_release import feature_sum, shrunk
from dpbam.app.runs.predict import evaluate_dataset
from dpbam.data import load
from dpbam.features import recentre_rows


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig(
        model="scattering", epsilon=8.0, accountant="rdp", batch_size=1438, epochs=3, lr=0.3,
        optimizer="sgd", clip_norm=3.0, swa=0.4, num_workers=0, checkpoint_every=0, seed=5,
        release_centre=4.0, release_counts=9.0, balance=0.5, eval_every=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("centre") / "run"
    execute(config, out)
    return out


def test_the_saved_model_predicts_from_images_what_training_evaluated(finished):
    """The control: without the centre the same weights predict otherwise."""
    model, test = load_run_model(finished), load("digits", split="test")
    accuracy = evaluate_dataset(model, test).scores["accuracy"]
    assert accuracy == read_json_lines(finished / "metrics.jsonl")[-1]["accuracy"]
    assert accuracy > 0.3  # the best constant has 0.103
    with torch.no_grad():
        model.module.centre.zero_()
    assert evaluate_dataset(model, test).scores["accuracy"] != accuracy


def test_the_model_has_the_centre_that_was_released(finished):
    stored = read_json(finished / "feature-centre.json")
    centre = shrunk(np.array(stored["mean"]), stored["noise"])
    np.testing.assert_allclose(load_run_model(finished).module.centre, centre, rtol=1e-6)
    assert stored["noise"] == 4.0 / 1438


def test_the_release_is_near_the_mean_and_charged_jointly(finished, config):
    mean = feature_sum(prepare(config)) / 1438
    stored = read_json(finished / "feature-centre.json")
    apart = np.linalg.norm(np.array(stored["mean"]) - mean) / np.sqrt(len(mean))
    assert 0.7 < apart / stored["noise"] < 1.3  # 72 draws
    first = read_json_lines(finished / "ledger.jsonl")[0]
    assert first["noise_multiplier"] == pytest.approx((4.0**-2 + 9.0**-2) ** -0.5)
    statement = read_json(finished / "privacy-statement.json")
    assert statement["epsilon"] <= 8
    assert statement["noise_multiplier_before"] == first["noise_multiplier"]
    assert "feature-centre.json" in statement["may_be_published"]
    assert passed(check_run(finished))


def test_a_run_resumes_with_its_centre(config, finished, tmp_path):
    before = (finished / "model.safetensors").read_bytes()
    execute(config, finished, resume=True)
    assert (finished / "model.safetensors").read_bytes() == before


def test_a_centre_that_is_gone_is_not_released_twice(config, tmp_path):
    unseeded = config.replace(seed=None)
    execute(unseeded, tmp_path / "run")
    (tmp_path / "run" / "feature-centre.json").unlink()
    says = r"between the two, or the file was lost.*start a new run.*epsilon [\d.]+, spent here"
    with pytest.raises(RunError, match=says):
        execute(unseeded, tmp_path / "run", resume=True)


def test_an_audit_notices_another_centre(finished, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    path = folder / "feature-centre.json"
    stored = json.loads(path.read_text())
    stored["mean"][0] += 0.5
    path.write_text(json.dumps(stored))
    wrong = {finding.check for finding in check_run(folder) if not finding.right}
    assert "the model's centre is the one that was released" in wrong


def test_recentred_rows_have_norm_one_whatever_the_centre():
    rows = torch.nn.functional.normalize(torch.randn(20, 7))
    moved = recentre_rows(rows, rows.mean(0))
    torch.testing.assert_close(moved.norm(dim=1), torch.ones(20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "mlp"}, "release_centre is for fixed features"),
        ({"method": "sgd", "epsilon": None}, "cannot be used|needs noise"),
    ],
)
def test_a_centre_without_features_or_noise_is_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config.replace(**changes)
