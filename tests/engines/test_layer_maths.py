"""Every kernel of a layer computes what the layer's maths in canonical form does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpbam.engines.fused.bilinear import Layer
from dpbam.engines.fused.layers.conv import Conv
from dpbam.engines.fused.layers.embedding import Embedding
from dpbam.engines.fused.layers.linear import Linear
from dpbam.engines.fused.standardised import Centred, centre

UNITS, IMAGES = 3, 2


def conv(shape: tuple[int, ...], stride: int, padding: int, dilation: int, side: int) -> Conv:
    dims = len(shape) - 2
    options = ((n,) * dims for n in (stride, padding, dilation, side))
    return Conv(shape, *options)


LAYERS: dict[str, Layer] = {
    "linear": Linear((5, 4)),
    "conv1d": conv((4, 3, 3), 1, 1, 1, 7),
    "conv2d": conv((4, 3, 3, 3), 1, 1, 1, 6),
    "conv2d, one row of pixels": conv((4, 3, 1, 3), 1, 1, 1, 5),
    "conv2d, stride": conv((4, 3, 3, 3), 2, 1, 1, 7),
    "conv2d, stride above the kernel": conv((4, 3, 2, 2), 3, 0, 1, 8),
    "conv2d, dilation": conv((2, 3, 3, 3), 1, 2, 2, 7),
    "conv2d, padding beyond the kernel": conv((2, 3, 2, 2), 1, 3, 1, 4),
    "conv2d, 1x1": conv((4, 3, 1, 1), 1, 0, 1, 5),
    "conv2d, 1x1 with stride": conv((4, 3, 1, 1), 2, 0, 1, 5),
    "conv3d": conv((2, 2, 2, 2, 2), 1, 1, 1, 3),
}
#: a method, and its arguments from (a, c, b, one weight, a weight per unit, [U, T, T], [U, T])
METHODS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "gram": lambda a, c, b, w, each, k, m: (a, c),
    "gram_back": lambda a, c, b, w, each, k, m: (k, a),
    "mean": lambda a, c, b, w, each, k, m: (a,),
    "mean_back": lambda a, c, b, w, each, k, m: (m, a),
    "materialise": lambda a, c, b, w, each, k, m: (a, b),
    "contract": lambda a, c, b, w, each, k, m: (a, b),
    "apply": lambda a, c, b, w, each, k, m: (w, a),
    "apply_each": lambda a, c, b, w, each, k, m: (each, a),
    "transpose_each": lambda a, c, b, w, each, k, m: (each, b, a),
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def operands(layer: Layer) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    if isinstance(layer, Conv):
        row = (IMAGES, layer.shape[1] * layer.groups, *layer.space)
    else:
        row = (6, layer.shape[1])
    a, c = draw(UNITS, *row), draw(UNITS, *row)
    b = draw(*layer.right_template(a).shape)
    t = layer.positions(b)
    weights = draw(*layer.shape), draw(UNITS, *layer.shape)
    return a, c, b, *weights, draw(UNITS, t, t), draw(UNITS, t)


def assert_close(kernel: Tensor, maths: Tensor) -> None:
    kernel, maths = kernel.detach(), maths.detach()
    assert kernel.shape == maths.shape
    assert float((kernel - maths).abs().max()) <= 1e-12 * (1 + float(maths.abs().max()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_kernel_computes_what_the_base_class_does(name: str, method: str) -> None:
    layer = LAYERS[name]
    arguments = METHODS[method](*operands(layer))
    assert_close(getattr(layer, method)(*arguments), getattr(Layer, method)(layer, *arguments))


@pytest.mark.parametrize("name", LAYERS)
def test_the_base_class_computes_a_sum_over_positions(name: str) -> None:
    """Its maths, by loops: G_u = sum_t b_t (x) a_t, and the adjoint of the patches."""
    layer = LAYERS[name]
    a, c, b, *_ = operands(layer)
    patches, rows = layer.patches(a), layer.rows(b)
    for u in range(UNITS):
        outer = sum(torch.outer(y, x) for y, x in zip(rows[u], patches[u], strict=True))
        assert_close(Layer.materialise(layer, a, b)[u].flatten(1), outer)
    other = draw(*patches.shape)
    there = (other * layer.patches(c)).sum()
    assert_close((layer.from_patches(other, c) * c).sum(), there)
    assert_close(layer.from_rows(rows, b), b)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "linear"])
def test_a_differentiable_layer_has_the_gradients_of_the_maths(name: str) -> None:
    layer = LAYERS[name]
    a, c, b, _, each, *_ = operands(layer)
    x = a.requires_grad_()
    for y, maths in (
        (layer.run_each(x, each, None), Layer.apply_each(layer, each, x)),
        (
            layer.ascend(x, [(c, b)]),
            layer.from_rows(Layer.gram(layer, x, c) @ layer.rows(b), b),
        ),
    ):
        assert_close(y, maths)
        seed = draw(*y.shape)
        assert_close(*(torch.autograd.grad(t, x, seed)[0] for t in (y, maths)))


@pytest.mark.parametrize("method", ["gram", "materialise", "apply", "apply_each"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d, stride", "conv3d"])
def test_a_centred_layer_is_the_layer_of_centred_patches(name: str, method: str) -> None:
    layer = LAYERS[name]
    centred: Any = Centred(layer)
    a, c, b, w, each, *_ = operands(layer)
    maths = {
        "gram": lambda: centred.patches(a) @ centred.patches(c).transpose(1, 2),
        "materialise": lambda: layer.rows(b).transpose(1, 2) @ centred.patches(a),
        "apply": lambda: Layer.apply(layer, centre(w[None])[0], a),
        "apply_each": lambda: Layer.apply_each(layer, centre(each), a),
    }[method]()
    kernel = getattr(centred, method)(*METHODS[method](a, c, b, w, each, None, None))
    assert_close(kernel.reshape(maths.shape), maths)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize(("groups", "out"), [(2, 4), (4, 4)])
def test_a_grouped_convolution_is_one_of_each_group(kernel: int, groups: int, out: int) -> None:
    """Also the products of shifts, for depthwise kernels larger than 3x3."""
    fan = 4 // groups
    sides = (2, 2), (kernel // 2,) * 2, (1, 1), (6, 6)
    layer = Conv((out, fan, kernel, kernel), *sides, groups)
    alone = Conv((out // groups, fan, kernel, kernel), *sides)
    a, _, b, w, each, *_ = operands(layer)
    split_a, split_b = a.chunk(groups, 2), b.chunk(groups, 2)
    pairs = list(zip(split_a, split_b, strict=True))
    assert_close(
        layer.materialise(a, b), torch.cat([Layer.materialise(alone, *pair) for pair in pairs], 1)
    )
    assert_close(layer.contract(a, b), torch.cat([Layer.contract(alone, *pair) for pair in pairs]))
    for method, weights, axis in (("apply", w, 0), ("apply_each", each, 1)):
        parts = zip(weights.chunk(groups, axis), split_a, strict=True)
        maths = torch.cat([getattr(Layer, method)(alone, v, x) for v, x in parts], 2)
        assert_close(getattr(layer, method)(weights, a), maths)


def test_an_embedding_is_a_matrix_product_with_one_hot_rows() -> None:
    layer = Embedding((7, 3))
    torch.manual_seed(0)
    ids, b, table = torch.randint(7, (UNITS, 5)), draw(UNITS, 5, 3), draw(7, 3)
    product, (rows, one_hot) = layer.as_product(ids, b)
    assert_close(layer.materialise(ids, b), Layer.materialise(product, rows, one_hot))
    assert_close(layer.contract(ids, b), Layer.contract(product, rows, one_hot))
    assert_close(layer.gram(ids, ids).double(), one_hot @ one_hot.transpose(1, 2))
    assert_close(layer.apply(table, ids), one_hot @ table)


def test_a_wrong_kernel_is_seen() -> None:
    """The comparison fails for a Gram matrix that forgets a shift."""

    class Forgetful(Conv):
        def _shift(self, gram: Tensor, axis: int, size: int, *, back: bool = False) -> Tensor:
            return gram

    layer = Forgetful((4, 3, 3, 3), (1, 1), (1, 1), (1, 1), (6, 6))
    a, c, *_ = operands(layer)
    with pytest.raises(AssertionError):
        assert_close(layer.gram(a, c), Layer.gram(layer, a, c))
