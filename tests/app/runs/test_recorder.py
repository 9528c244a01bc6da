import json
import shutil
import sys
from types import ModuleType

import pytest

from dpbam.app.runs import ConfigError, RunConfig, execute, prepare, stored_config
from dpbam.privacy.noise import GaussianNoise


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
