"""Runs with public encoders: features computed once, what is published, and resuming."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dpbam.app.audit.check import check_run, passed
from dpbam.app.runs import (
    ConfigError,
    RunConfig,
    RunError,
    execute,
    load_run_model,
    prepare,
    stored_config,
)
from dpbam.app.runs.facts import difference
from dpbam.app.runs.feature_model import EncoderImages, on_features
from dpbam.app.runs.files import read_json
from dpbam.app.runs.folder import RunFolder
from dpbam.data import DataError, load
from dpbam.training.evaluation import predict_logits
from tests.data.helpers import random_pixels
from tests.tiny_encoders import save_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoders") / "tiny-resnet", "resnet")


@pytest.fixture
def config(encoder, tiny) -> RunConfig:
    return tiny.replace(model=f"hf:{encoder}", model_options={}, epochs=0.5)


@pytest.fixture(scope="module")
def finished(encoder, tiny, tmp_path_factory):
    """The folder of a finished run of a head."""
    out = tmp_path_factory.mktemp("finished") / "run"
    execute(tiny.replace(model=f"hf:{encoder}", model_options={}, epochs=0.5), out)
    return out


def features(out):
    return sorted((out / "non-private").glob("features-*.npy"))


def test_a_head_trained_on_features_is_the_head_trained_on_images(config):
    """The oracle's steps on stored features and on images, with the same draws."""
    weights = []
    for on_images in (False, True):
        prepared = prepare(config)
        if on_images:
            prepared.__dict__["seen"] = (prepared.train, prepared.test)
        oracle = prepared.oracle()
        oracle.fit(torch.zeros(1, *prepared.train.shape, dtype=torch.uint8), torch.zeros(1).long())
        trainer = prepared.trainer(oracle, None)
        trainer.run()
        weights.append(prepared.model.head.weight.detach())
    assert not torch.equal(weights[0], prepare(config).model.head.weight)  # it was trained
    torch.testing.assert_close(weights[0], weights[1], atol=1e-4, rtol=1e-3)


def test_a_record_s_features_do_not_depend_on_other_records(config):
    prepared = prepare(config)
    train = prepared.train.subset(np.arange(70))
    apart = on_features(train, prepared.model, None).batch(np.arange(70))[0]
    other = on_features(train.subset(np.arange(69, -1, -1)), prepared.model, None)
    assert torch.equal(apart, other.batch(np.arange(70))[0].flip(0))
    assert apart.flatten(1).std(dim=0).max() > 0.01  # the control: records do differ


def test_features_are_stored_with_what_is_not_private_and_used_again(finished, tmp_path):
    assert len(features(finished)) == 2  # of the training and the test set
    out = shutil.copytree(finished, tmp_path / "run")
    before = [path.stat().st_mtime_ns for path in features(out)]
    execute(stored_config(out), out, resume=True)
    assert [path.stat().st_mtime_ns for path in features(out)] == before


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", None])
def test_damaged_features_are_computed_again(config, damage, tmp_path):
    prepared = prepare(config)
    train = prepared.train.subset(np.arange(4))

    def values():
        return on_features(train, prepared.model, tmp_path).batch(np.arange(4))[0]

    before = values()
    (path,) = tmp_path.iterdir()
    path.unlink() if damage is None else path.write_bytes(damage)
    assert torch.equal(values(), before)
    assert list(tmp_path.iterdir()) == [path]


def test_stored_features_are_keyed_by_the_data_and_by_the_weights(config, tmp_path):
    prepared = prepare(config)
    other = save_encoder(tmp_path / "other", "resnet", image_mean=[0.1, 0.2, 0.3])
    models = [prepared.model, prepare(config.replace(model=f"hf:{other}")).model]
    few = [prepared.train.subset(np.arange(start, start + 4)) for start in (0, 4)]
    for data in few:
        for model in models:
            on_features(data, model, tmp_path / "cache").batch(np.arange(1))
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("last", [True, False])
def test_a_changed_record_is_never_given_stale_features(config, last, tmp_path):
    """The control: of 300 images that are decoded, the set's fingerprint reads 256."""
    model, place = prepare(config).model, write_pixels(tmp_path / "scans", 300)
    read = load(str(place), split="all").images.hashed_records()
    changed = 299 if last else np.setdiff1d(np.arange(300), read)[-1]

    def found():
        data = load(str(place), split="all")
        values = on_features(data, model, tmp_path / "cache").batch(np.arange(300))[0]
        return data.fingerprint(), values

    before, old = found()
    path = sorted(place.rglob("*.bmp"))[changed]
    Image.fromarray(255 - np.asarray(Image.open(path))).save(path)  # of the same size
    after, new = found()
    differs = (old != new).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert differs == [changed]
    assert (before == after) == (not last)  # as a key it would miss the other one
    assert len(list((tmp_path / "cache").iterdir())) == 2


def write_pixels(place, count):
    """Images as BMP files, whose size does not depend on their content."""
    for k in range(count):
        path = place / "ab"[2 * k // count] / f"{k:03}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_pixels(1, k, (8, 8))[0]).save(path)
    return place


@pytest.mark.slow
def test_runs_share_the_features_of_one_cache(config, tmp_path, monkeypatch):
    shared = config.replace(feature_cache=tmp_path / "shared", epochs=0.2)
    execute(shared, tmp_path / "first")
    assert not features(tmp_path / "first")
    files = features(tmp_path / "shared")
    assert len(files) == 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    monkeypatch.setattr(EncoderImages, "_computed", None)  # it may not be called
    execute(shared.replace(seed=8, lr=0.5), tmp_path / "second")
    assert features(tmp_path / "shared") == files
    with pytest.raises(DataError, match="not callable"):  # the control: without the cache it is
        execute(config, tmp_path / "third")


def test_only_the_head_differs_from_the_public_weights(finished):
    recorded = RunFolder(finished).read_facts().initial_tensors
    weights = load_file(finished / "model.safetensors")
    assert set(recorded.trained) == {"head.weight", "head.bias"}
    assert not difference(weights, recorded)
    name = next(n for n in weights if n.endswith("running_mean"))
    changed = {**weights, name: weights[name] + 1e-6}  # the negative control
    assert name in difference(changed, recorded)


@pytest.mark.slow
def test_an_audit_signs_off_a_run_with_an_encoder(finished):
    assert passed(check_run(finished))


def test_the_published_model_needs_neither_hub_nor_folder(config, encoder, tmp_path):
    moved = shutil.copytree(encoder, tmp_path / "encoder")
    out = tmp_path / "run"
    execute(config.replace(model=f"hf:{moved}", train="norms"), out)
    shutil.rmtree(moved)
    shutil.rmtree(out / "non-private")
    model = load_run_model(out)
    assert model.module.head.out_features == 10
    for name in ("model.json", "privacy-statement.json", "privacy-statement.md"):
        assert str(tmp_path) not in (out / name).read_text()


def test_the_statement_names_the_public_weights_by_digest(finished, encoder):
    import hashlib

    digest = hashlib.sha256((encoder / "model.safetensors").read_bytes()).hexdigest()
    expected = {"source": "hf:tiny-resnet", "files": {"model.safetensors": digest}}
    assert read_json(finished / "privacy-statement.json")["public_weights"] == expected
    assert digest in (finished / "privacy-statement.md").read_text()


def test_changed_public_weights_are_refused_on_resume(config, encoder, tmp_path):
    moved = shutil.copytree(encoder, tmp_path / "encoder")
    out = tmp_path / "run"
    execute(config.replace(model=f"hf:{moved}"), out)
    shutil.rmtree(moved)
    save_encoder(moved, "convnext")
    with pytest.raises(RunError, match="public weights are not those that the run began with"):
        execute(stored_config(out), out, resume=True)


@pytest.mark.slow
def test_low_rank_updates_are_saved_and_loaded(config, tmp_path):
    vit = save_encoder(tmp_path / "vit")
    out, changes = tmp_path / "run", {"model": f"hf:{vit}", "train": "lora"}
    execute(config.replace(**changes, model_options={"lora_rank": 2}, epochs=0.25), out)
    assert RunFolder(out).weights.exists()
    run = load_run_model(out)
    assert read_json(out / "model.json")["model_options"] == {"lora_rank": 2}
    assert any("lora_B" in name and value.any() for name, value in run.module.state_dict().items())
    assert not features(out)  # the encoder changes from step to step
    prepared = prepare(stored_config(out))
    logits, _ = predict_logits(run.module, prepared.test)
    assert logits.shape == (len(prepared.test), 10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"augment_multiplicity": 2}, "computed once per record, so there are no random views"),
        ({"train": "head", "augment_multiplicity": 1}, "train lora, norms or all"),
        ({"freeze": ["encoder.*"]}, "train head freezes all the rest: leave freeze out"),
        ({"init": "w.safetensors"}, "comes with its public weights: leave init out"),
        ({"model_options": {"lora_rank": 2}}, "lora_rank needs train lora"),
        ({"model": "mlp", "train": "lora"}, "train lora adds to a public encoder"),
        ({"train": "heads"}, "did you mean 'head'?"),
        ({"train": "norms", "feature_cache": "shared"}, "feature_cache keeps the features"),
    ],
)
def test_settings_that_do_not_fit_an_encoder_are_refused(config, changes, said):
    with pytest.raises(ConfigError) as error:
        config.replace(**changes)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": "lora"}, "resnet has no linear layers that LoRA"),
        ({"train": "lora", "model_options": {"lora_rank": 0}}, "no linear layers"),
        ({"model_options": {"width": 2}}, "has no option 'width'"),
        ({"model": "mlp", "train": "norms", "model_options": {"hidden": [4]}}, "no norm layers"),
    ],
)
def test_models_that_cannot_be_trained_so_are_refused(config, changes, said):
    from dpbam.errors import DPBAMError

    with pytest.raises(DPBAMError) as error:
        prepare(config.replace(**changes))
    assert said in str(error.value)
