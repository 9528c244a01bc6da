"""Public encoders of Hugging Face: loaded from folders, with a new head, and what is refused."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpbam import Compute, PrivacyPlan, PrivateGradientOracle
from dpbam.catalogue import ENCODERS
from dpbam.errors import DPBAMError
from dpbam.nn import build_model, check_model, train_part
from dpbam.nn.encoders import _quiet, described_encoder, load_encoder, resizing
from tests.tiny_encoders import MODELS, edit_json, save_encoder

GREY, RGB = (1, 6, 6), (3, 6, 6)


def loaded(folder, shape=RGB, outputs=5):
    return load_encoder(f"hf:{folder}", image_shape=shape, num_outputs=outputs)


def images(rows=4, shape=RGB):
    return torch.rand(rows, *shape) * 2 - 1


def gradient(model, engine, inputs):
    """The mean gradient of the trained parameters, without noise and clipping."""
    plan = PrivacyPlan.non_private(n=4, batch_size=4, epochs=1, delta=1e-3)
    loss = nn.CrossEntropyLoss(reduction="none")
    compute = Compute(engine=engine, physical_batch_size=4)
    oracle = PrivateGradientOracle(model, loss, plan, compute=compute, seed=0)
    oracle.backward(inputs, torch.tensor([0, 1, 2, 3]), torch.arange(4))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def test_all_supported_families_are_tested():
    assert set(MODELS) == set(ENCODERS)


@pytest.mark.parametrize("family", MODELS)
def test_the_head_is_replaced_and_the_encoder_has_its_public_weights(family, tmp_path):
    model = loaded(save_encoder(tmp_path, family))
    assert model.head.out_features == 5
    torch.manual_seed(0)
    prefixes = (f"{family}.", "vision_model.")  # a classifier's encoder, a tower of two
    public = {re.sub(f"^({'|'.join(prefixes)})", "", name): value
              for name, value in MODELS[family]().state_dict().items()}  # fmt: skip
    for name, value in model.encoder.state_dict().items():
        if "running" not in name:  # save_encoder sets these
            assert torch.equal(value, public[name.removeprefix(prefixes[0])]), name
    check_model(model.train())
    x = images()
    features = model.eval().features(x)[:, :, None, None]
    assert torch.equal(model(features), model(x))


@pytest.mark.parametrize(
    "family",
    ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "vit")],
)
def test_a_description_rebuilds_the_model_without_its_folder(family, tmp_path):
    model = loaded(save_encoder(tmp_path, family), GREY).eval()
    plain = json.loads(json.dumps(model.description()))
    again = described_encoder(plain, image_shape=GREY, num_outputs=5)
    again.load_state_dict(model.state_dict())
    x = images(shape=GREY)
    assert torch.equal(again.eval()(x), model(x))


@pytest.mark.parametrize("family", ["vit", "resnet", "swin", "efficientnet"])
def test_the_classifier_of_transformers_predicts_the_same(family, tmp_path):
    model = loaded(save_encoder(tmp_path, family))
    if family == "vit":
        model.add_lora(lora_rank=2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    classifier, x = model.eval().classifier(list("abcde")), images()
    pixels = F.interpolate(x, size=(8, 8), mode="bilinear", antialias=True) * 0.5 + 0.5
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    logits = classifier(pixel_values=(pixels - mean) / std).logits
    torch.testing.assert_close(logits, model(x), atol=1e-5, rtol=1e-5)
    assert classifier.config.id2label[1] == "b"


@pytest.mark.parametrize("family", MODELS)
def test_training_drops_nothing_at_random_and_reaches_every_parameter(family, tmp_path):
    """Swin drops paths, EfficientNet connections, DINOv3 shifts positions: not here."""
    model, x = loaded(save_encoder(tmp_path, family)).train(), images()
    scores = model(x)
    assert torch.equal(model(x), scores)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(scores.square().sum(), trained, allow_unused=True)
    assert all(gradient is not None for gradient in gradients)


@pytest.mark.parametrize("family", ["clip", "dinov3_vit"])
def test_a_tower_without_a_classifier_of_transformers_is_not_exported_as_one(family, tmp_path):
    model = loaded(save_encoder(tmp_path, family))
    with pytest.raises(DPBAMError, match=r"no classifier on these features of .*: export ONNX"):
        model.classifier(list("abcde"))


def test_the_image_tower_of_two_is_that_of_its_own_file(tmp_path):
    """Also of a file that holds the tower alone, as the hub has some."""
    both = save_encoder(tmp_path / "both", "clip")
    model = loaded(both).eval()
    with _quiet():
        model.encoder.save_pretrained(tmp_path / "tower")
    processor = "preprocessor_config.json"
    (tmp_path / "tower" / processor).write_text((both / processor).read_text())
    x = images()
    assert torch.equal(loaded(tmp_path / "tower").eval().features(x), model.features(x))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(8, 8), (4, 9), (6, 5)])
def test_images_are_resized_as_torch_does(mode, size, tmp_path):
    height, width = size
    x = images()
    rows, columns = resizing(6, height, mode), resizing(6, width, mode)
    expected = F.interpolate(x, size=size, mode=mode, antialias=True)
    torch.testing.assert_close(rows @ x @ columns.T, expected)


def test_batch_norms_keep_public_statistics_in_training(tmp_path):
    model = loaded(save_encoder(tmp_path, "resnet")).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    x = images()
    assert torch.allclose(model(x), model.eval()(x))  # not the batch's statistics
    norms = [m for m in model.train().modules() if isinstance(m, _BatchNorm)]
    assert norms
    assert not any(norm.training for norm in norms)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("resnet", "norms"),
        ("vit", "lora"),
        *(
            pytest.param(family, part, marks=pytest.mark.slow)
            for family in MODELS
            for part in ("lora", "norms", "all")
            if (family, part) not in {("resnet", "norms"), ("vit", "lora")}
            if part != "lora" or family not in ("resnet", "efficientnet")  # no linear layers
        ),
    ],
)
def test_engines_agree_on_encoders(family, part, tmp_path):
    model = loaded(save_encoder(tmp_path, family))
    if part == "lora":
        model.add_lora(lora_rank=2)
    names = train_part(model, part)
    assert names[-2:] == ["head.weight", "head.bias"]
    x = images()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused, functional = (gradient(model, engine, x) for engine in ("fused", "functional"))
    torch.testing.assert_close(fused, functional, atol=1e-5, rtol=1e-5)


def test_low_rank_updates_alone_are_trained_with_the_head(tmp_path):
    model = loaded(save_encoder(tmp_path))
    model.add_lora(lora_rank=2)
    names = train_part(model, "lora")
    assert all("lora_B" in name or name.startswith("head.") for name in names)
    assert len(names) == 2 + 6  # B of four projections and two layers


def test_the_fixed_factor_is_orthonormal_and_the_same_in_every_model(tmp_path):
    factors = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = loaded(save_encoder(tmp_path / str(seed)))
        model.add_lora(lora_rank=2)
        factors.append([p for name, p in model.named_parameters() if "lora_A" in name])
    for first, second in zip(*factors, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first @ first.T, torch.eye(2), atol=1e-6, rtol=0)


def test_weights_are_named_by_the_digest_of_their_file(tmp_path):
    import hashlib

    folder = save_encoder(tmp_path / "tiny-vit")
    weights = loaded(folder).weights
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert weights == {"source": "hf:tiny-vit", "files": {"model.safetensors": digest}}


def test_a_seed_gives_the_same_head(tmp_path):
    save_encoder(tmp_path)
    facts = {"in_channels": 3, "image_size": 6, "num_classes": 5}
    heads = [build_model(f"hf:{tmp_path}", **facts, seed=s).head.weight for s in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def no_config(folder):
    (folder / "config.json").unlink()


def no_processor(folder):
    (folder / "preprocessor_config.json").unlink()


def pickle_alone(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x08" * 100)


def too_few_weights(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if "layernorm" not in k}, path, {"format": "pt"})


def other_shapes(folder):
    edit_json(folder / "config.json", hidden_size=32)


def remote_code(folder):
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_evil.Evil"})


def other_architecture(folder):
    edit_json(folder / "config.json", model_type="bert")


def no_architecture(folder):
    edit_json(folder / "config.json", model_type=None)


def no_json(folder):
    (folder / "config.json").write_text("{")


def json_list(folder):
    (folder / "config.json").write_text("[]")


def no_mean(folder):
    edit_json(folder / "preprocessor_config.json", image_mean=None)


def other_scale(folder):
    edit_json(folder / "preprocessor_config.json", rescale_factor=1.0)


def one_mean(folder):
    edit_json(folder / "preprocessor_config.json", image_mean=[0.5], image_std=[0.5])


def zero_std(folder):
    edit_json(folder / "preprocessor_config.json", image_std=[0.0, 0.5, 0.5])


def no_size(folder):
    edit_json(folder / "preprocessor_config.json", size=None)


BAD = {
    no_config: "has no config.json",
    no_processor: "has no preprocessor_config.json",
    pickle_alone: "weights as a pickle, pytorch_model.bin, which can run code",
    no_weights: "there is no .safetensors file",
    damaged_weights: "cannot be loaded",
    too_few_weights: "lack",
    other_shapes: "cannot be loaded",
    remote_code: "comes with code of its own (auto_map), which is not run",
    other_architecture: "architecture 'bert', which is not supported: choose an encoder of",
    no_architecture: "architecture None",
    no_json: "cannot be read as JSON",
    json_list: "must hold a JSON object, not list",
    no_mean: "must have image_mean",
    other_scale: "must divide by 255",
    one_mean: "takes 3 channels but its preprocessor_config.json has 1",
    zero_std: "do not fit",
    no_size: "image height",
}


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__)
def test_folders_that_cannot_be_used_are_refused(damage, tmp_path):
    damage(save_encoder(tmp_path))
    with pytest.raises(DPBAMError) as error:
        loaded(tmp_path)
    assert BAD[damage] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hf:", "names no encoder"),
        ("hf:./nowhere", "there is no folder './nowhere'"),
        ("hf:/no/such/folder", "there is no folder"),
    ],
)
def test_names_that_cannot_be_used_are_refused(spec, said):
    with pytest.raises(DPBAMError, match=said):
        load_encoder(spec, image_shape=RGB, num_outputs=2)


def test_a_name_that_the_hub_does_not_know_is_refused(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(DPBAMError, match=r"'no/such' cannot be fetched .*\(no network\)"):
        load_encoder("hf:no/such", image_shape=RGB, num_outputs=2)


def test_the_hub_is_asked_for_neither_code_nor_pickles(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(save_encoder(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = load_encoder("hf:org/tiny@abc", image_shape=RGB, num_outputs=2)
    assert (asked["repository"], asked["revision"]) == ("org/tiny", "abc")
    assert not any(p.endswith((".py", ".bin", "*")) for p in asked["allow_patterns"])
    assert model.weights["source"] == "hf:org/tiny@abc"


def test_lora_without_linear_layers_is_refused(tmp_path):
    with pytest.raises(DPBAMError, match="resnet has no linear layers that LoRA"):
        loaded(save_encoder(tmp_path, "resnet")).add_lora(lora_rank=2)


def test_images_of_other_channels_are_refused(tmp_path):
    with pytest.raises(DPBAMError, match="images of 3 channels, and the data has 2"):
        loaded(save_encoder(tmp_path), (2, 6, 6))
