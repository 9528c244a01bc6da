"""Layers of drawn shapes: the fused engine against one sample at a time, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import METHODS, errors
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_batch
from torch import Tensor, nn

from dpbam.engines.base import UnsupportedModelError
from dpbam.engines.functional import FunctionalEngine
from dpbam.engines.fused import FusedEngine
from dpbam.engines.fused.layers.conv import Conv
from dpbam.methods import BAM
from dpbam.nn.standardise import StandardisedConv1d, StandardisedConv2d

PROPERTY = settings(max_examples=settings.default.max_examples * 3 // 10)
ROWS = 4


def smooth(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is not linear in the output, one value a row."""
    return (output.flatten(1).tanh() - 0.3 + target[:, None]).pow(2).sum(1)


class Framed(nn.Module):
    """The layer between two others, so that it has an input gradient and a curved future."""

    def __init__(self, layer: nn.Module, before: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = before, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.before(x)))


def agree(layer: nn.Module, x: Tensor, before: nn.Module | None = None, units: Any = None) -> None:
    torch.manual_seed(1)
    model = Framed(layer, before or nn.Identity()).double()
    x = x.double() if x.is_floating_point() else x
    target = torch.rand(ROWS, dtype=torch.float64)
    batch = make_batch(x, target, ROWS, units or 2)
    engine = FusedEngine(model, smooth)
    for method in METHODS:
        found = errors(engine, model, smooth, batch, method)
        assert max(found.values()) < 1e-9, (method, found)
    approximate(engine, model, batch)


def approximate(engine: FusedEngine, model: nn.Module, batch: Any) -> None:
    """BAM's ascent step against the functional engine's."""
    fused = engine.directions(batch, BAM(0.2), 0.2)
    plain = FunctionalEngine(model, smooth).directions(batch, BAM(0.2), 0.2)
    torch.testing.assert_close(fused.norms(), plain.norms(), rtol=1e-9, atol=1e-12)
    ones = torch.ones(1, batch.units, dtype=torch.float64)
    torch.testing.assert_close(
        fused.weighted_sum(ones), plain.weighted_sum(ones), rtol=1e-9, atol=1e-11
    )


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.lists(st.integers(1, 3), max_size=2))
def test_linear(i: int, o: int, bias: bool, between: list[int]) -> None:
    agree(nn.Linear(i, o, bias=bias), torch.randn(ROWS, *between, i), nn.Linear(i, i))


CONV = st.fixed_dictionaries(
    {
        "kernel": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "padding": st.integers(0, 2),
        "dilation": st.integers(1, 2),
        "groups": st.sampled_from([1, 2, 4]),
        "bias": st.booleans(),
    }
)


@pytest.mark.parametrize("dims", [1, 2, 3])
@PROPERTY
@given(options=CONV, side=st.integers(5, 7))
def test_convolution(dims: int, options: dict[str, Any], side: int) -> None:
    side = side if dims < 3 else 5
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    kernel = options.pop("kernel")
    layer = make(4, 4, kernel, **options)
    agree(layer, torch.randn(ROWS, 4, *[side] * dims), make(4, 4, 1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@PROPERTY
@given(options=CONV, more=st.booleans())
def test_transposed_convolution(dims: int, options: dict[str, Any], more: bool) -> None:
    make = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    before = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 1)
    kernel = options.pop("kernel")
    options["output_padding"] = int(more and options["stride"] > 1)
    options["padding"] = min(options["padding"], options["dilation"] * (kernel - 1))
    layer = make(4, 4, kernel, **options)
    agree(layer, torch.randn(ROWS, 4, *[4 if dims < 3 else 3] * dims), before)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes(mode: str) -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    agree(layer, torch.randn(ROWS, 2, 5, 5), nn.Conv2d(2, 2, 1))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_same_padding_with_an_even_kernel(padding: str) -> None:
    agree(nn.Conv1d(2, 3, 4, padding=padding), torch.randn(ROWS, 2, 6), nn.Conv1d(2, 2, 1))


@pytest.mark.parametrize("side", [4, 12])  # Gram matrices, and gradients formed
@pytest.mark.parametrize("scale", [False, True])
def test_standardised_convolutions(scale: bool, side: int) -> None:
    layer = StandardisedConv2d(2, 3, 3, padding=1, scale=scale, eps=0.01)
    model_input, before = torch.randn(ROWS, 2, side, side), nn.Conv2d(2, 2, 1)
    if not scale:
        agree(layer, model_input, before)
        return
    torch.manual_seed(1)
    model = Framed(layer, before).double()
    batch = make_batch(model_input.double(), torch.rand(ROWS).double(), ROWS, 2)
    for method in METHODS:
        found = errors(FusedEngine(model, smooth), model, smooth, batch, method)
        assert max(found.values()) < 1e-9, (method, found)
    for inputs in (batch.inputs, torch.full_like(batch.inputs, torch.nan)):  # whatever the data
        with pytest.raises(
            UnsupportedModelError, match="moved through its standardisation's scale"
        ):
            FusedEngine(model, smooth).directions(replace(batch, inputs=inputs), BAM(0.2), 0.2)


def test_a_standardised_convolution_called_twice() -> None:
    conv = StandardisedConv1d(3, 3, 3, padding=1, scale=True)
    model = nn.Sequential(conv, nn.Tanh(), conv, nn.Tanh(), conv).double()
    batch = make_batch(torch.randn(ROWS, 3, 5).double(), torch.rand(ROWS).double(), ROWS)
    for method in METHODS:
        found = errors(FusedEngine(model, smooth), model, smooth, batch, method)
        assert max(found.values()) < 1e-9, (method, found)


@PROPERTY
@given(st.sampled_from([1, 2, 4]), st.booleans(), st.lists(st.integers(2, 4), max_size=2))
def test_group_norm(groups: int, affine: bool, space: list[int]) -> None:
    space = space or [3]
    before = nn.Linear(space[-1], space[-1])
    agree(nn.GroupNorm(groups, 4, affine=affine), torch.randn(ROWS, 4, *space), before)


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm((3, 4)),
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.RMSNorm(4),
        nn.RMSNorm((3, 4), eps=1e-3),
        nn.InstanceNorm1d(3, affine=True),
        nn.InstanceNorm1d(3),
        nn.BatchNorm1d(3).eval(),
        nn.PReLU(3),
        nn.Mish(),
        nn.AdaptiveAvgPool1d(2),
    ],
    ids=lambda layer: str(layer)[:30],
)
def test_other_layers(layer: nn.Module) -> None:
    if isinstance(layer, nn.BatchNorm1d):
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
    agree(layer, torch.randn(ROWS, 3, 4), nn.Linear(4, 4))


@PROPERTY
@given(st.integers(2, 6), st.sampled_from([None, 0, 1]), st.lists(st.integers(1, 3), max_size=2))
def test_embedding(words: int, padding: int | None, shape: list[int]) -> None:
    ids = torch.randint(0, words, (ROWS, *shape))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(words, 3, padding_idx=padding), nn.Tanh(), nn.Linear(3, 2))
    model = model.double()
    batch = make_batch(ids, torch.rand(ROWS).double(), ROWS, 2)
    engine = FusedEngine(model, smooth)
    for method in METHODS:
        found = errors(engine, model, smooth, batch, method)
        assert max(found.values()) < 1e-9, (method, found)
    approximate(engine, model, batch)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = options.pop("batch_first", True)
        self.weights = options.pop("need_weights", False)
        self.causal = options.pop("causal", False)
        self.inner = nn.MultiheadAttention(6, 2, batch_first=self.first, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if self.causal else None
        other = x[..., : self.inner.kdim]
        out, seen = self.inner(x, other, other, attn_mask=mask, need_weights=self.weights)
        out = out if self.first else out.transpose(0, 1)
        return (
            out if seen is None else out + seen.sum(-1, keepdim=True) * seen.var(-1, keepdim=True)
        )


class OwnAttention(nn.Module):
    """Attention as people write it: one projection, torch's own product."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.all, self.out, self.causal = nn.Linear(6, 18), nn.Linear(6, 6), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.all(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
def test_custom_attention(causal: bool) -> None:
    agree(OwnAttention(causal), torch.randn(ROWS, 5, 6), nn.Linear(6, 6))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": False, "bias": False},
        {"need_weights": True},
        {"causal": True, "dropout": 0.25},
        {"kdim": 4, "vdim": 4},
    ],
    ids=str,
)
def test_attention(options: dict[str, Any]) -> None:
    agree(Attention(**options), torch.randn(ROWS, 5, 6), nn.Linear(6, 6))


class TokenTypes(nn.Module):
    """An embedding looked up at constant places, one a position of every row, as BERT's types."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.last = nn.Embedding(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        kinds = torch.zeros(x.shape[:2], dtype=torch.long)
        kinds[:, 1:] = 1
        return self.last(torch.tanh(x + self.types(kinds)))


def test_embedding_at_constant_indices() -> None:
    agree(TokenTypes(), torch.randn(ROWS, 4, 3), nn.Linear(3, 3))


def test_a_parameter_repeated_for_a_row() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + torch.ones(len(x), 1, dtype=x.dtype) * self.shift)

    agree(Spread(), torch.randn(ROWS, 3), nn.Linear(3, 3))


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_products_of_shifts_are_the_depthwise_weight_gradient(stride: int, dilation: int) -> None:
    """Of each unit alone, by autograd; units have two rows."""
    layer = Conv((6, 1, 5, 5), (stride,) * 2, (3, 2), (dilation,) * 2, (12, 11), 6)
    a = torch.randn(3, 2, 6, 12, 11, dtype=torch.float64)
    weight = torch.zeros(layer.shape, dtype=torch.float64, requires_grad=True)
    y = torch.conv2d(a.flatten(0, 1), weight, None, stride, (3, 2), dilation, 6)
    b = torch.randn(y.shape, dtype=torch.float64).unflatten(0, (3, 2))
    found = layer.materialise(a, b)
    for unit in range(3):
        y = torch.conv2d(a[unit], weight, None, stride, (3, 2), dilation, 6)
        (wanted,) = torch.autograd.grad((y * b[unit]).sum(), weight)
        assert torch.allclose(found[unit], wanted, rtol=1e-12, atol=1e-12)
