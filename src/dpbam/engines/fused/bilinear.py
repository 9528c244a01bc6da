"""Bilinear layers: the factors of a layer's per-unit gradient, and their maths.

A layer y = f(W, a) that is linear in W and in a has the per-unit gradient

    G_u = sum_t b_t (x) a_t       b_t: gradient at the t-th output position, a_t: input of W there

summed over the T positions of all rows of unit u. In the canonical form A is [U, T, in], B is
[U, T, out], and G_u = B^T A. :class:`Layer` has all maths in that form; a kind of layer supplies
the reshapes between its tensors and the form. Its faster kernels override the maths, and are
tested against it (``tests/engines/test_layer_maths.py``). Only ``materialise`` computes G_u:

=================  ========================================================  ==================
``gram``           <a_t, c_t'> for all pairs of positions of a unit          [U, T, T]
``materialise``    G_u                                                       [U, *weight]
``contract``       sum_u G_u (scale b first for a weighted sum)              [*weight]
``apply``          f(V, a), so that <G_u, V> = sum_t <b_t, f(V, a)_t>        as b
=================  ========================================================  ==================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.batching import apply
from dpbam.params import new_memory

Pair = tuple[Tensor, Tensor]
Purpose = Literal["sum", "ascent", "derivative"]  # what follows a norm
_NARROW = 16  # columns of a matrix
SHORTEST, LONGEST = 1e-12, 1e15  # between them the squares of a float32 vector add up rightly


class Layer:
    """One kind of bilinear layer with one setting of its options.

    a and b are as :meth:`left_form` and :meth:`right_form` return them. The defaults are those of a
    layer whose a and b are A and B themselves.

    Attributes:
        shape: the weight's, output channels first.
        is_matrix_product: whether :meth:`as_product` is available, for weights that are tied.
        has_input_gradient: whether a is differentiable.
    """

    shape: tuple[int, ...]
    is_matrix_product: ClassVar[bool] = False
    has_input_gradient: ClassVar[bool] = True

    @property
    def has_gram(self) -> bool:
        """Whether :meth:`gram` is available."""
        return True

    # --- the canonical form

    def left_form(self, x: Tensor) -> Tensor:
        """Return [U, R, *row] of the layer's input as a."""
        return x.flatten(1, -2)

    def right_form(self, y: Tensor) -> Tensor:
        """Return [U, R, *row] of the layer's output as b."""
        return y.flatten(1, -2)

    def patches(self, a: Tensor) -> Tensor:
        """Return A: [U, T, in]."""
        return a

    def from_patches(self, patches: Tensor, template: Tensor) -> Tensor:
        """Return the adjoint of :meth:`patches`, shaped as ``template``, an a."""
        return patches

    def rows(self, b: Tensor) -> Tensor:
        """Return B, in the order of :meth:`gram`: [U, T, out]."""
        return b

    def from_rows(self, rows: Tensor, template: Tensor) -> Tensor:
        """Return [U, T, out] as a b, shaped as ``template``."""
        return rows

    def left_template(self, b: Tensor) -> Tensor:
        """Return an a without values, of the shape of the input that gives this b."""
        return b.new_empty(1).expand(*b.shape[:-1], self.shape[1])

    def right_template(self, a: Tensor) -> Tensor:
        """Return a b without values, of the shape of the output for this a."""
        return a.new_empty(1).expand(*a.shape[:-1], self.shape[0])

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        """Return [out] or [U, out] shaped to multiply b."""
        return values.unsqueeze(-2)

    def positions(self, b: Tensor) -> int:
        """Return T, the positions per unit."""
        return b.shape[1]

    def is_outer_product(self, b: Tensor) -> bool:
        """Whether G_u is the one outer product b (x) a, whose norm is |a| |b|."""
        return False

    @property
    def uncentred(self) -> Layer:
        """The layer itself, where it is that of a centred weight."""
        return self

    # --- the maths

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """Return <a_t, c_t'>: [U, T, T]."""
        return self.patches(a) @ self.patches(c).transpose(1, 2)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """Return the gradient in c of sum weights * gram(c, a), weights [U, T, T]."""
        return self.from_patches(weights @ self.patches(a), a)

    def mean(self, a: Tensor) -> Tensor:
        """Return the mean of a_t's entries, for centred weights: [U, T]."""
        return self.patches(a).mean(-1)

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        """Return the gradient in a of sum weights * mean(a), weights [U, T]."""
        fan_in = math.prod(self.shape[1:])
        shares = (weights / fan_in).unsqueeze(2)
        return self.from_patches(shares.expand(*weights.shape, fan_in), a)

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        """Return G_u = B^T A: [U, *shape]."""
        left, right = self.rows(b), self.patches(a)
        if _is_narrow(left, right):
            product = torch.bmm(right.mT, left).mT
        else:
            product = torch.bmm(left.mT, right)
        return product.reshape(len(b), *self.shape)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        """Return sum_u G_u, by one product over the positions of all units: [*shape]."""
        left, right = self.rows(b).flatten(0, 1), self.patches(a).flatten(0, 1)
        if _is_narrow(left, right):
            return torch.mm(right.t(), left).t().reshape(self.shape)
        total = new_memory((left.shape[1], right.shape[1]), left.dtype, left.device)
        return torch.mm(left.t(), right, out=total).view(self.shape)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        """Return f(weight, a) = A W^T, shaped as b."""
        rows = F.linear(self.patches(a), weight.flatten(1))
        return self.from_rows(rows, self.right_template(a))

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        """Return f(weights_u, a_u), shaped as b."""
        rows = self.patches(a) @ weights.flatten(2).transpose(1, 2)
        return self.from_rows(rows, self.right_template(a))

    def transpose_each(self, weights: Tensor, b: Tensor, template: Tensor) -> Tensor:
        """Return f(weights_u, .)^T b_u, shaped as ``template``, an a."""
        return self.from_patches(self.rows(b) @ weights.flatten(2), template)

    def run_each(
        self, x: Tensor, weights: Tensor, offset: Tensor | None, *, swap: bool = False
    ) -> Tensor:
        """Return f(weights_u, x_u) + offset_u, or its transpose; differentiable in x alone."""
        y: Tensor = apply(Each, x, self, weights, offset, swap)
        return y

    def ascend(self, x: Tensor, pairs: Sequence[Pair]) -> Tensor:
        """Return sum_t b_t <a_t, x_s> over the pairs (a, b), shaped as b; differentiable in x."""
        y: Tensor = apply(Ascend, x, self, pairs)
        return y

    def as_product(self, a: Tensor, b: Tensor) -> tuple[Layer, Pair]:
        """Return a layer whose a and b are [U, T, in] and [U, T, out], and the pair in its form."""
        raise NotImplementedError

    # --- sizes and costs

    @property
    def overlap(self) -> float:
        """The most by which sqrt(sum_t |a_t|^2) exceeds the length of the layer's input."""
        return 1.0

    def size(self, a: Tensor) -> Tensor:
        """Return a bound on sqrt(sum_t |a_t|^2), of the uncentred input, in float64: [U]."""
        return lengths(a) * self.overlap

    def short_size(self, a: Tensor) -> Tensor:
        """Return size / overlap in a's own dtype, where it may under- or overflow: [U]."""
        return short_lengths(a)

    def gram_entries(self, t: int) -> int:
        """Return the size per unit of the matrices that :meth:`gram` needs, for T positions."""
        return 2 * t * t

    def prefers_gram(self, t: int, pairs: int, purpose: Purpose) -> bool:
        """Whether the norm is faster by Gram matrices than by materialising G_u."""
        o, i = self.shape
        return Costs(t, t, (i, o), i, entry=MATRIX_ENTRY).gram_is_cheaper(pairs, purpose)


def _is_narrow(left: Tensor, right: Tensor) -> bool:
    """Whether B^T A has few columns, as of LoRA: BLAS takes a sixth of the time for its transpose.

    ``left`` is [..., T, out] and ``right`` [..., T, in].
    """
    return right.shape[-1] < _NARROW < left.shape[-1]


def lengths(x: Tensor) -> Tensor:
    """Return |x_u| in float64, which MPS does not have: [U, ...] -> [U].

    Units whose squares could under- or overflow in x's own dtype are computed in float64.
    """
    dtype = widest(x)
    short = short_lengths(x)
    exact = short.to(dtype)
    doubtful = ~((short > SHORTEST) & (short < LONGEST))
    if bool(doubtful.any()):
        exact[doubtful] = torch.linalg.vector_norm(x.flatten(1)[doubtful], dim=1, dtype=dtype)
    return exact


def short_lengths(x: Tensor) -> Tensor:
    """Return |x_u| in x's own dtype; right between SHORTEST and LONGEST: [U, ...] -> [U]."""
    short: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return short


def widest(x: Tensor) -> torch.dtype:
    """Return float64, which MPS does not have."""
    return x.dtype if x.device.type == "mps" else torch.float64


class Each(torch.autograd.Function):
    """f(weights_u, x_u) + offset_u, or its transpose (``swap``): a function of x alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Layer, weights: Tensor, offset: Tensor | None, swap: bool
    ) -> Tensor:
        ctx.options = layer, weights, swap, x.new_empty(1).expand(x.shape)
        if swap:
            y = layer.transpose_each(weights, x, layer.left_template(x))
        else:
            y = layer.apply_each(weights, x)
        return y if offset is None else y.add_(layer.channels(offset, y))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer, weights, swap, template = ctx.options
        none = (None,) * 4
        if not ctx.needs_input_grad[0]:
            return None, *none
        if swap:
            return layer.apply_each(weights, grad), *none
        return layer.transpose_each(weights, grad, template), *none


class Ascend(torch.autograd.Function):
    """sum_t b_t <a_t, x_s>, shaped as b: a function of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, pairs: list[Pair]) -> Tensor:
        ctx.options = layer, pairs

        def term(a: Tensor, b: Tensor) -> Tensor:
            rows = layer.rows(b)
            return layer.gram(x, a).to(rows.dtype) @ rows

        return layer.from_rows(reduce(torch.add, (term(a, b) for a, b in pairs)), pairs[0][1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer, pairs = ctx.options
        if not ctx.needs_input_grad[0]:
            return None, None, None

        def term(a: Tensor, b: Tensor) -> Tensor:
            weights = layer.rows(grad) @ layer.rows(b).transpose(1, 2)  # <g_s, b_t>
            back: Tensor = layer.gram_back(weights, a)
            return back

        return reduce(torch.add, (term(a, b) for a, b in pairs)), None, None


_ENTRY = 60  # an entry of a Gram matrix takes the time of this many products
MATRIX_ENTRY = 10  # and one of G_u by a product of matrices


@dataclass(frozen=True)
class Costs:
    """The cost model of one layer, in multiplications per unit.

    A Gram matrix takes T^2 products per channel and some time per entry; G_u takes T i o products
    and some time per entry, and also serves the weighted sum, which saves T i o products there. A
    differentiated norm takes three times as long by G_u. The ascent step takes two more Gram
    matrices; with G_u it replaces the layer by an equal one.

    Attributes:
        positions: T.
        pixels: positions of the input, where its Gram matrix is computed.
        weights: (i, o).
        channels: of a pixel.
        entry: the time of an entry of G_u.
        product: the time of one of its T i o products.
        derivative: the time of a differentiated Gram matrix: two products (K B and S A), and what
            the shifts of a kernel take, forth and back.
        largest: how many times larger than x and b together G_u may be.
    """

    positions: int
    pixels: int
    weights: tuple[int, int]
    channels: int
    entry: int
    product: float = 1
    derivative: int = 2
    largest: int = 2

    def gram_is_cheaper(self, pairs: int, purpose: Purpose) -> bool:
        """Whether Gram matrices are faster; always where G_u is far larger than x and b."""
        i, o = self.weights
        if i * o > self.largest * (self.pixels * self.channels + self.positions * o):
            return True
        gram = self.pixels**2 * (self.channels + _ENTRY) + self.positions**2 * o
        materialised = i * o * (self.entry + self.product * self.positions)
        if purpose == "derivative":
            return self.derivative * gram < 3 * materialised
        materialised -= i * o * self.positions  # which the weighted sum saves
        return gram * pairs * (3 if purpose == "ascent" else 1) < materialised
