import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vjp

from dpbam.nn import (
    StandardisedConv1d,
    StandardisedConv2d,
    StandardisedConv3d,
)
from dpbam.nn.standardise import convolution, standardised

CLASSES = [
    (StandardisedConv1d, nn.Conv1d, 1),
    (StandardisedConv2d, nn.Conv2d, 2),
    (StandardisedConv3d, nn.Conv3d, 3),
]


def by_hand(v: np.ndarray, scale: bool, eps: float) -> np.ndarray:
    """The formula channel by channel in numpy, sharing nothing with the package."""
    channels = []
    for channel in v:
        m = channel.size
        mean = sum(channel.ravel()) / m
        variance = sum((entry - mean) ** 2 for entry in channel.ravel()) / m
        channels.append((channel - mean) / (np.sqrt(variance + eps) if scale else 1.0))
    return np.stack(channels)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize(("cls", "plain", "dims"), CLASSES)
def test_formula_and_forward_in_float64(cls, plain, dims, eps, scale):
    torch.manual_seed(0)
    options = {"stride": 2, "padding": 1, "groups": 2, "dtype": torch.float64}
    conv = cls(4, 6, 3, scale=scale, eps=eps, **options)
    weight = by_hand(conv.weight.detach().numpy(), scale, eps)
    np.testing.assert_allclose(conv.standardised_weight().detach().numpy(), weight, atol=1e-14)

    reference = plain(4, 6, 3, **options)
    reference.load_state_dict({"weight": torch.tensor(weight), "bias": conv.bias.detach()})
    x = torch.randn(2, 4, *[7] * dims, dtype=torch.float64)
    torch.testing.assert_close(conv(x), reference(x))


def test_eps_matters_in_the_formula():
    # the check above could not see a missing eps if it were always negligible
    v = np.random.default_rng(0).normal(size=(2, 3, 3))
    assert abs(by_hand(v, True, 0.1) - by_hand(v, True, 1e-6)).max() > 1e-2


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    shift=st.floats(-5, 5),
    factor=st.floats(0.5, 20),
    seed=st.integers(0, 1000),
    scale=st.booleans(),
)
def test_invariances(shift, factor, seed, scale):
    v = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    w = standardised(v, scale, 0.0)
    torch.testing.assert_close(standardised(v + shift, scale, 0.0), w)  # constants vanish
    expected = w if scale else factor * w  # scaling forgets the size, centring keeps it
    torch.testing.assert_close(standardised(factor * v, scale, 0.0), expected)


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("scale", [False, True])
def test_documented_jacobian(scale, eps):
    torch.manual_seed(0)
    v, g = torch.randn(2, 5, 12, dtype=torch.float64)  # five channels of fan-in 12
    what, pull = vjp(lambda v: standardised(v, scale, eps), v)

    def mean(t):
        return t.mean(1, keepdim=True)

    documented = g - mean(g)
    if scale:
        root = (v.var(1, correction=0, keepdim=True) + eps).sqrt()
        documented = (g - mean(g) - what * mean(what * g)) / root
    torch.testing.assert_close(pull(g)[0], documented)
    assert mean(documented).abs().max() < 1e-14


@pytest.mark.parametrize("scale", [False, True])
def test_second_derivatives(scale):
    v = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: standardised(v, scale, 1e-3), (v,))


def test_constant_channel_is_zero_and_finite():
    conv = StandardisedConv2d(2, 3, 3, scale=True)
    nn.init.constant_(conv.weight, 0.7)
    conv.standardised_weight().square().sum().backward()
    assert conv.standardised_weight().abs().max() < 1e-3
    assert conv.weight.grad.isfinite().all()


def test_fan_in_of_one_is_refused():
    with pytest.raises(ValueError, match="fan-in of one, so centring would make its weight zero"):
        StandardisedConv2d(4, 4, 1, groups=4)


@pytest.mark.parametrize(("kind", "scale"), [("none", None), ("centre", False), ("scale", True)])
def test_convolution_has_no_bias_and_keeps_the_size(kind, scale):
    conv = convolution(3, 8, weight_standardisation=kind)
    assert conv.bias is None
    assert getattr(conv, "scale", None) is scale
    assert conv(torch.zeros(1, 3, 9, 7)).shape == (1, 8, 9, 7)
    assert convolution(3, 8, 1, stride=2)(torch.zeros(1, 3, 9, 7)).shape == (1, 8, 5, 4)


def test_repr_names_the_settings():
    assert "kernel_size=(3, 3)" in repr(StandardisedConv2d(2, 4, 3, scale=False))
    assert "scale=False, eps=1e-06" in repr(StandardisedConv2d(2, 4, 3, scale=False))


def test_an_engine_can_see_the_map_as_one_function():
    seen = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    conv = StandardisedConv2d(2, 4, 3)
    with Spy():
        y = conv(torch.ones(1, 2, 4, 4))
    assert standardised in seen
    torch.testing.assert_close(y, conv(torch.ones(1, 2, 4, 4)))
