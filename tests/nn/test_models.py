"""The models by name, and the blocks that they are made of."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from dpbam.engines import FunctionalEngine, FusedEngine, LoopEngine
from dpbam.engines.base import PhysicalBatch
from dpbam.errors import ArgumentError
from dpbam.methods import BAM, DPSGD
from dpbam.nn import (
    MLP,
    ResNet9,
    SmallCNN,
    StandardisedConv2d,
    UNet,
    WideResNet,
    build_model,
    check_model,
)
from dpbam.nn.models import (
    HalvingPool,
    activation_module,
    check_arguments,
    check_image,
    conv_norm_act,
    group_count,
    group_norm,
)
from dpbam.tasks.segmentation import Segmentation

SMALL = {
    "resnet9": lambda: ResNet9(1, 3, width=0.125, scale_norm=True),
    "resnet9-scale": lambda: ResNet9(1, 3, width=0.125, weight_standardisation="scale"),
    "wrn": lambda: WideResNet(1, 3, depth=10, widen=1, activation="mish"),
    "small-cnn": lambda: SmallCNN(1, 3),
    "mlp": lambda: MLP(64, 3, hidden=(16, 8)),
}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def kinds(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


# ---- counts --------------------------------------------------------------------------------


def test_resnet9_is_the_papers():
    net = ResNet9()
    convs = 9 * (3 * 64 + 64 * 128 + 2 * 128 * 128 + 128 * 256 + 256 * 256 + 2 * 256 * 256)
    norms = 2 * (64 + 3 * 128 + 4 * 256)
    assert parameters(net) == convs + norms + (4 * 256 * 10 + 10) == 2_447_946
    assert round(parameters(net) / 1e6, 3) == 2.448  # what its authors report
    assert [m.num_groups for m in kinds(net, nn.GroupNorm)] == [32] * 8
    assert all(conv.bias is None for conv in kinds(net, nn.Conv2d))
    assert len(kinds(net, nn.Mish)) == len(kinds(net, nn.Conv2d)) == 8


def test_scale_norm_adds_two_norms():
    assert parameters(ResNet9(scale_norm=True)) == 2_447_946 + 2 * (128 + 256)
    assert len(kinds(ResNet9(scale_norm=True, width=0.25), nn.GroupNorm)) == 10


def test_resnet9_width():
    net = ResNet9(width=0.25)
    assert [conv.out_channels for conv in kinds(net, nn.Conv2d)] == [16, 32, 32, 32] + [64] * 4
    assert [m.num_groups for m in kinds(net, nn.GroupNorm)] == [8, 16, 16, 16] + [32] * 4
    assert kinds(ResNet9(width=0.01), nn.Conv2d)[0].out_channels == 4
    with pytest.raises(ValueError, match="width must be positive"):
        ResNet9(width=0)


def test_wrn_16_4_counts():
    assert parameters(WideResNet(num_classes=10)) == 2_749_306
    net = WideResNet()
    assert parameters(net) == 2_749_306 + 990 * (256 + 1) == 3_003_736
    assert len(kinds(net, nn.Conv2d)) == 16  # stem, 12 in six blocks, 3 skips
    assert {m.num_groups for m in kinds(net, nn.GroupNorm)} == {8, 16}  # 8: the stem's 16 channels


def test_small_cnn_and_mlp_counts():
    assert parameters(SmallCNN()) == 25_978
    assert parameters(MLP(64, 10, hidden=(32,))) == 64 * 32 + 32 + 32 * 10 + 10
    assert parameters(MLP(64, 10, hidden=())) == 650


@pytest.mark.parametrize("kind", ["none", "centre", "scale"])
@pytest.mark.parametrize("cls", [ResNet9, WideResNet, SmallCNN])
def test_weight_standardisation_reaches_every_convolution(cls, kind):
    convs = kinds(cls(weight_standardisation=kind), nn.Conv2d)
    if kind == "none":
        assert all(type(conv) is nn.Conv2d for conv in convs)
    else:
        assert all(type(conv) is StandardisedConv2d for conv in convs)
        assert {conv.scale for conv in convs} == {kind == "scale"}


# ---- shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (9, 15), (16, 16), (28, 28), (32, 32), (64, 33)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda c: ResNet9(c, 5, width=0.125),
        lambda c: WideResNet(c, 5, depth=10, widen=1),
        lambda c: SmallCNN(c, 5),
    ],
)
def test_shapes(make, channels, size):
    net = make(channels)
    logits = net(torch.randn(2, channels, *size))
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    assert not torch.allclose(logits[0], logits[1])  # no norm has wiped the input out


def test_maps_of_a_32_image():
    net, sides = ResNet9(width=0.125), []
    net.final_pool.register_forward_hook(lambda _, x, y: sides.extend((x[0].shape, y.shape)))
    net(torch.zeros(1, 3, 32, 32))
    assert sides == [(1, 32, 4, 4), (1, 32, 2, 2)]


def test_too_small_images_are_refused():
    with pytest.raises(ValueError, match="resnet9 needs images of at least 8x8, got 7x8"):
        ResNet9(width=0.125)(torch.zeros(1, 3, 7, 8))
    with pytest.raises(ValueError, match="wrn needs images of at least 8x8, got 4x4"):
        WideResNet(depth=10, widen=1)(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match="small-cnn needs images of at least 4x4, got 3x3"):
        SmallCNN()(torch.zeros(1, 1, 3, 3))


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"depth must be 6 k \+ 4 .* got 17"):
        WideResNet(depth=17)
    with pytest.raises(ValueError, match="channels must be three numbers"):
        SmallCNN(channels=(8, 8))
    with pytest.raises(ValueError, match="activation 'gelu' is unknown"):
        MLP(4, 2, activation="gelu")


@pytest.mark.parametrize(("kind", "least"), [("scale", 0.5), ("none", 0.2)])
def test_wrn_sums_have_sides_of_like_size(kind, least):
    torch.manual_seed(0)
    net = WideResNet(num_classes=10, weight_standardisation=kind)
    x = net.stem(torch.randn(4, 3, 32, 32))
    for block in net.blocks:
        skip, body = block.skip_factor * block.skip(x), block.body_factor * block.body(x)
        assert least < skip.std() / body.std() < 1 / least
        x = skip + body


def test_wrn_block_is_the_documented_sum():
    net = WideResNet(1, 3, depth=16, widen=1)
    first, second = net.blocks[0], net.blocks[1]
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(first(x), 16**-0.5 * first.skip(x) + 144**-0.5 * first.body(x))
    torch.testing.assert_close(second(x), x + 144**-0.5 * second.body(x))
    order = [type(m) for m in second.body]
    assert order == [nn.ReLU, nn.GroupNorm, StandardisedConv2d] * 2
    plain = WideResNet(1, 3, depth=10, widen=1, weight_standardisation="centre").blocks[0]
    torch.testing.assert_close(plain(x), plain.skip(x) + plain.body(x))


# ---- what private training asks ------------------------------------------------------------


@pytest.fixture(params=SMALL)
def case(request):
    torch.manual_seed(0)
    net = SMALL[request.param]().double()
    return net, torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 1])


def sample_loss(net):
    def loss(theta, x, y):
        return F.cross_entropy(functional_call(net, theta, (x[None],)), y[None])

    return loss


def one_at_a_time(net, x, y):
    """Plain autograd, one sample after the other."""
    names = [name for name, _ in net.named_parameters()]
    rows = []
    for k in range(len(x)):
        loss = F.cross_entropy(net(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.autograd.grad(loss, list(net.parameters())))
    return {name: torch.stack([row[j] for row in rows]) for j, name in enumerate(names)}


def test_no_sample_sees_another(case):
    net, x, _ = case
    check_model(net)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]))
    assert not list(net.buffers())  # nothing that a forward pass could leave behind


def test_per_sample_gradients_under_vmap(case):
    net, x, y = case
    theta = {name: p.detach() for name, p in net.named_parameters()}
    together = vmap(grad(sample_loss(net)), (None, 0, 0))(theta, x, y)
    torch.testing.assert_close(together, one_at_a_time(net, x, y))


def test_per_sample_parameters_under_vmap(case):
    net, x, y = case  # BAM's ascent gives each sample its own weights
    theta = {n: p.detach() + 0.01 * torch.randn(4, *p.shape) for n, p in net.named_parameters()}
    together = vmap(sample_loss(net))(theta, x, y)
    apart = [sample_loss(net)({n: t[k] for n, t in theta.items()}, x[k], y[k]) for k in range(4)]
    torch.testing.assert_close(together, torch.stack(apart))


# torch itself calls torch.jit.script at the first forward derivative of a process
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_hessian_vector_products_both_ways(case):
    net, x, y = case
    theta = {name: p.detach() for name, p in net.named_parameters()}
    u = {name: torch.randn_like(p) for name, p in theta.items()}

    def forward_over_reverse(x, y):
        return jvp(lambda theta: grad(sample_loss(net))(theta, x, y), (theta,), (u,))[1]

    together = vmap(forward_over_reverse)(x, y)
    for k in range(2):
        loss = F.cross_entropy(net(x[k : k + 1]), y[k : k + 1])
        first = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        inner = sum((g * v).sum() for g, v in zip(first, u.values(), strict=True))
        second = torch.autograd.grad(inner, list(net.parameters()))
        for name, expected in zip(theta, second, strict=True):
            torch.testing.assert_close(together[name][k], expected)


@pytest.mark.parametrize(("side", "depth"), [((8, 8), 3), ((17, 10), 2), ((9, 31), 1)])
def test_every_pixel_has_scores(side, depth):
    net = UNet(1, 3, width=4, depth=depth)
    x = torch.randn(2, 1, *side)
    assert net(x).shape == (2, 3, *side)
    assert torch.allclose(net(x)[1:], net(x[1:]), atol=1e-5)


def test_it_is_built_by_name_and_refuses_what_is_too_small_or_deep():
    net = build_model("unet", in_channels=3, image_size=16, num_classes=2, width=4, seed=0)
    assert net(torch.zeros(1, 3, 16, 16)).shape == (1, 2, 16, 16)
    with pytest.raises(ArgumentError, match="unet needs images of at least 8x8"):
        build_model("unet", in_channels=1, image_size=7, num_classes=2)
    with pytest.raises(ArgumentError, match="depth must be 1, 2 or 3, got 4"):
        UNet(depth=4)


@pytest.mark.parametrize("method", [DPSGD(), BAM(0.05), BAM(0.05, exact=True)])
def test_the_engines_agree_on_weighted_masks(method):
    net = UNet(1, 3, width=4, depth=1, activation="tanh").double()
    task = Segmentation("abc", class_weights={"b": 3.0}, focal=2.0).double()
    batch = PhysicalBatch(
        torch.randn(4, 1, 8, 9).double(), torch.randint(0, 3, (4, 8, 9), dtype=torch.uint8),
        2, torch.arange(4), 2,
    )  # fmt: skip
    expected, *others = (
        engine(net, task).directions(batch, method, 0.05)
        for engine in (LoopEngine, FunctionalEngine, FusedEngine)
    )
    factors = torch.tensor([[0.3, 0.9]]).double()
    for handle in others:
        assert torch.allclose(handle.norms(), expected.norms(), rtol=1e-6)
        for name, value in handle.weighted_sum(factors).items():
            assert torch.allclose(value, expected.weighted_sum(factors)[name], atol=1e-8), name


@settings(deadline=None, max_examples=200, derandomize=True)
@given(channels=st.integers(1, 600), most=st.integers(1, 64), least_size=st.integers(1, 32))
def test_group_rule(channels, most, least_size):
    groups = group_count(channels, most=most, least_size=least_size)
    fits = [
        g for g in range(1, most + 1) if channels % g == 0 and channels // g >= least_size
    ]  # by trying all
    assert groups == (max(fits) if fits else 1)


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 32), (128, 32), (256, 32), (16, 8), (32, 16), (13, 1), (1, 1)]
)
def test_groups_of_the_papers_widths(channels, groups):
    assert group_norm(channels).num_groups == groups


def test_group_of_two_values_would_be_plus_minus_one():
    # the reason for the least size: what a norm over one or two values leaves of its input
    x = torch.tensor([[1.0, 5.0, -2.0, 7.0]])
    assert nn.GroupNorm(4, 4)(x.repeat(2, 1)).abs().max() < 1e-3
    torch.testing.assert_close(nn.GroupNorm(2, 4)(x).abs(), torch.ones(1, 4), atol=1e-4, rtol=0)


def test_activations_by_name():
    assert isinstance(activation_module("tanh"), nn.Tanh)
    with pytest.raises(ValueError, match="activation 'relo' is unknown: did you mean 'relu'"):
        activation_module("relo")


def test_conv_norm_act_normalises_each_sample_by_itself():
    block = conv_norm_act(3, 8, weight_standardisation="scale")
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(block(x)[2:3], block(x[2:3]))


@pytest.mark.parametrize(
    ("before", "after"), [((8, 8), (4, 4)), ((7, 5), (3, 2)), ((4, 9), (2, 4)), ((3, 9), (3, 9))]
)
def test_halving_pool(before, after):
    assert HalvingPool()(torch.zeros(1, 2, *before)).shape == (1, 2, *after)


def test_halving_pool_averages():
    pooled = HalvingPool()(torch.arange(16.0).reshape(1, 1, 4, 4))
    assert pooled.tolist() == [[[[2.5, 4.5], [10.5, 12.5]]]]


def test_check_image_names_shape_and_way_out():
    with pytest.raises(
        ValueError, match=r"net takes a batch of images.*got \(2, 8, 8\).*unsqueeze"
    ):
        check_image(torch.zeros(2, 8, 8), "net", 8)
    with pytest.raises(ValueError, match="net needs images of at least 8x8, got 8x7: enlarge"):
        check_image(torch.zeros(2, 1, 8, 7), "net", 8)
    check_image(torch.zeros(2, 1, 8, 8), "net", 8)


def test_check_arguments():
    with pytest.raises(ValueError, match="in_channels must be at least 1, got 0"):
        check_arguments(0, 10, "none")
    with pytest.raises(TypeError, match=r"num_classes must be a whole number, got 2\.5"):
        check_arguments(1, 2.5, "none")
    with pytest.raises(ValueError, match="weight_standardisation 'both' is unknown"):
        check_arguments(1, 2, "both")
