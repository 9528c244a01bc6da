import json
import os
import signal

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dpbam.app.runs import (
    RunConfig,
    RunInterruptedError,
    execute,
    execution,
    load_run_model,
    prepare,
    stored_config,
)
from dpbam.app.runs.preparation import counted
from dpbam.data import load
from dpbam.training.evaluation import predict_logits
from dpbam.training.events import Reporter


class Heard(Reporter):
    def __init__(self):
        self.said = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *values: self.said.append((name, values))
        return super().__getattribute__(name)


def test_a_run_folder_holds_what_it_says(tiny, tmp_path):
    heard = Heard()
    result = execute(tiny, tmp_path / "run", reporter=heard)
    assert sorted(p.relative_to(result.out).as_posix() for p in result.out.rglob("*.*")) == [
        ".lock", "README.md",
        "checkpoints/" + _last(result.out, 2), "checkpoints/" + _last(result.out, 1),
        "config.toml", "ledger.jsonl", "metrics.jsonl", "model.json", "model.safetensors",
        "non-private/evaluations.jsonl", "non-private/run.json", "non-private/training.jsonl",
        "privacy-statement.html", "privacy-statement.json", "privacy-statement.md",
    ]  # fmt: skip
    assert RunConfig.from_file(result.out / "config.toml") == tiny.replace(unit="record")
    names = [name for name, _ in heard.said]
    assert names[:2] == ["on_message", "on_start"]  # the first: what is for evaluation
    assert names[-1] == "on_end"
    assert names.count("on_step") == result.steps == result.charged == 8
    assert names.count("on_evaluation") == len(result.evaluations) == 8


def _last(out, place):
    return sorted(p.name for p in (out / "checkpoints").iterdir())[-place]


def test_the_model_that_is_handed_out_is_the_one_that_was_evaluated(tiny, tmp_path):
    for name, average in (("plain", {}), ("ema", {"ema": 0.5}), ("swa", {"swa": 0.5})):
        result = execute(tiny.replace(**average), tmp_path / name)
        loaded = load_run_model(result.out)
        logits, labels = predict_logits(loaded.module, load("digits", split="test"))
        assert float((logits.argmax(1) == labels).double().mean()) == result.score
        assert loaded.class_names == tuple("0123456789")
        assert loaded.image_shape == (1, 8, 8)


def test_swa_hands_out_the_mean_of_the_weights_of_its_steps(tiny, tmp_path, monkeypatch):
    seen = []
    real = torch.optim.NAdam.step

    def step(self, *args):
        real(self, *args)
        seen.append([p.detach().clone() for p in self.param_groups[0]["params"]])

    monkeypatch.setattr(torch.optim.NAdam, "step", step)
    result = execute(tiny.replace(swa=0.5), tmp_path / "run")
    mean = [torch.stack(leaf).mean(0) for leaf in zip(*seen[4:], strict=True)]
    for got, expected in zip(load_run_model(result.out).module.parameters(), mean, strict=True):
        assert torch.allclose(got, expected, atol=1e-6)


def test_nothing_non_private_is_handed_out(tiny, tmp_path):
    out = execute(tiny, tmp_path / "run").out
    fingerprint = json.loads((out / "non-private" / "run.json").read_text())
    secret = fingerprint["non_private_fingerprint"].encode()
    for name in ("model.safetensors", "model.json", "privacy-statement.md",
                 "privacy-statement.json", "metrics.jsonl", "config.toml"):  # fmt: skip
        content = (out / name).read_bytes()
        assert b"non_private" not in content, name
        assert secret not in content, name
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() is None
        assert set(file.keys()) == set(prepare(tiny).model.state_dict())
    assert secret in (out / "non-private" / "run.json").read_bytes()  # the search can find


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tiny, tmp_path, number):
    class Impatient(Reporter):
        def on_step(self, report):
            if report.step == 3:
                os.kill(os.getpid(), number)

    tiny = tiny.replace(checkpoint_every=1000)
    out = tmp_path / "run"
    with pytest.raises(RunInterruptedError, match=f"step 3 of 8.*--resume --out {out}"):
        execute(tiny, out, reporter=Impatient())
    assert not (out / "model.safetensors").exists()
    execute(stored_config(out), out, resume=True)
    execute(tiny, tmp_path / "undisturbed")
    for name in ("model.safetensors", "metrics.jsonl", "ledger.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_resuming_a_finished_run_costs_nothing_and_changes_nothing(tiny, tmp_path):
    out = tmp_path / "run"
    first = execute(tiny.replace(seed=None), out)
    (out / "privacy-statement.sig").write_text("signed")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    again = execute(stored_config(out), out, resume=True)
    assert (again.charged, again.epsilon, again.score) == (8, first.epsilon, first.score)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_crash_never_leaves_new_weights_next_to_an_old_statement(tiny, tmp_path, monkeypatch):
    out, names = tmp_path / "run", ("privacy-statement.*", "README.md")
    execute(tiny.replace(epochs=0.25), out)
    (out / "privacy-statement.sig").write_text("signed")
    old = (out / "model.safetensors").read_bytes()
    longer = stored_config(out).replace(epochs=0.5)
    with monkeypatch.context() as broken:
        broken.setattr(execution, "statement", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            execute(longer, out, resume=True)
    assert (out / "model.safetensors").read_bytes() != old
    assert not [path for name in names for path in out.glob(name)]
    execute(stored_config(out), out, resume=True)
    assert (out / "privacy-statement.json").exists()
    assert not (out / "privacy-statement.sig").exists()


@pytest.mark.parametrize("method", ["dp-sgd", "dp-sat", "bam", "sgd", "sam"])
def test_every_method_trains(tiny, tmp_path, method):
    private = method not in ("sgd", "sam")
    result = execute(
        tiny.replace(method=method, noise_multiplier=4.0 if private else None), tmp_path / "run"
    )
    assert (result.epsilon < 1) if private else (result.epsilon == float("inf"))
    assert ("gives no privacy" in (result.out / "privacy-statement.md").read_text()) != private
    assert result.score > 0


def test_a_unit_of_privacy_with_several_records(tiny, tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "patients.npz"
    np.savez(
        path, images=rng.integers(0, 256, (600, 8, 8), np.uint8), labels=np.arange(600) % 2,
        patient=np.repeat(np.arange(100), 6),
    )  # fmt: skip
    config = tiny.replace(data=str(path), unit="patient", batch_size=10, max_records=3)
    result = execute(config, tmp_path / "run")
    assert result.plan.n == 80  # a fifth of the patients is held out
    assert (
        "patient (all records with the same patient, at most 3 of them per step)"
        in (result.out / "privacy-statement.md").read_text()
    )


def test_a_dry_run_writes_nothing_and_shows_the_plan(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    phases = []
    summary = prepare(tiny, on_phase=phases.append).summary(phases.append)
    assert phases == [
        "reading the data", "calibrating the noise", "measuring the memory of a step",
        "measuring the time of a step",
    ]  # fmt: skip
    assert summary.steps == 8
    assert summary.n == 1438
    assert summary.trained_parameters == 64 * 8 + 8 + 8 * 10 + 10
    assert summary.estimated_memory_bytes > 4 * summary.parameters
    assert summary.estimated_seconds > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["dp-sgd", "bam"])
def test_the_dry_runs_memory_is_that_of_a_step(tiny, method):
    config = tiny.replace(
        method=method, model="small-cnn", model_options={}, physical_batch_size=128
    )
    prepared = prepare(config)
    step = counted(prepared.oracle(), prepared.train, prepared.task, 128).peak
    fit = prepared.estimated_fit()
    assert fit.rows == 128
    assert fit.bytes == pytest.approx(step, rel=0.3)


def test_a_given_physical_batch_size_is_the_dry_runs(tiny):
    fit = prepare(tiny.replace(physical_batch_size=24)).estimated_fit()
    assert fit.rows == 24
    assert fit.bytes < prepare(tiny).estimated_fit().bytes
