"""What is released with noise besides the model: counts, the centre, statistics of the norms."""

from __future__ import annotations

import errno
import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dpbam.app.audit.check import check_run, passed
from dpbam.app.runs import ConfigError, RunConfig, RunError, execute, load_run_model
from dpbam.app.runs.bias import measure
from dpbam.app.runs.budget import Budget
from dpbam.app.runs.documents import FeatureCentre
from dpbam.app.runs.files import disk_error, read_json, read_json_lines
from dpbam.app.runs.first_release import (
    _release,
    balanced,
    contributions,
    feature_sum,
    offsets,
    sensitivity,
    shrunk,
)
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.predict import evaluate_dataset
from dpbam.app.runs.preparation import prepare
from dpbam.data import from_arrays, load
from dpbam.features import recentre_rows
from dpbam.privacy.accounting import Charge
from dpbam.privacy.ledger import Ledger
from dpbam.privacy.noise import GaussianNoise
from dpbam.privacy.randomness import Randomness


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


@pytest.mark.parametrize(("seed", "way_out"), [(5, "then resume"), (None, "start a new run with")])
def test_a_release_that_cannot_be_written_is_only_resumed_if_it_is_the_same(
    seed, way_out, config, tmp_path, monkeypatch
):
    full = disk_error(tmp_path / "centre", OSError(errno.ENOSPC, "No space left on device"))
    out, seeded = tmp_path / "run", seed is not None
    with monkeypatch.context() as patch:
        patch.setattr(FeatureCentre, "write", Mock(side_effect=full))
        with pytest.raises(RunError, match=way_out) as caught:
            execute(config.replace(seed=seed), out)
    assert "No space left on device" in str(caught.value)
    assert ("resume" in str(caught.value)) == seeded
    (charged,) = read_json_lines(out / "ledger.jsonl")
    if seeded:
        assert execute(config, out, resume=True).status == "complete"
        assert read_json_lines(out / "ledger.jsonl")[0] == charged


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


SETTINGS = {
    "data": "digits", "model": "mlp", "model_options": {"hidden": [8]}, "epsilon": 3.0, "epochs": 1,
    "batch_size": 300, "release_counts": 10.0, "accountant": "rdp", "num_workers": 0,
}  # fmt: skip


def counted(task: str):
    """Records of 5 patients with 1 to 5 records each."""
    rng, n = np.random.default_rng(0), 15
    images = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
    labels = {
        "single-label": np.arange(n) % 3,
        "multi-label": rng.integers(0, 2, (n, 3)) | (np.arange(n) == 0)[:, None],
        "segmentation": rng.integers(0, 3, (n, 8, 8), dtype=np.uint8),
    }[task]
    return from_arrays(images, labels), np.repeat(np.arange(5), [1, 2, 3, 4, 5])


@pytest.mark.parametrize("task", ["single-label", "multi-label", "segmentation"])
@pytest.mark.parametrize("grouped", [False, True])
def test_one_unit_changes_the_counts_by_at_most_the_sensitivity(task, grouped):
    data, units = counted(task)
    added = contributions(data, units if grouped else None)
    assert len(added) == (5 if grouped else 15)
    lengths = np.linalg.norm(added, axis=1)
    assert lengths.max() <= sensitivity(data) * (1 + 1e-12)
    if grouped:  # the negative control: records that are added up, not averaged
        shares = data.class_shares()
        planted = [np.linalg.norm(shares[units == u].sum(0)) for u in range(5)]
        assert max(planted) > sensitivity(data)


def test_the_noise_has_the_stated_deviation(tmp_path):
    prepared = prepare(RunConfig(**SETTINGS))
    true = prepared.train.class_shares().sum(0)
    oracle, errors = prepared.oracle(), []
    for k in range(150):
        oracle.ledger = prepared.plan.ledger()
        oracle.noise = GaussianNoise(Randomness(k))
        folder = RunFolder(tmp_path / str(k))
        folder.path.mkdir()
        _release(folder, prepared, oracle)
        found = read_json(folder.class_counts)
        errors += [found["counts"][n] - c for n, c in zip(map(str, range(10)), true, strict=True)]
        assert found["noise"] == 10.0
    # seeded; 1500 draws: the sample deviation of 10 has a standard error of 0.18
    assert 9.3 < np.std(errors) < 10.7
    assert abs(np.mean(errors)) < 1.3


def test_counts_are_charged_before_the_first_step_and_within_epsilon(tmp_path):
    budget = Budget.create(tmp_path / "budget.json", epsilon=3.0, delta=1e-4, accountant="rdp")
    config = RunConfig(**SETTINGS, delta=1e-4, budget=budget.path)
    result = execute(config, tmp_path / "run")
    ledger = Ledger(1e-4, "rdp", tmp_path / "run" / "ledger.jsonl")
    assert Charge(10.0, 1.0, 1) in ledger.charges()
    assert ledger.entries()[0]["sampling_rate"] == 1.0
    assert len(ledger) == result.steps == result.charged
    assert result.epsilon == ledger.epsilon() == budget.epsilon() <= 3.0
    plain = config.replace(release_counts=None).plan(result.plan.n)
    assert result.plan.noise_multiplier > plain.noise_multiplier  # counts take their share
    stated = read_json(tmp_path / "run" / "privacy-statement.json")
    assert "class-counts.json" in stated["may_be_published"]
    assert "class-counts.json" in stated["identity"]["files"]
    assert "sigma 10" in (tmp_path / "run" / "privacy-statement.md").read_text()
    assert passed(check_run(tmp_path / "run"))


@pytest.mark.slow
def test_lost_counts_are_repeated_if_seeded_and_refused_if_not(tmp_path):
    for seed, out in ((7, tmp_path / "seeded"), (None, tmp_path / "unseeded")):
        config = RunConfig(**SETTINGS, seed=seed)
        before = execute(config, out)
        counts = out / "class-counts.json"
        text = counts.read_text()
        counts.unlink()
        if seed is None:
            with pytest.raises(RunError, match="restore the file, or start a new run"):
                execute(config, out, resume=True)
        else:
            assert execute(config, out, resume=True).epsilon == before.epsilon
            assert counts.read_text() == text


@pytest.mark.slow
def test_an_audit_notices_counts_that_were_not_charged(tmp_path):
    execute(RunConfig(**SETTINGS, seed=3), tmp_path / "run")
    path = tmp_path / "run" / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    wrong = {finding.check for finding in check_run(tmp_path / "run") if not finding.right}
    assert "what is released before the first step is charged once, at q = 1" in wrong


def test_weights_balance_and_noise_alone_makes_none_large():
    weights = balanced(np.array([900.0, 100.0]), 1.0, 1000, findings=False)
    assert np.allclose(weights * [900, 100], 500)
    assert balanced(np.array([10.0, 990.0]), 1.0, 1000, findings=True).tolist() == [99.0, 1.0]
    assert balanced(np.array([-50.0, 0.0]), 25.0, 1000, findings=False).max() == 20.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"class_weights": {"1": 2.0}}, "would pay for nothing: leave one out"),
        ({"method": "sgd", "epsilon": None}, "method without privacy"),
        ({"task": "regression"}, "a regression has no classes"),
    ],
)
def test_counts_without_a_use_are_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RunConfig(**{**SETTINGS, **changes})


@pytest.mark.parametrize("setting", [{"focal": 2.0}, {"class_weights": {"1": 5.0}}])
def test_weights_that_clipping_would_undo_are_refused(setting):
    plain = {k: v for k, v in SETTINGS.items() if k != "release_counts"}
    with pytest.raises(ConfigError, match="have no effect: choose flat clipping"):
        prepare(RunConfig(**plain, **setting, clipping="automatic"))


def test_the_bias_is_measured_without_releasing_counts():
    assert len(measure(RunConfig(**SETTINGS), batches=1).records) == 1


def test_offsets_are_the_share_of_the_log_frequencies():
    counts = np.array([600.0, 300.0, 100.0])
    whole, half = (offsets(counts, 1e-9, 1000, share) for share in (1.0, 0.5))
    assert np.allclose(np.exp(whole), [0.6, 0.3, 0.1])
    assert np.allclose(half, whole / 2)


def test_noise_alone_makes_no_class_frequent():
    rng = np.random.default_rng(0)
    noised = 50 + 40 * rng.standard_normal((200, 10))  # uniform counts of 500 units
    spread = np.ptp([offsets(counts, 40.0, 500, 1.0) for counts in noised], axis=1)
    assert np.median(spread) < 0.1
    unshrunk = np.log(np.maximum(noised / 500, 0.02)).std(axis=1)  # the control
    assert np.median(unshrunk) > 0.3


def test_a_balanced_run_adjusts_the_loss_by_its_released_counts(tmp_path):
    execute(RunConfig(**SETTINGS, balance=0.5, seed=1), tmp_path / "run")
    assert passed(check_run(tmp_path / "run"))
    text = (tmp_path / "run" / "privacy-statement.md").read_text()
    assert "0.5 of the log frequencies" in text.replace("\\", "")
    with pytest.raises(ConfigError, match="balance needs the frequencies"):
        RunConfig(**{**SETTINGS, "release_counts": None}, balance=0.5)


@pytest.fixture
def releasing(tiny: RunConfig) -> RunConfig:
    return tiny.replace(release_norms=20.0)


def released(folder):
    return [json.loads(line) for line in (folder / "statistics.jsonl").read_text().splitlines()]


def test_every_step_releases_and_the_ledger_is_charged_for_both(releasing, tmp_path):
    result = execute(releasing, tmp_path / "run")
    rows = released(result.out)
    assert [row["step"] for row in rows] == list(range(8))
    assert rows[0]["count_std"] == 20.0
    joint = (4.0**-2 + 20.0**-2) ** -0.5
    ledger = Ledger(1e-4, "rdp", result.out / "ledger.jsonl")
    assert [c.noise_multiplier for c in ledger.charges()] == [pytest.approx(joint)]
    assert result.epsilon > execute(releasing.replace(release_norms=None),
                                    tmp_path / "other").epsilon  # fmt: skip


def test_a_budget_is_kept_with_the_statistics_in_it(releasing):
    config = releasing.replace(noise_multiplier=None, epsilon=1.0)
    plan = prepare(config).plan
    alone = prepare(config.replace(release_norms=None)).plan
    assert plan.epsilon() <= 1.0
    assert plan.noise_multiplier > alone.noise_multiplier


def test_the_audit_and_the_statement_know_of_them(releasing, tmp_path):
    out = execute(releasing, tmp_path / "run").out
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert "statistics.jsonl" in statement["may_be_published"]
    assert "with noise of sigma 20" in statement["released_beside_the_gradients"]
    assert [f.check for f in check_run(out) if not f.right] == []


def test_the_audit_finds_statistics_that_were_not_paid_for(releasing, tmp_path):
    out = execute(releasing, tmp_path / "run").out
    ledger = out / "ledger.jsonl"
    lines = [
        json.loads(line) | {"noise_multiplier": 4.0} for line in ledger.read_text().splitlines()
    ]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [f.check for f in check_run(out) if not f.right]


def test_a_resumed_run_releases_each_step_once(releasing, tmp_path):
    whole = execute(releasing, tmp_path / "whole").out
    half = execute(releasing.replace(epochs=0.5), tmp_path / "half").out
    execute(releasing, half, resume=True)
    assert released(half) == released(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"release_norms": 0.0}, "release_norms"),
     ({"method": "sgd", "noise_multiplier": None}, "release_norms needs noise")],
)  # fmt: skip
def test_what_cannot_be_released_is_refused(releasing, changes, words):
    with pytest.raises(ConfigError, match=words):
        releasing.replace(**changes)
