"""What is published besides trained parameters is, to the bit, what it was before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dpbam.app.audit import accountant, check_run
from dpbam.app.runs import RunConfig, RunError, execute, stored_config
from dpbam.oracle import PrivateGradientOracle
from dpbam.training import trainer

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, leak):
        super().__init__()
        self.frozen, self.head = nn.Linear(64, 8), nn.Linear(8, num_classes)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.leak = leak

    def forward(self, x):
        if self.leak and not self.training:  # a look at the training loss is such a pass
            self.seen.copy_(x.mean())
        return self.head(self.frozen(x.flatten(1)).relu())

def net(num_classes, leak=False):
    return Net(num_classes, leak)
"""
FINDING = "what is published besides trained parameters is as before training"


@pytest.fixture
def config(tiny: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of eight steps of a model with a buffer and a frozen layer."""
    (tmp_path / "nets_with_state.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(accountant, "_POINTS", 2**15)
    return tiny.replace(model="nets_with_state:net", model_options={}, seed=None, ema=0.9)


def fixed_finding(out: Path) -> tuple[bool, str]:
    (found,) = [f for f in check_run(out) if f.check == FINDING]
    return found.right, found.seen


def plant(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """A step that writes what it saw of the batch where it is not trained."""
    real = PrivateGradientOracle.backward

    def backward(self, images, labels, units=None):
        if self.step == at:
            self.model.state_dict()[name].add_(images.double().mean())
        return real(self, images, labels, units)

    monkeypatch.setattr(PrivateGradientOracle, "backward", backward)


def test_an_honest_run_is_published_and_passes_the_audit(config: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    execute(config, out)
    assert fixed_finding(out) == (True, "3 tensors, bit-identical")
    recorded = json.loads((out / "non-private" / "run.json").read_text())["initial_tensors"]
    assert set(recorded["fixed"]) == {"frozen.weight", "frozen.bias", "seen"}
    assert set(recorded["trained"]) == {"head.weight", "head.bias"}
    execute(stored_config(out), out, resume=True)
    assert fixed_finding(out)[0]


def test_what_a_pass_in_eval_mode_keeps_is_not_published(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes with the copy that the pass ran on; written into the model itself, it is refused."""
    leaking, out = config.replace(model_options={"leak": True}), tmp_path / "run"
    execute(leaking, tmp_path / "copied")
    assert fixed_finding(tmp_path / "copied") == (True, "3 tensors, bit-identical")
    monkeypatch.setattr(trainer, "spare", lambda model: model)
    with pytest.raises((RunError, ValueError), match="seen"):
        execute(leaking, out)
    assert not (out / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["seen", "frozen.weight", "frozen.bias"])
@pytest.mark.parametrize(("at", "checkpoint_every"), [(0, 0.0), (7, 1e9)])
def test_what_reaches_a_fixed_tensor_is_neither_saved_nor_published(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int,
    checkpoint_every: float,
) -> None:  # fmt: skip
    out = tmp_path / "run"
    plant(monkeypatch, name, at)
    with pytest.raises(RunError, match=f"{name} differs from what it was before training"):
        execute(config.replace(checkpoint_every=checkpoint_every), out)
    assert not (out / "model.safetensors").exists()
    saved = [int(path.name[5:13]) for path in (out / "checkpoints").glob("step-*")]
    assert all(step <= at for step in saved)  # those from before it was written to


def test_trained_parameters_may_change(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before: the same write elsewhere is not what is looked for."""
    plant(monkeypatch, "head.bias", 3)
    execute(config, tmp_path / "run")
    assert fixed_finding(tmp_path / "run")[0]


def one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["seen"] = -tensors["seen"]  # 0 becomes -0, which is equal to it


def other_values(tensors: dict[str, torch.Tensor]) -> None:
    tensors["frozen.weight"][0, 0] += 1


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["passenger"] = torch.ones(3)


def one_less(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["frozen.bias"]


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (one_bit, "seen differs from what it was before training"),
        (other_values, "frozen.weight differs from what it was before training"),
        (one_more, "passenger was not there before training"),
        (one_less, "frozen.bias is missing"),
    ],
)
def test_the_audit_names_the_tensor(config: RunConfig, tmp_path: Path, change, seen: str) -> None:
    out = tmp_path / "run"
    execute(config.replace(epochs=0.25), out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    assert fixed_finding(out) == (False, seen)


def test_an_unseeded_run_that_begins_again_records_its_new_weights(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before its first checkpoint, it draws new frozen weights, which no data has seen."""
    out = tmp_path / "run"
    real = PrivateGradientOracle.backward

    def die(self, images, labels, units=None):
        raise RuntimeError("dead")

    monkeypatch.setattr(PrivateGradientOracle, "backward", die)
    with pytest.raises(RuntimeError, match="dead"):
        execute(config, out)
    monkeypatch.setattr(PrivateGradientOracle, "backward", real)
    execute(stored_config(out), out, resume=True)
    assert fixed_finding(out)[0]
