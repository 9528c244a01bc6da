import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from dpbam.nn import ResNet9, check_model, check_trainable, replace_batch_norm
from dpbam.nn.repair import has_batch_norm


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(48)),
        nn.Flatten(), nn.Linear(48 * 36, 20), nn.BatchNorm1d(20),
    )  # fmt: skip


# ---- the guard -----------------------------------------------------------------------------

REFUSED = [
    (nn.BatchNorm1d(4), r"BatchNorm1d\) mixes the samples of a batch.*replace_batch_norm"),
    (nn.BatchNorm2d(4), r"BatchNorm2d\) mixes the samples of a batch.*or put this layer in eval"),
    (nn.BatchNorm3d(4, affine=False), r"BatchNorm3d\) mixes the samples"),
    (nn.SyncBatchNorm(4), r"SyncBatchNorm\) mixes the samples"),
    (nn.BatchNorm2d(4, track_running_stats=False).eval(), r"mixes .* and in eval too since"),
    (nn.InstanceNorm2d(4, track_running_stats=True), r"keeps running statistics .* without noise"),
    (parametrizations.spectral_norm(nn.Linear(4, 4)), r"_SpectralNorm\) keeps the vectors"),
    (spectral_norm(nn.Linear(4, 4)), r"Linear\) keeps the vectors of a spectral norm"),
    (nn.Embedding(4, 4, max_norm=1.0).eval(), r"Embedding\) rescales the rows .* max_norm=None"),
    (nn.EmbeddingBag(4, 4, max_norm=1.0), r"EmbeddingBag\) rescales the rows"),
    (nn.LazyLinear(4), r"LazyLinear\) is lazy and has no parameters yet: run the model once"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED)
def test_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        check_model(nn.ModuleDict({"body": nn.Sequential(nn.Identity(), layer)}))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4).eval(),
        nn.BatchNorm2d(4).requires_grad_(False).eval(),
        nn.InstanceNorm2d(4),
        nn.InstanceNorm2d(4, track_running_stats=True).eval(),
        parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.Embedding(4, 4),
        nn.Dropout(0.5),
    ],
)
def test_allowed(layer):
    check_model(nn.Sequential(nn.Linear(4, 4), layer))


def test_message_names_path_and_class():
    net = conv_net()
    net[1].eval()
    with pytest.raises(ValueError, match=r"^layer '3\.0' \(BatchNorm2d\) mixes"):
        check_model(net)
    with pytest.raises(ValueError, match=r"^the model itself \(BatchNorm2d\) mixes"):
        check_model(nn.BatchNorm2d(3))


def test_train_mode_in_the_middle_of_a_run_is_caught():
    net = conv_net().eval()
    check_model(net)
    net.train()
    with pytest.raises(ValueError, match="mixes the samples"):
        check_model(net)


def test_frozen_batch_norm_in_train_mode_is_refused():
    # no parameter is trained, yet it mixes samples and keeps their statistics
    with pytest.raises(ValueError, match="mixes the samples"):
        check_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).requires_grad_(False)))


def test_lazy_layer_is_allowed_once_initialised():
    net = nn.Sequential(nn.LazyLinear(4))
    net(torch.zeros(1, 3))
    check_model(net)


def test_what_the_guard_refuses_does_mix_or_keep():
    # the reason, layer by layer: another sample changes the output, or the layer changes itself
    x, other = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    other[0] = x[0]
    for layer in (nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False).eval()):
        assert not torch.allclose(layer(x)[0], layer(other)[0])
    norm = nn.BatchNorm2d(4).eval()
    assert torch.equal(norm(x)[0], norm(other)[0])

    tracking = nn.InstanceNorm2d(4, track_running_stats=True)
    before = tracking.running_mean.clone()
    tracking(x)
    assert not torch.equal(tracking.running_mean, before)

    embedding = nn.Embedding(4, 4, max_norm=0.1).eval()
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([2]))
    changed = (embedding.weight != before).any(1)
    assert changed.tolist() == [False, False, True, False]  # shows which row was looked up


def test_check_trainable():
    check_trainable(nn.Linear(2, 2))
    for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ValueError, match="the model has no trainable parameter"):
            check_trainable(model)


# ---- the repair ----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_replacement_keeps_shape_mode_and_passes_the_guard(training):
    net = conv_net().train(training)
    x = torch.randn(5, 3, 8, 8)
    shape = net(x).shape
    assert has_batch_norm(net)
    assert replace_batch_norm(net) is net
    assert not has_batch_norm(net)
    check_model(net.train(training))
    assert net(x).shape == shape
    assert all(m.training is training for m in net.modules())
    assert not list(net.buffers())
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]))  # no sample sees another


@pytest.mark.parametrize(
    ("old", "groups"),
    [
        (nn.BatchNorm2d(64), 32), (nn.BatchNorm2d(48), 24), (nn.BatchNorm3d(16), 8),
        (nn.BatchNorm2d(7), 1), (nn.SyncBatchNorm(128), 32), (nn.BatchNorm2d(1), 1),
        (nn.BatchNorm1d(64), 4), (nn.BatchNorm1d(10), 1), (nn.BatchNorm1d(1024), 32),
    ],
)  # fmt: skip
def test_groups(old, groups):
    new = replace_batch_norm(old)  # the root itself: a new one
    assert isinstance(new, nn.GroupNorm)
    assert (new.num_groups, new.num_channels) == (groups, old.num_features)


def test_vectors_survive():
    # with as many groups as divide, a group would have one value and the output would be constant
    net = replace_batch_norm(nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32)))
    y = net(torch.randn(3, 5))
    assert y.round(decimals=2).unique().numel() > 32


def test_affine_is_kept_as_the_same_parameters():
    old = nn.BatchNorm2d(8, eps=1e-3)
    nn.init.normal_(old.weight)
    nn.init.normal_(old.bias)
    old.bias.requires_grad_(False)
    net = nn.Sequential(old)
    names = [name for name, _ in net.named_parameters()]
    new = replace_batch_norm(net)[0]
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert not new.bias.requires_grad
    assert new.eps == 1e-3
    assert [name for name, _ in net.named_parameters()] == names
    x = torch.randn(2, 8, 3, 3)
    expected = nn.functional.group_norm(x, 4, old.weight, old.bias, 1e-3)
    torch.testing.assert_close(new(x), expected)


def test_without_affine():
    new = replace_batch_norm(nn.BatchNorm2d(8, affine=False))
    assert not list(new.parameters())
    assert new(torch.randn(2, 8, 3, 3)).shape == (2, 8, 3, 3)


def test_dtype_is_kept():
    new = replace_batch_norm(nn.BatchNorm2d(8).double())
    assert new(torch.randn(2, 8, 3, 3).double()).dtype == torch.float64


def test_a_shared_layer_stays_shared():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.BatchNorm2d(4)
            self.c = nn.Sequential(self.a)

    net = replace_batch_norm(Twice())
    assert isinstance(net.a, nn.GroupNorm)
    assert net.a is net.b is net.c[0]


def test_instance_norm_stops_tracking():
    net = nn.Sequential(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    assert has_batch_norm(net)
    replace_batch_norm(net)
    check_model(net)
    assert not has_batch_norm(net)
    assert not list(net.buffers())
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(net(x), net.eval()(x))


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm2d(), nn.LazyInstanceNorm2d()])
def test_lazy_norm_is_refused_and_nothing_changes(lazy):
    net = nn.Sequential(nn.BatchNorm2d(4), lazy)
    with pytest.raises(ValueError, match=r"layer '1' \(Lazy\w+\) is lazy .* run the model once"):
        replace_batch_norm(net)
    assert isinstance(net[0], nn.BatchNorm2d)


def test_vector_norm_of_one_channel_is_refused():
    with pytest.raises(ValueError, match=r"layer '0' \(BatchNorm1d\) has one channel"):
        replace_batch_norm(nn.Sequential(nn.BatchNorm1d(1)))


def test_a_model_without_batch_norm_is_untouched():
    net = ResNet9(width=0.125)
    modules = list(net.modules())
    assert replace_batch_norm(net) is net
    assert list(net.modules()) == modules
