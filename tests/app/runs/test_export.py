"""Exported models predict what the run's model does, and the model card has what may be public."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dpbam.app.runs import RunError, execute, load_run_model
from dpbam.app.runs.card import exported_card, model_card
from dpbam.app.runs.documents import ModelFacts, PublicWeights, Statement
from dpbam.app.runs.export import _difference, _images, export
from dpbam.app.runs.files import read_json
from dpbam.app.runs.identity import file_digest
from dpbam.data import to_float
from dpbam.training.events import EvaluationReport
from tests.tiny_encoders import save_encoder

export_module = sys.modules[export.__module__]

#: Of a statement that is about no file.
UNKNOWN = {"date": "2026-11-17", "files": {}, "configuration_sha256": "0" * 64, "versions": {}}


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """A finished run of an MLP."""
    out = tmp_path_factory.mktemp("plain") / "run"
    execute(tiny.replace(epochs=0.25), out)
    return out


@pytest.fixture(scope="module")
def encoder(tiny, tmp_path_factory):
    """A finished run of a public encoder with low-rank updates."""
    folder = tmp_path_factory.mktemp("encoder")
    model = f"hf:{save_encoder(folder / 'tiny-vit')}"
    options = {"model_options": {"lora_rank": 2}, "train": "lora", "lr": 0.5}
    execute(tiny.replace(model=model, epochs=0.25, **options), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def centred(tiny, tmp_path_factory):
    """A finished run of a head on scattering features around a released centre, as by default."""
    out = tmp_path_factory.mktemp("centred") / "run"
    options = {"model": "scattering", "model_options": {}, "release_centre": 4.0, "lr": 0.5}
    execute(tiny.replace(batch_size=1438, epochs=2, **options), out)
    return out


def outputs(model):
    with torch.no_grad():
        return model.module(to_float(_images(model)))


def test_safetensors_load_alone_with_low_rank_updates_merged(encoder, tmp_path):
    folder, difference = export(encoder, "safetensors", tmp_path / "out")
    assert difference <= 1e-5
    assert {"model.json", "model.safetensors", "README.md", "privacy-statement.md"} <= {
        path.name for path in folder.iterdir()
    }
    exported = load_run_model(folder)
    assert not any("lora" in name for name in exported.module.state_dict())
    torch.testing.assert_close(outputs(exported), outputs(load_run_model(encoder)))


def test_transformers_alone_predicts_the_same(encoder, tmp_path):
    import transformers

    folder, _ = export(encoder, "hf", tmp_path / "out")
    run = load_run_model(encoder)
    net = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = net(pixel_values=run.module.pixels(to_float(_images(run)))).logits
    torch.testing.assert_close(logits, outputs(run), atol=1e-5, rtol=1e-5)
    assert net.config.id2label == dict(enumerate(run.class_names))
    assert read_json(folder / "preprocessor_config.json")["image_mean"] == [0.5, 0.4, 0.3]


@pytest.mark.slow  # the exporter takes seconds to import
def test_onnx_has_neither_paths_nor_code_of_the_operator(plain, tmp_path, monkeypatch):
    def notes(out):
        written = (export(plain, "onnx", tmp_path / out)[0] / "model.onnx").read_bytes()
        here = str(Path(export_module.__file__).parent).encode()
        return [word for word in (here, b"in forward", b"self.module(") if word in written]

    assert notes("out") == []
    monkeypatch.setattr(export_module, "_remove_traces", lambda path: None)
    assert len(notes("with")) == 3


def test_the_module_for_onnx_subtracts_the_released_centre(centred):
    """The control: with another centre it predicts otherwise."""
    model = load_run_model(centred)
    module, pixels = export_module._without_complex(model), to_float(_images(model))
    with torch.no_grad():
        torch.testing.assert_close(module(pixels), outputs(model), atol=1e-5, rtol=1e-5)
        module.centre.zero_()
        assert (module(pixels) - outputs(model)).abs().max() > 1e-2


@pytest.mark.slow  # the exporter takes seconds to import
@pytest.mark.parametrize("which", ["plain", "encoder", "centred"])
def test_onnx_predicts_the_same_on_any_number_of_images(which, request, tmp_path):
    import onnxruntime

    run = request.getfixturevalue(which)
    folder, difference = export(run, "onnx", tmp_path / "out")
    assert difference <= 1e-5
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    model = load_run_model(run)
    for rows in (1, 3):
        (found,) = session.run(None, {"images": _images(model)[:rows].numpy()})
        torch.testing.assert_close(
            torch.from_numpy(found), outputs(model)[:rows], atol=1e-5, rtol=1e-5
        )
    assert read_json(folder / "model.json")["class_names"] == list(model.class_names)


def test_another_model_for_the_hub_is_loaded_by_dpbam(plain, tmp_path):
    folder, _ = export(plain, "hf", tmp_path / "out")
    assert torch.equal(outputs(load_run_model(folder)), outputs(load_run_model(plain)))


def test_by_default_the_folder_is_next_to_the_run(plain, tmp_path):
    run = shutil.copytree(plain, tmp_path / "scans")
    assert export(run, "safetensors")[0] == tmp_path / "scans-safetensors"


def test_other_predictions_are_refused_and_nothing_is_left(plain, tmp_path, monkeypatch):
    from dpbam.app.runs import export as module

    model = load_run_model(plain)
    with pytest.raises(RunError, match=r"outputs differ by .* more than 1e-05"):
        _difference(model, outputs(model) + 1e-3)
    monkeypatch.setattr(module, "_merged", lambda model: torch.nn.Linear(2, 2))
    with pytest.raises(RunError):
        export(plain, "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "out", "said"),
    [
        ("tensorflow", "new", "--to"),
        ("onxx", "new", "onnx"),
        ("hf", "full", "is not an empty folder: choose another --out"),
        ("hf", "file", "is not an empty folder"),
    ],
)
def test_exports_that_cannot_be_made_are_refused(plain, to, out, said, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=said):
        export(plain, to, tmp_path / out)
    assert (tmp_path / "full" / "a.txt").read_text() == "mine"


def test_a_folder_without_a_model_cannot_be_exported(tmp_path):
    with pytest.raises(RunError, match="there is no model"):
        export(tmp_path, "onnx")


def edit(run, **changes):
    path = run / "privacy-statement.json"
    path.write_text(json.dumps({**read_json(path), **changes}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: (run / "privacy-statement.json").unlink(), "has no privacy statement"),
        (lambda run: edit(run, private=False), "a reference without privacy"),
        (lambda run: edit(run, may_be_published=[]), "does not let its model be published"),
        (lambda run: (run / "NOT-FOR-RELEASE.md").touch(), "export the search's folder best"),
        (lambda run: edit(run, identity=UNKNOWN), "is not the file that the privacy"),
        (lambda run: (run / "model.json").write_text((run / "model.json").read_text() + " "),
         "model.json in .* is not the file that the privacy statement is about"),
    ],
)  # fmt: skip
def test_what_the_statement_does_not_let_be_published_is_not_exported(
    plain, tmp_path, change, said
):
    run = shutil.copytree(plain, tmp_path / "run")
    change(run)
    with pytest.raises(RunError, match=said):
        export(run, "safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_export_names_its_files_and_the_model_that_the_statement_is_about(encoder, tmp_path):
    folder, _ = export(encoder, "safetensors", tmp_path / "out")
    values = read_json(folder / "exported.json")
    stated = read_json(folder / "privacy-statement.json")["identity"]["files"]
    assert values["exported_from"]["model.safetensors"] == stated["model.safetensors"]
    assert set(values["files"]) == {p.name for p in folder.iterdir()} - {"exported.json"}
    assert values["files"]["model.safetensors"] == file_digest(folder / "model.safetensors")
    assert values["files"]["model.safetensors"] != stated["model.safetensors"]  # merged


def front_matter(text):
    """The values between the dashes: their JSON is YAML too."""
    lines = text.split("---\n")[1].splitlines()
    return {k: json.loads(v) for k, _, v in (line.partition(": ") for line in lines)}


def test_the_card_of_a_public_data_set_has_its_metrics(plain):
    text = (plain / "README.md").read_text()
    values = front_matter(text)
    assert values["library_name"] == "dpbam"
    assert "differential-privacy" in values["tags"]
    (result,) = values["model-index"][0]["results"]
    last = json.loads((plain / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["metrics"] == [{"type": "accuracy", "value": round(last["accuracy"], 4)}]
    statement = read_json(plain / "privacy-statement.json")
    assert f"delta = {statement['delta']:g}" in text
    assert "Research only: the run was seeded" in text


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("single-label", "the model gives one of these classes: a, b."),
        ("multi-label", "the model gives which of these findings it shows: a, b."),
        ("regression", "the value 0 + (y + 1) / 2 * 32."),
        ("segmentation", "the model gives one of these classes for every pixel: a, b."),
    ],
)
def test_the_card_has_what_the_model_gives_and_what_its_outputs_mean(plain, task, said):
    cards = pytest.importorskip("huggingface_hub")
    metrics = EvaluationReport(
        step=9, epoch=1.0, epsilon=3.0, scores={"auc": 0.5}, loss=1.0, records=7
    )
    changes = {"task": task, "class_names": ["a", "b"], "target_range": [0, 32]}
    model = ModelFacts.read(plain / "model.json").model_copy(update=changes)
    text = model_card(Statement.read(plain / "privacy-statement.json"), model, metrics)
    assert said in text
    (result,) = cards.ModelCard(text).data.eval_results  # the hub's own reader
    assert (result.metric_type, result.metric_value) == ("auc", 0.5)


@pytest.mark.parametrize(("to", "library"), [("hf", "transformers"), ("safetensors", "dpbam")])
@pytest.mark.slow
def test_the_card_of_an_export_loads_what_is_there(encoder, to, library, tmp_path):
    folder, _ = export(encoder, to, tmp_path / "out")
    text = (folder / "README.md").read_text()
    assert front_matter(text)["library_name"] == library
    assert ("load_run_model" in text) == (library == "dpbam")
    assert "onnxruntime" in exported_card((encoder / "README.md").read_text(), "onnx")


def test_the_card_of_private_data_has_no_metrics(plain):
    statement = Statement.read(plain / "privacy-statement.json")
    private = statement.evaluated_on.model_copy(update={"public": False})  # whatever it is called
    statement = statement.model_copy(update={"evaluated_on": private})
    metrics = EvaluationReport(
        step=9, epoch=1.0, epsilon=3.0, scores={"accuracy": 0.98765}, loss=1.0, records=7
    )
    text = model_card(statement, ModelFacts.read(plain / "model.json"), metrics)
    assert "model-index" not in front_matter(text)
    assert "0.98" not in text
    assert "98.7" not in text


def test_the_card_of_a_reference_says_that_it_is_not_private(plain):
    statement = Statement.read(plain / "privacy-statement.json")
    reference = statement.model_copy(update={"private": False})
    text = model_card(reference, ModelFacts.read(plain / "model.json"), None)
    assert "not-private" in front_matter(text)["tags"]
    assert "do not publish it" in text


def test_the_card_names_a_base_model_of_the_hub_and_no_folder(plain, encoder):
    assert "base_model" not in front_matter((encoder / "README.md").read_text())
    weights = PublicWeights(source="hf:org/tiny@main", files={})
    statement = Statement.read(plain / "privacy-statement.json")
    statement = statement.model_copy(update={"public_weights": weights})
    text = model_card(statement, ModelFacts.read(plain / "model.json"), None)
    assert front_matter(text)["base_model"] == "org/tiny"


def test_yaml_reads_the_front_matter(plain):
    yaml = pytest.importorskip("yaml")
    text = (plain / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1]) == front_matter(text)
