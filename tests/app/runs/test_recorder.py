import json
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
    for _ in range(2):  # a finished run that is resumed evaluates nothing anew
        execute(stored_config(out), out, resume=True)
        statement = json.loads((out / "privacy-statement.json").read_text())
        assert statement["evaluated_on"]["times"] == times
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 8
