import json

import pytest
import torch

from dpbam.app.runs import RunConfig, RunError, load_run_model
from dpbam.app.runs.folder import RunFolder
from dpbam.app.runs.model_file import save_run_model
from dpbam.data import load
from dpbam.nn import build_model


@pytest.fixture
def saved(tmp_path):
    config = RunConfig(noise_multiplier=1.0, model="mlp", model_options={"hidden": [5]})
    model = build_model("mlp", in_channels=1, image_size=8, num_classes=10, hidden=[5])
    save_run_model(RunFolder(tmp_path), model, config, load("digits"))
    return tmp_path, model


def test_the_two_files_are_enough(saved):
    folder, model = saved
    loaded = load_run_model(folder)
    assert not loaded.module.training
    assert torch.equal(loaded.module.head.weight, model.head.weight)
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", "model.safetensors"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"xx"),
        lambda folder: (folder / "model.json").write_text("{"),
        lambda folder: (folder / "model.json").write_text("{}"),
        lambda folder: _change(folder, model="nothing"),
        lambda folder: _change(folder, model_options={"hidden": [6]}),
        lambda folder: _change(folder, class_names=["a", "b"]),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
)
def test_a_damaged_model_is_one_sentence(saved, harm):
    folder, _ = saved
    harm(folder)
    with pytest.raises(RunError) as error:
        load_run_model(folder)
    assert "\n" not in str(error.value)


def _change(folder, **values):
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
