import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpbam.nn.blocks import (
    HalvingPool,
    activation_module,
    check_arguments,
    check_image,
    conv_norm_act,
    group_count,
    group_norm,
)


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
