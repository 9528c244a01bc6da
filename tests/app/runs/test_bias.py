"""Measuring along the way, and measuring a run's model afterwards."""

from __future__ import annotations

import json
import os
import signal

import pytest

from dpbam.app.cli import main
from dpbam.app.runs import ConfigError, RunConfig, RunInterruptedError, execute, stored_config
from dpbam.app.runs.bias import measure
from dpbam.training.events import Reporter


def steps(out) -> list[int]:
    lines = (out / "non-private" / "bias.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_every_nth_step_is_recorded_and_the_run_is_the_same(tiny, tmp_path):
    plain = execute(tiny, tmp_path / "plain").out
    out = execute(tiny.replace(measure_bias=3), tmp_path / "run").out
    assert steps(out) == [0, 3, 6]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (plain, out)]
    assert weights[0] == weights[1]
    assert "non_private_against_plain" not in (out / "metrics.jsonl").read_text()
    assert not (plain / "non-private" / "bias.jsonl").exists()


def test_a_resumed_run_measures_each_step_once(tiny, tmp_path):
    class StopAt(Reporter):
        def on_step(self, report) -> None:
            if report.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    out, config = tmp_path / "run", tiny.replace(measure_bias=2)
    with pytest.raises(RunInterruptedError):
        execute(config, out, reporter=StopAt())
    assert steps(out) == [0, 2, 4]
    path = out / "non-private" / "bias.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:  # as if a crash had come after measuring, before saving
        file.write(json.dumps({**last, "step": 6}) + "\n")
    execute(stored_config(out), out, resume=True)
    assert steps(out) == [0, 2, 4, 6]


def test_a_run_and_its_checkpoint_can_be_measured(tiny, tmp_path):
    out = execute(tiny, tmp_path / "run").out
    found = measure(stored_config(out), run=out, batches=2)
    assert len(found.records) == 2
    assert found.records[0].non_private_against_plain.a_from_eta
    assert found.records[0].noise_multiplier == 4.0
    (out / "model.json").unlink()  # as if the run had not ended: its checkpoint is there
    again = measure(stored_config(out), run=out, batches=2)
    assert again.means("plain") == pytest.approx(found.means("plain"))


def test_what_is_measured_is_the_trained_model(tiny, tmp_path):
    """The negative control: a fresh model has another gradient."""
    out = execute(tiny, tmp_path / "run").out
    trained, fresh = measure(stored_config(out), run=out), measure(tiny)
    lengths = [found.records[0].non_private_against_plain.reference_norm
               for found in (trained, fresh)]  # fmt: skip
    assert abs(lengths[0] - lengths[1]) > 0.01


def test_measuring_leaves_the_run_alone(tiny, tmp_path):
    out = execute(tiny, tmp_path / "run").out
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    measure(stored_config(out), run=out, batches=1, flatness=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_the_command_shows_and_warns(tiny, tmp_path, capsys):
    out = execute(tiny, tmp_path / "run").out
    assert main(["bias", str(out), "--batches", "1"]) == 0
    assert "on digits, one batch" in capsys.readouterr().out
    assert main(["bias", str(out), "--batches", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "do not share" in shown
    assert "against the plain gradient" in shown
    assert main(["bias", str(out), "--batches", "1", "--clip-norm", "2.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["non_private_records"][0]["clip_norm"] == 2.5


def test_the_command_says_what_is_missing(capsys, tmp_path):
    assert main(["bias"]) == 2
    assert "give a run folder, or --data" in capsys.readouterr().err
    assert main(["bias", str(tmp_path / "none")]) == 2
    assert "there is no run in" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["often", "every=0", "every=-3", "every="])
def test_a_wrong_interval_is_named(text, capsys):
    code = main(["train", "--data", "digits", "--epsilon", "3", "--measure-bias", text])
    assert code == 2
    assert "--measure-bias must be every=N" in capsys.readouterr().err


def test_the_configuration_refuses_it_too():
    with pytest.raises(ConfigError, match="measure_bias"):
        RunConfig(epsilon=3, measure_bias=0)
