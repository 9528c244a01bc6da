"""Heads on fixed features as runs, and ``--model auto``: settings from public facts alone."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from dpbam.app.audit.check import check_run, passed
from dpbam.app.cli.flags import run_config, with_flags
from dpbam.app.runs import (
    ConfigError,
    RunConfig,
    RunError,
    execute,
    execution,
    load_run_model,
    prepare,
    stored_config,
)
from dpbam.app.runs.automatic import command, not_by_rule, resolve, with_default_model
from dpbam.app.runs.export import export
from dpbam.app.runs.feature_model import build_feature_model
from dpbam.app.runs.files import read_json, read_json_lines
from dpbam.app.runs.predict import evaluate_dataset, predict_files
from dpbam.app.runs.scattering_onnx import RealScattering
from dpbam.auto import Facts, choose
from dpbam.data import load
from dpbam.privacy.plan import epoch_steps
from dpbam.training.events import Reporter
from tests.features.test_features import onnx_file
from tests.tiny_encoders import save_encoder


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig(
        model="scattering", noise_multiplier=1.0, accountant="rdp", batch_size=1438, epochs=3,
        optimizer="sgd", lr=0.3, clip_norm=3.0, swa=0.4, num_workers=0, checkpoint_every=0, seed=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """The folder of a finished run of a head on scattering features."""
    out = tmp_path_factory.mktemp("features") / "run"
    execute(config, out)
    return out


def last_metrics(out):
    return read_json_lines(out / "metrics.jsonl")[-1]


def accuracy(out):
    """The accuracy of the saved model, from images."""
    return evaluate_dataset(load_run_model(out), load("digits", split="test")).scores["accuracy"]


def test_features_are_kept_with_what_is_not_private_for_the_owner_alone(finished):
    files = sorted(finished.rglob("features-*.npy"))
    assert [path.parent for path in files] == [finished / "non-private"] * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_the_saved_model_predicts_from_images_what_training_evaluated(finished):
    assert accuracy(finished) == last_metrics(finished)["accuracy"]
    assert accuracy(finished) > 0.3  # the best constant has 0.103


def test_the_saved_model_holds_the_constants_of_its_features(finished, monkeypatch):
    """The control: constants of this machine, if the model took them, would not predict."""
    from dpbam.app.runs import feature_model

    features = feature_model._scattering((1, 8, 8))
    other = type(features)((1, 8, 8), channels=features.channels)
    other.axes = type(features.axes)(features.axes.mean, features.axes.project.flip(0) * 3,
                                     features.axes.sign)  # fmt: skip
    monkeypatch.setattr(feature_model, "_scattering", lambda shape: other)
    images = torch.rand(3, 1, 8, 8) * 2 - 1
    stored = load_run_model(finished).module
    assert torch.equal(stored.mean, load_file(finished / "model.safetensors")["mean"])
    assert not torch.equal(stored.extractor.extract(images), other.extract(images))


def test_a_head_on_features_predicts_arrays(finished, tmp_path):
    images = load("digits", split="test").images.read(np.arange(5))
    np.savez(tmp_path / "few.npz", images=images)
    predicted = predict_files(load_run_model(finished), [tmp_path / "few.npz"])
    labels = [one.row.label for one in predicted]
    assert len(labels) == 5
    assert set(labels) <= set(map(str, range(10)))


def test_a_run_on_features_passes_the_audit(finished):
    assert passed(check_run(finished))
    statement = read_json(finished / "privacy-statement.json")
    assert statement["initial_weights"].startswith("zero")


def test_an_interrupted_run_on_features_resumes_to_the_same_model(config, finished, tmp_path):
    class StopError(Exception):
        pass

    class Interrupting(Reporter):
        def on_checkpoint(self, path, step):
            if step == 1:
                raise StopError

    with pytest.raises(StopError):
        execute(config, tmp_path / "run", reporter=Interrupting())
    execute(stored_config(tmp_path / "run"), tmp_path / "run", resume=True)
    for name, values in load_file(finished / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "run" / "model.safetensors")[name], values), name


def test_a_head_on_scattering_is_exported_as_safetensors(finished, tmp_path):
    folder, difference = export(finished, "safetensors", tmp_path / "out")
    assert difference == 0
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_a_head_on_scattering_is_exported_to_onnx(finished, tmp_path):
    folder, difference = export(finished, "onnx", tmp_path / "out")
    assert difference < 1e-5
    assert (folder / "model.onnx").exists()


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), *(pytest.param(s, marks=pytest.mark.slow)
                           for s in ((3, 28, 28), (2, 50, 60)))]
)  # fmt: skip
def test_scattering_in_real_arithmetic_is_scattering(shape):
    """The control: without the reflected borders it is another transform."""
    model = build_feature_model("scattering", image_shape=shape, num_outputs=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator))
        images = torch.rand(5, *shape, generator=generator) * 2 - 1
        real = RealScattering(model.extractor, model.linear_head(), None)
        # logits of up to 10, sums of some thousand float32 products: a few units of the last place
        torch.testing.assert_close(real(images), model(images), atol=1e-5, rtol=1e-5)
        real.rows = real.rows.roll(1, 0)
        assert (real(images) - model(images)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "hf"])
def test_a_head_on_an_encoder_needs_no_other_file_than_the_model(config, kind, tmp_path):
    place = tmp_path / "encoder"
    path = onnx_file(place) if kind == "onnx" else save_encoder(place, "resnet")
    name = f"onnx:{path}" if kind == "onnx" else f"features:hf:{path}"
    out = tmp_path / "run"
    execute(config.replace(model=name), out)
    assert passed(check_run(out))
    shutil.rmtree(place)
    assert accuracy(out) == last_metrics(out)["accuracy"]
    facts = read_json(out / "model.json")
    assert str(tmp_path) not in json.dumps(facts)
    assert facts["public_weights"]["files"]
    folder, difference = export(out, "safetensors", tmp_path / "exported")
    assert difference == 0
    assert folder.is_dir()
    with pytest.raises(RunError, match=r"cannot be exported to ONNX.*--to safetensors"):
        export(out, "onnx", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "all"}, "only the head is trained"),
        ({"augment_multiplicity": 2}, "no random views"),
    ],
)
def test_what_a_head_on_features_cannot_do_is_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        config.replace(**changes)


def test_options_of_fixed_features_are_refused(config):
    with pytest.raises(ConfigError, match="has no options"):
        prepare(config.replace(model_options={"width": 2}))


@pytest.fixture(scope="module")
def asked() -> RunConfig:
    """What a user of auto gives; fewer evaluations than by default."""
    return RunConfig(
        model="auto", data="digits", epsilon=3.0, accountant="rdp", seed=7, num_workers=0,
        eval_every=50,
    )  # fmt: skip


@pytest.fixture(scope="module")
def automatic(asked, tmp_path_factory):
    out = tmp_path_factory.mktemp("auto") / "run"
    heard = Listening()
    execute(asked, out, reporter=heard)
    return out, heard.messages


class Listening(Reporter):
    def __init__(self):
        self.messages = []

    def on_message(self, message):
        self.messages.append(message)


def test_auto_ends_above_the_constant_and_within_the_budget(automatic):
    out, _ = automatic
    assert accuracy(out) == last_metrics(out)["accuracy"]
    assert accuracy(out) > 0.6  # the best constant has 0.103
    assert read_json(out / "privacy-statement.json")["epsilon"] <= 3
    assert passed(check_run(out))


def test_the_statement_lists_the_facts_that_auto_used(automatic):
    out, _ = automatic
    by_rule = read_json(out / "privacy-statement.json")["chosen_by_rule"]
    assert by_rule["facts"] == {
        "n": 1438, "epsilon": 3.0, "delta": 1e-6, "image_shape": [1, 8, 8], "classes": 10,
        "task": "single-label", "encoder": "none named", "gradients": False,
        "head": "none named",
    }  # fmt: skip
    assert set(by_rule["settings"]) == {
        "model", "head", "batch_size", "epochs", "clip_norm", "optimizer", "lr", "momentum", "swa",
        "release_counts", "release_centre", "balance",
    }  # fmt: skip
    text = (out / "privacy-statement.md").read_text()
    assert "from public facts alone: n 1438" in text.replace("\\", "")


def test_the_command_that_auto_prints_gives_the_same_model_to_the_bit(automatic, tmp_path):
    out, messages = automatic
    # not always the last one: on a busy machine others follow
    (line,) = [m.partition("the same as ")[2] for m in messages if "the same as " in m]
    config = config_of(line)
    assert config.model == "scattering"
    execute(config, tmp_path / "run")
    expected = load_file(out / "model.safetensors")
    again = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(again[name], values) for name, values in expected.items())
    assert read_json(tmp_path / "run" / "privacy-statement.json")["chosen_by_rule"] is None


def config_of(line):
    """The configuration that a command line asks for."""
    seen = {}

    def remember(flags):
        seen.update(flags)

    app = typer.Typer()
    app.command()(with_flags(remember))
    words = shlex.split(line)
    assert words[:2] == ["dpbam", "train"]
    outcome = CliRunner().invoke(app, words[2:], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return RunConfig(**seen)


def test_every_setting_is_written_as_flags_that_read_the_same():
    config = RunConfig(
        epsilon=2.5, model="mlp", model_options={"hidden": [8, 4], "act": "x y"},
        freeze=("a*", "b"), image_size=(64, 48), dicom_window=(40, 400), target_range=(0, 100.5),
        measure_bias=3,
        class_weights={"ill=1": 4},
        tensorboard=True, correct_noise=False,
    )  # fmt: skip
    assert config_of(command(config)) == config


@pytest.mark.parametrize(
    ("flags", "factors"),
    [
        ({"epochs": 0.5}, {"lr": 2}),
        ({"batch_size": 0.5}, {"epochs": 0.5, "lr": 1}),
        ({"clip_norm": 2}, {"lr": 0.5}),
        ({"lr": 3}, {"epochs": 1, "clip_norm": 1}),
    ],
)
def test_a_flag_overrides_its_part_of_auto_and_the_path_keeps_its_length(asked, flags, factors):
    """Flags and expected values are multiples of what auto chooses without flags."""
    usual = resolve(asked, load("digits"), 1438).config
    given = {name: type(getattr(usual, name))(factor * getattr(usual, name))
             for name, factor in flags.items()}  # fmt: skip
    resolved = resolve(asked.replace(**given), load("digits"), 1438).config
    for name, factor in factors.items():
        assert getattr(resolved, name) == pytest.approx(factor * getattr(usual, name), rel=0.01)
    for name, value in given.items():
        assert getattr(resolved, name) == value
        assert name not in resolved.auto_settings


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "100 full-batch steps, as far as the rule goes"),
        ({"epochs": 30}, "30 full-batch steps, as far as the rule goes"),
        ({"epochs": 30, "lr": 0.01}, "30 full-batch steps"),
        ({"batch_size": 719}, "100 steps of 719 units, as far as the rule goes"),
    ],
)
def test_the_line_about_the_head_has_the_steps_that_are_taken(asked, flags, says):
    line = resolve(asked.replace(**flags), load("digits"), 1438).lines[1]
    assert line.startswith(f"a linear head by {says}")
    assert ("the rule" in line) == ("lr" not in flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"optimizer": "adam"}, {"optimizer": "adam", "lr": 0.005}),
        ({"ema": 0.9}, {"ema": 0.9, "swa": None}),
        ({"method": "bam"}, {"method": "bam", "model": "scattering", "optimizer": "sgd"}),
        ({"measure_bias": 5}, {"model": "scattering", "optimizer": "sgd"}),
    ],
)
def test_auto_goes_with_other_methods_optimisers_and_averages(asked, flags, expected):
    resolved = resolve(asked.replace(**flags), load("digits"), 1438).config
    assert {name: getattr(resolved, name) for name in expected} == expected


def test_auto_reads_neither_images_nor_labels(asked):
    """What stands for the data has public facts and no records; the control: a record differs."""
    digits = load("digits")
    public = SimpleNamespace(task=digits.task, shape=digits.shape, num_classes=digits.num_classes)
    expected = resolve(asked, digits, 1438)
    assert resolve(asked, public, 1438) == expected
    assert resolve(asked, public, 1437) != expected


def test_a_run_of_auto_resumes_from_what_was_asked_and_from_what_was_chosen(
    asked, automatic, tmp_path
):
    out, _ = automatic
    for config in (asked, stored_config(out)):
        copied = shutil.copytree(out, tmp_path / f"{config.model}")
        execute(config, copied, resume=True)
        again = (copied / "model.safetensors").read_bytes()
        assert again == (out / "model.safetensors").read_bytes()
    with pytest.raises(RunError, match=r"lr was .* cannot become 1"):
        execute(asked.replace(lr=1.0), out, resume=True)


def test_facts_of_other_data_are_refused(automatic):
    stored = stored_config(automatic[0])
    prepare(stored)
    with pytest.raises(ConfigError, match=r"auto_facts has n 700, and here it is 1438"):
        prepare(stored.replace(auto_facts={**stored.auto_facts, "n": 700}))


@pytest.mark.parametrize(
    "changes",
    [{"lr": 0.123}, {"clip_norm": 0.5}, {"auto_settings": ("lr", "weight_decay")}],
    ids=["a tuned rate", "a tuned norm", "a setting that the rule does not know"],
)
def test_settings_that_the_rule_does_not_choose_cannot_be_stated_as_its_choice(
    automatic, tmp_path, changes
):
    """The attack: a file with facts of the rule, and settings tuned on the private records."""
    stored = stored_config(automatic[0])
    with pytest.raises(ConfigError, match="not what the rule chooses"):
        prepare(stored.replace(**changes))
    folder = shutil.copytree(automatic[0], tmp_path / "run")
    forged = stored.replace(**changes)
    (folder / "config.toml").write_text(forged.to_toml())
    check = "settings stated as chosen by a rule are the rule's"
    by_name = {finding.check: finding.right for finding in check_run(folder)}
    assert by_name[check] is False
    honest = {finding.check: finding.right for finding in check_run(automatic[0])}
    assert honest[check] is True


def test_auto_without_a_rule_keeps_the_default_model_and_says_so(asked):
    digits = load("digits")
    bam = asked.replace(method="bam")
    for task, settings, reason, model in (
        ("segmentation", asked, "for segmentation", "unet"),
        ("regression", bam, "for a regression with gradients", "small-cnn"),
    ):
        stub = SimpleNamespace(task=task, shape=digits.shape, num_classes=3)
        resolved = resolve(settings, stub, 1438)
        assert resolved.config.model == model
        assert not resolved.config.auto_facts
        assert f"auto has no rule {reason} yet" in resolved.lines[0]
    sigma = RunConfig(model="auto", noise_multiplier=1.0)
    assert resolve(sigma, digits, 1438).config.model == "small-cnn"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "head"}, "auto chooses the model"),
        ({"method": "sgd", "epsilon": None}, "auto chooses by epsilon"),
        ({"model_options": {"width": 1}}, "auto chooses the model"),
        ({"public_encoder": "resnet18"}, "public_encoder must be hf:"),
        ({"model": "mlp", "public_encoder": "hf:x"}, "is for model auto"),
    ],
)
def test_what_does_not_go_with_auto_is_refused(asked, changes, message):
    with pytest.raises(ConfigError, match=message):
        asked.replace(**changes)


def test_an_encoder_that_is_named_is_what_auto_takes(asked):
    digits = load("digits")
    for encoder, model in (("onnx:a/b.onnx", "onnx:a/b.onnx"), ("hf:a/b", "features:hf:a/b")):
        resolved = resolve(asked.replace(public_encoder=encoder), digits, 1438)
        assert resolved.config.model == model
        assert resolved.config.auto_facts["encoder"] == encoder.replace("a/b.", "b.")
        assert resolved.config.public_encoder is None


@pytest.mark.parametrize("part", ["lora", "norms"])
def test_a_part_of_an_encoder_is_trained_by_the_rule_for_it(part):
    asked = RunConfig(data="digits", epsilon=3.0, model="hf:a/b", train=part)
    resolved = resolve(asked, load("digits"), 1438)
    config = resolved.config
    expected = choose(
        Facts(
            n=1438, epsilon=3.0, image_shape=(1, 8, 8), classes=10, encoder="hf:a/b", trained=part
        )
    )
    steps = epoch_steps(1438, config.batch_size, config.epochs)
    assert (config.batch_size, steps) == (expected.batch_size, expected.steps)
    assert (config.lr, config.optimizer) == (expected.lr, "nadam")
    assert config.release_counts is config.release_centre is None
    assert config.auto_facts["trained"] == part
    assert not not_by_rule(config)
    assert "lr is 1.0, which is not what the rule chooses" in not_by_rule(config.replace(lr=1.0))
    other = config.replace(train="norms" if part == "lora" else "lora")
    assert "auto_facts cannot be read" in not_by_rule(other)
    assert "the same as dpbam train --data digits" in resolved.lines[-1]


def test_settings_of_lora_that_the_user_chose_stay():
    asked = RunConfig(data="digits", epsilon=3.0, model="hf:a/b", train="lora", lr=0.1, epochs=1)
    config = resolve(asked, load("digits"), 1438).config
    assert (config.lr, config.epochs) == (0.1, 1)
    assert not {"lr", "epochs"} & set(config.auto_settings)
    plain = RunConfig(data="digits", noise_multiplier=1.0, model="hf:a/b", train="lora")
    assert resolve(plain, load("digits"), 1438).config == plain  # the rule needs epsilon


def test_features_that_take_long_are_reported(config, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "_PATIENCE", 0.0)
    heard = Listening()
    execute(config.replace(epochs=1), tmp_path / "run", reporter=heard)
    assert "features of 1438 of 1438 records" in heard.messages


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        ({"epsilon": 3.0}, "auto"),
        ({"epsilon": 3.0, "lr": 0.1, "momentum": 0.5, "method": "bam"}, "auto"),
        ({"epsilon": 3.0, "model": "mlp"}, "mlp"),
        ({"noise_multiplier": 1.0}, "small-cnn"),
        ({"method": "sgd"}, "small-cnn"),
        ({"epsilon": 3.0, "augment_multiplicity": 2}, "small-cnn"),
        ({"epsilon": 3.0, "train": "head"}, "small-cnn"),
    ],
)
def test_the_command_takes_auto_unless_a_model_is_asked_for(flags, model):
    settings = {"data": "digits", **flags}
    assert run_config(None, settings, default=with_default_model).model == model


def test_a_file_that_names_a_model_keeps_it(tmp_path):
    (tmp_path / "run.toml").write_text('data = "digits"\nmodel = "mlp"')
    config = run_config(tmp_path / "run.toml", {"epsilon": 3.0}, default=with_default_model)
    assert config.model == "mlp"
