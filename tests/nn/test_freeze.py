import pytest
from torch import nn

from dpbam.nn import ResNet9, SmallCNN, WideResNet, freeze, head_only


def net():
    return nn.Sequential(
        nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1)
    )


def trained(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_freeze_by_pattern():
    model = net()
    assert freeze(model, ["0.*", "*.bias"]) == ["0.weight", "0.bias", "1.0.bias", "2.bias"]
    assert trained(model) == ["1.0.weight", "2.weight"]


def test_freeze_nothing():
    assert freeze(net(), []) == []


def test_a_pattern_without_match_teaches_and_freezes_nothing():
    model = net()
    with pytest.raises(ValueError, match=r"'1\.0\.wieght' matches no parameter.*1\.0\.weight"):
        freeze(model, ["0.*", "1.0.wieght"])
    assert len(trained(model)) == 6
    with pytest.raises(
        ValueError, match=r"'zzz' matches no parameter .*: names are like 0\.weight"
    ):
        freeze(model, ["zzz"])
    with pytest.raises(ValueError, match="the model has no parameters"):
        freeze(nn.ReLU(), ["*"])


def test_one_string_is_refused():
    with pytest.raises(TypeError, match=r"patterns must be a list .* \['0\.\*'\]\?"):
        freeze(net(), "0.*")


def test_a_tied_parameter_is_frozen_by_either_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert freeze(model, ["1.weight"]) == ["1.weight"]
    assert not model[0].weight.requires_grad


def test_head_only():
    model = net()
    assert head_only(model) == ["2.weight", "2.bias"] == trained(model)


def test_head_only_unfreezes_the_head():
    model = net().requires_grad_(False)
    assert head_only(model) == ["2.weight", "2.bias"]


@pytest.mark.parametrize(
    "model",
    [ResNet9(width=0.125, scale_norm=True), WideResNet(depth=10, widen=1), SmallCNN()],
)
def test_head_of_our_models(model):
    assert head_only(model) == ["head.weight", "head.bias"]


def test_head_of_nothing():
    with pytest.raises(ValueError, match="the model has no parameters, so it has no head"):
        head_only(nn.ReLU())
