import sys
import types
import warnings

import pytest
import torch
from torch import nn

import dpbam.nn
from dpbam.nn import MLP, ResNet9, SmallCNN, WideResNet, build_model

IMAGES = {"in_channels": 1, "image_size": 8, "num_classes": 3}


@pytest.fixture
def own(monkeypatch):
    """A module of the user's own, importable as ``own_models``."""
    module = types.ModuleType("own_models")
    monkeypatch.setitem(sys.modules, "own_models", module)
    return module


@pytest.mark.parametrize(
    ("name", "cls"),
    [("resnet9", ResNet9), ("wrn-10-1", WideResNet), ("small-cnn", SmallCNN), ("mlp", MLP)],
)
@pytest.mark.parametrize("size", [8, (8, 10)])
def test_names(name, cls, size):
    net = build_model(name, in_channels=3, image_size=size, num_classes=7)
    assert type(net) is cls
    height, width = size if isinstance(size, tuple) else (size, size)
    assert net(torch.zeros(2, 3, height, width)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet9", "wrn-16-4", "small-cnn", "mlp"])
def test_every_listed_name_builds(name):
    assert isinstance(build_model(name, **IMAGES), nn.Module)
    with pytest.raises(ValueError, match=rf"model 'nothing' is unknown: .*{name}"):
        build_model("nothing", **IMAGES)


def test_wrn_takes_depth_and_width_from_its_name():
    blocks = build_model("wrn-16-2", **IMAGES).blocks
    assert len(blocks) == 6
    assert blocks[0].body[-1].out_channels == 32
    with pytest.raises(ValueError, match="'wrn-16-4' has no option 'depth'"):
        build_model("wrn-16-4", **IMAGES, depth=22)
    with pytest.raises(ValueError, match=r"depth must be 6 k \+ 4"):
        build_model("wrn-17-4", **IMAGES)


def test_options_reach_the_model():
    net = build_model("resnet9", **IMAGES, width=0.125, weight_standardisation="scale")
    assert net.conv1[0].out_channels == 8
    assert net.conv1[0].scale is True


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("resnet-9", "'resnet-9' is unknown: did you mean 'resnet9'.*There are resnet9, wrn-16-4"),
        ("wrn-16", "did you mean 'wrn-16-4'"),
        ("vit", "'vit' is unknown: There are .*small-cnn, mlp, unet .*'module:function'"),
    ],
)
def test_unknown_name(name, match):
    with pytest.raises(ValueError, match=match):
        build_model(name, **IMAGES)


def test_unknown_option():
    with pytest.raises(ValueError, match="'resnet9' has no option 'widht': did you mean 'width'"):
        build_model("resnet9", **IMAGES, widht=0.5)
    with pytest.raises(ValueError, match="'mlp' has no option 'zzz': its options are hidden, act"):
        build_model("mlp", **IMAGES, zzz=1)


def test_small_images_are_refused_at_once():
    with pytest.raises(ValueError, match="wrn-16-4 needs images of at least 8x8, got 8x7"):
        build_model("wrn-16-4", in_channels=1, image_size=(8, 7), num_classes=2)


@pytest.mark.parametrize("fact", ["in_channels", "image_size", "num_classes"])
def test_facts_are_checked(fact):
    with pytest.raises(ValueError, match=f"{fact} must be at least 1, got 0"):
        build_model("mlp", **(IMAGES | {fact: 0}))


# ---- seeds ---------------------------------------------------------------------------------


def weights(**options):
    return torch.cat([p.flatten() for p in build_model("mlp", **IMAGES, **options).parameters()])


def test_seed_fixes_the_weights_and_leaves_the_global_state():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights(seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(weights(seed=5), first)
    assert not torch.equal(weights(seed=6), first)


def test_without_seed_the_global_generator_decides():
    torch.manual_seed(1)
    first, second = weights(), weights()
    torch.manual_seed(1)
    assert torch.equal(weights(), first)
    assert not torch.equal(first, second)


def test_state_is_put_back_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="unknown"):
        build_model("nothing", **IMAGES, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        build_model("mlp", **IMAGES, seed=-1)


# ---- a function of the user's own ----------------------------------------------------------


def test_own_function_gets_what_it_takes(own):
    calls = []

    def some(num_classes, image_size, hidden=4):
        calls.append((num_classes, image_size, hidden))
        return nn.Linear(hidden, num_classes)

    def everything(**facts):
        calls.append(facts)
        return nn.Linear(1, 1)

    own.some, own.everything, own.nothing = some, everything, lambda: nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = build_model("own_models:some", **IMAGES, hidden=9)
        build_model("own_models:everything", **IMAGES, depth=2)
        build_model("own_models:nothing", **IMAGES)
    assert (net.in_features, net.out_features) == (9, 3)
    facts = {"in_channels": 1, "image_size": (8, 8), "num_classes": 3, "depth": 2}
    assert calls == [(3, (8, 8), 9), facts]


def test_own_class_and_seed(own):
    own.Net = MLP
    one, two = (build_model("own_models:Net", **IMAGES, in_features=4, seed=1) for _ in range(2))
    assert torch.equal(one.head.weight, two.head.weight)


def test_own_model_is_repaired_with_a_warning(own):
    own.net = lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
    with pytest.warns(UserWarning, match="own_models:net has batch norms.*replaced") as caught:
        net = build_model("own_models:net", **IMAGES)
    assert isinstance(net[1], nn.GroupNorm)
    assert caught[0].filename == __file__  # points at the caller


def test_own_function_errors(own, tmp_path, monkeypatch):
    own.make_net = lambda: "a string"
    with pytest.raises(TypeError, match=r"own_models:make_net returned str, not a torch\.nn\.Mod"):
        build_model("own_models:make_net", **IMAGES)
    with pytest.raises(ValueError, match="'own_models' has no function 'makenet': did you mean"):
        build_model("own_models:makenet", **IMAGES)
    with pytest.raises(ValueError, match="has no option 'width': its options are none"):
        build_model("own_models:make_net", **IMAGES, width=1)
    with pytest.raises(ValueError, match=r"there is no module 'no_such\.models' to import"):
        build_model("no_such.models:net", **IMAGES)
    with pytest.raises(ValueError, match="must read 'module:function'"):
        build_model(":net", **IMAGES)
    (tmp_path / "broken_models.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):  # its own error, whole
        build_model("broken_models:net", **IMAGES)


# ---- the package ---------------------------------------------------------------------------


def test_every_public_name_is_there_and_documented():
    for name in dpbam.nn.__all__:
        assert getattr(dpbam.nn, name).__doc__
    assert sorted(dpbam.nn.__all__) == list(dpbam.nn.__all__)
