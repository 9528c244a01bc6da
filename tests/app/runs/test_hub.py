"""Encoders from a hub on 127.0.0.1: fetched once, named by digest, and what is refused."""

from __future__ import annotations

import hashlib

import huggingface_hub
import pytest

from dpbam.app.cli import main
from dpbam.app.runs import load_run_model
from dpbam.app.runs.files import read_json
from tests.app.cli.conftest import runner
from tests.app.cli.helpers import QUICK, one_sentence, snapshot
from tests.fake_hub import fake_hub
from tests.tiny_encoders import edit_json, save_encoder


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """Three models: one to use, one with pickled weights, one with code of its own."""
    place = tmp_path_factory.mktemp("repositories")
    found = {f"org/{name}": save_encoder(place / name, "resnet")
             for name in ("tiny", "pickled", "coded")}  # fmt: skip
    (found["org/pickled"] / "model.safetensors").rename(found["org/pickled"] / "pytorch_model.bin")
    edit_json(found["org/coded"] / "config.json", auto_map={"AutoModel": "evil.Model"})
    (found["org/coded"] / "evil.py").write_text("raise SystemExit('it was run')")
    return found


@pytest.fixture
def hub(repositories, monkeypatch, tmp_path):
    with fake_hub(repositories) as hub:
        use(hub.url, monkeypatch, tmp_path)
        yield hub


def use(url, monkeypatch, tmp_path):
    """Set what HF_ENDPOINT and HF_HUB_CACHE set when the library is imported."""
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def train(name, out):
    return ["train", *QUICK, "--model", f"hf:{name}", "--data", "digits", "--out", str(out)]


def test_an_encoder_is_fetched_once_and_named_by_its_digest(hub, repositories, tmp_path):
    assert main(train("org/tiny", tmp_path / "run")) == 0
    digest = hashlib.sha256((repositories["org/tiny"] / "model.safetensors").read_bytes())
    expected = {"source": "hf:org/tiny", "files": {"model.safetensors": digest.hexdigest()}}
    assert read_json(tmp_path / "run" / "privacy-statement.json")["public_weights"] == expected
    assert digest.hexdigest() in (tmp_path / "run" / "privacy-statement.md").read_text()
    files = [asked for asked in hub.asked if asked.startswith("GET org/")]
    assert len(files) == len(set(files)) == 3  # two configurations and the weights
    assert load_run_model(tmp_path / "run").module.head.out_features == 10
    assert main(["train", "--resume", "--epochs", "0.2", "--out", str(tmp_path / "run")]) == 0
    assert [asked for asked in hub.asked if asked.startswith("GET org/")] == files  # from the cache


def test_a_fetched_encoder_serves_without_the_hub(hub, monkeypatch, tmp_path):
    assert main([*train("org/tiny", tmp_path / "a"), "--dry-run"]) == 0
    use("http://127.0.0.1:9", monkeypatch, tmp_path)
    assert main([*train("org/tiny", tmp_path / "a"), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/pickled", "'org/pickled' of the Hugging Face hub has no weights as safetensors"),
        ("org/coded", "'org/coded' of the Hugging Face hub comes with code of its own"),
        ("org/nothing", "the Hugging Face hub has no public model 'org/nothing'"),
        ("org/a b", "cannot be fetched"),
        ("org/tiny/x/y", "there is no folder 'org/tiny/x/y'"),
    ],
)
def test_what_a_hub_has_is_refused_in_a_sentence(hub, name, says, capsys, tmp_path):
    ended = runner(main, capsys, tmp_path)(*train(name, tmp_path / "run"))
    one_sentence(ended, says)
    assert not [a for a in hub.asked if a.endswith((".bin", ".py"))]  # neither is fetched
    assert not (tmp_path / "run").exists()


def test_a_hub_that_cannot_be_reached_is_named_in_a_sentence(monkeypatch, capsys, tmp_path):
    use("http://127.0.0.1:9", monkeypatch, tmp_path)
    before = snapshot(tmp_path)
    ended = runner(main, capsys, tmp_path)(*train("org/tiny", tmp_path / "run"))
    one_sentence(ended, "check its name and the network")
    assert snapshot(tmp_path) == before
