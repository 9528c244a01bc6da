"""Convolutions, plain and transposed.

In the canonical form a position is an output pixel and a_t its patch. Unfolding images into patches
(im2col) would be slow and large. Instead, G_u of all units is the weight gradient of one
convolution whose groups are the units, and the Gram matrix of patches is a sum of shifted Gram
matrices of pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbam.engines.batching import apply
from dpbam.engines.fused.bilinear import MATRIX_ENTRY, Costs, Layer, Purpose
from dpbam.engines.fused.fold import cached_slices, split_axis
from dpbam.engines.fused.generic import generic
from dpbam.engines.fused.rules import Call, ready, rule, use_matrix
from dpbam.engines.fused.tape import Capture, not_a_view, with_rows

_BACKWARD = torch.ops.aten.convolution_backward.default  # without a search for the overload


@dataclass(frozen=True)
class Conv(Layer):
    """A convolution: a [U, q, i, *space], b [U, q, o, *space'], W [o, i / groups, *kernel].

    A transposed convolution is this one with a and b exchanged: see its rule.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    space: tuple[int, ...]  # of a's images; uses at different sizes are different layers
    groups: int = 1

    @property
    def has_gram(self) -> bool:
        return self.groups == 1  # the weights of grouped convolutions are small: materialised

    def left_form(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def right_form(self, y: Tensor) -> Tensor:
        return y.flatten(1, 2)

    def patches(self, a: Tensor) -> Tensor:
        """Return the patches, by a convolution whose output channels are a patch's entries."""
        y = self.forward(a.flatten(0, 1), self._identity(a), None, groups=1)
        return self.rows(split_axis(y, 0, a.shape[:2]))

    def from_patches(self, patches: Tensor, template: Tensor) -> Tensor:
        images = self._as_images(patches, self._out(template.shape[3:])).flatten(0, 1)
        back = self.back(images, self._identity(patches), template.flatten(0, 1).shape)
        return back.view(template.shape)

    def _identity(self, a: Tensor) -> Tensor:
        """Return the identity of a patch's entries as a kernel: [i k, i, *kernel]."""
        entries = math.prod(self.shape[1:])
        return torch.eye(entries, dtype=a.dtype, device=a.device).view(entries, *self.shape[1:])

    def left_template(self, b: Tensor) -> Tensor:
        channels = self.shape[1] * self.groups
        return b.new_empty(1).expand(*b.shape[:2], channels, *self.space)

    def right_template(self, a: Tensor) -> Tensor:
        return a.new_empty(1).expand(*a.shape[:2], self.shape[0], *self._out(self.space))

    def positions(self, b: Tensor) -> int:
        return b.shape[1] * b.shape[3:].numel()

    def gram(self, a: Tensor, c: Tensor) -> Tensor:
        """Return sum_d K[t + d, t' + d] over the kernel's offsets d, K the Gram matrix of pixels.

        The sum over d takes one spatial axis after the other: k + k additions instead of k * k.
        """
        units, q, _, *space = a.shape
        gram = (self.rows(a) @ self.rows(c).transpose(1, 2)).view(units, q, *space, -1, *space)
        for axis in range(len(space)):
            gram = self._shift(gram, axis, space[axis])
        return gram.reshape(units, math.prod(gram.shape[1 : 2 + len(space)]), -1)

    def gram_back(self, weights: Tensor, a: Tensor) -> Tensor:
        units, q, _, *space = a.shape
        out = self._out(space)
        total = weights.reshape(units, -1, *out, q, *out)
        for axis in reversed(range(len(space))):
            total = self._shift(total, axis, space[axis], back=True)
        pixels = math.prod([q, *space])
        return self._as_images(total.reshape(units, -1, pixels) @ self.rows(a), space)

    def _out(self, space: Sequence[int]) -> list[int]:
        return [self._positions_along(axis, n) for axis, n in enumerate(space)]

    def _positions_along(self, axis: int, n: int) -> int:
        k, s = self.shape[2 + axis], self.stride[axis]
        return (n + 2 * self.padding[axis] - self.dilation[axis] * (k - 1) - 1) // s + 1

    def _shift(self, gram: Tensor, axis: int, size: int, *, back: bool = False) -> Tensor:
        """Return sum_d K[.., s o + d, .., s o' + d, ..] along one spatial axis, zero-padded.

        ``back``: its adjoint. ``size``: of the image along this axis.
        """
        k, s = self.shape[2 + axis], self.stride[axis]
        p, dilation = self.padding[axis], self.dilation[axis]
        if (k, s, p) == (1, 1, 0):
            return gram
        first, second = 2 + axis, 2 + axis + gram.ndim // 2
        out = self._positions_along(axis, size)
        shape = list(gram.shape)
        shape[first] = shape[second] = size if back else out
        same = s == 1 and out == size and p % dilation == 0  # then one offset is no shift at all
        total = gram.clone() if same else gram.new_zeros(shape)
        for d in range(k):
            offset = d * dilation - p  # output o reads input s o + offset
            if same and offset == 0:
                continue
            low = max(0, -(offset // s))  # the first o that reads inside the image, and the last
            high = min(out, (size - 1 - offset) // s + 1)
            if high <= low:
                continue
            inside = slice(s * low + offset, s * (high - 1) + offset + 1, s)
            outside = slice(low, high)  # the positions that read these pixels
            read, write = (outside, inside) if back else (inside, outside)
            piece = _slice_both(gram, first, second, read)
            _slice_both(total, first, second, write).add_(piece)
        return total

    @cached_property
    def overlap(self) -> float:
        """Return sqrt(c), where a pixel is in at most c = prod ceil(k gcd(s, d) / s) patches.

        Of the k offsets of an axis, every (s / gcd(s, d))-th reads the same pixel.
        """
        axes = zip(self.shape[2:], self.stride, self.dilation, strict=True)
        return math.sqrt(math.prod([-(-k * math.gcd(s, d) // s) for k, s, d in axes]))

    def mean(self, a: Tensor) -> Tensor:
        """Return the patches' means: a box filter over the mean channel."""
        kernel = self.shape[2:]
        box = a.new_full((1, 1, *kernel), 1.0 / math.prod(kernel))
        channel = a.mean(2, keepdim=True).flatten(0, 1)
        return self.forward(channel, box, None, groups=1).reshape(a.shape[0], -1)

    def mean_back(self, weights: Tensor, a: Tensor) -> Tensor:
        units, q, channels, *space = a.shape
        kernel = self.shape[2:]
        box = a.new_full((1, 1, *kernel), 1.0 / (channels * math.prod(kernel)))
        b = weights.reshape(units * q, 1, *self._out(space))
        channel = self.back(b, box, torch.Size((units * q, 1, *space)))
        return split_axis(channel, 0, (units, q)).expand(a.shape)

    def rows(self, b: Tensor) -> Tensor:
        return b.flatten(3).transpose(2, 3).flatten(1, 2)

    def channels(self, values: Tensor, b: Tensor) -> Tensor:
        units = values.shape[0] if values.ndim == 2 else 1
        return values.reshape(units, 1, -1, *(1,) * (b.ndim - 3))

    def from_rows(self, rows: Tensor, template: Tensor) -> Tensor:
        return self._as_images(rows, template.shape[3:])

    def _as_images(self, rows: Tensor, space: Sequence[int]) -> Tensor:
        """Return [U, T, c] as [U, q, c, *space]."""
        images = split_axis(rows, 1, (-1, math.prod(space))).transpose(2, 3)
        return images.reshape(*images.shape[:3], *space)

    def prefers_gram(self, t: int, pairs: int, purpose: Purpose) -> bool:
        o, pixel, *kernel = self.shape
        i = pixel * math.prod(kernel)
        sizes = t, self._pixels(t), (i, o), pixel
        if self._is_pointwise:
            return Costs(*sizes, entry=MATRIX_ENTRY).gram_is_cheaper(pairs, purpose)
        # a convolution whose groups are the units is slower than one for all of them; measured on
        # 3x3 kernels of 8 to 256 channels, 4x4 to 32x32 pixels (benchmarks/cost_model.py)
        costs = Costs(*sizes, entry=0, product=1.5, derivative=6, largest=4)
        return costs.gram_is_cheaper(pairs, purpose)

    def gram_entries(self, t: int) -> int:
        return t * t + self._pixels(t) ** 2  # the matrix of positions, and that of pixels

    def _pixels(self, t: int) -> int:
        return t * math.prod(self.stride)  # roughly

    def materialise(self, a: Tensor, b: Tensor) -> Tensor:
        units = a.shape[0]
        if self._is_pointwise:
            matrices = (b.flatten(3) @ a.flatten(3).transpose(2, 3)).sum(1)
            return matrices.view(units, *self.shape)
        recorded = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        if self._shifts_are_faster and not recorded:
            parts = [self._products_of_shifts(a[i], b[i]) for i in cached_slices(b)]
            return torch.cat(parts).view(units, *self.shape)
        weights = a.new_empty((units * self.shape[0], *self.shape[1:]))
        merged = self._weight_gradient(_units_as_groups(a), _units_as_groups(b), weights, units)
        return merged.view(units, *self.shape)

    @cached_property
    def _is_pointwise(self) -> bool:
        """Whether the kernel is 1x1, a matrix: torch runs units as groups one after the other."""
        single = (self.shape[2:], self.stride) == ((1,) * len(self.stride),) * 2
        return single and not any(self.padding) and self.groups == 1

    @property
    def _shifts_are_faster(self) -> bool:
        """Whether the kernel is depthwise and larger than 3x3, for which torch has no fast path."""
        depthwise = self.shape[1] == 1 and self.groups == self.shape[0]
        return depthwise and math.prod(self.shape[2:]) > 9

    def _products_of_shifts(self, a: Tensor, b: Tensor) -> Tensor:
        """Return sum_t b_t a_(s t + d) for each offset d of a depthwise kernel: [U, o, offsets].

        With channels last, so that sums over positions are sums of long rows.
        """
        units, q, o, *space = a.shape
        sizes = [n + 2 * p for n, p in zip(space, self.padding, strict=True)]
        x = a.new_zeros(q, *sizes, units, o)
        inside = [slice(p, p + n) for n, p in zip(space, self.padding, strict=True)]
        x[(slice(None), *inside)] = _channels_last(a)
        y = _channels_last(b).contiguous()
        kernel, out, product = self.shape[2:], b.shape[3:], torch.empty_like(y)
        sums = a.new_empty(math.prod(kernel), units, o)
        for k, offset in enumerate(itertools.product(*map(range, kernel))):
            axes = zip(offset, self.dilation, self.stride, out, strict=True)
            read = [slice(d * e, d * e + s * (n - 1) + 1, s) for d, e, s, n in axes]
            torch.mul(y, x[(slice(None), *read)], out=product)
            torch.sum(product.flatten(0, -3), 0, out=sums[k])
        return sums.permute(1, 2, 0)

    def contract(self, a: Tensor, b: Tensor) -> Tensor:
        return self._weight_gradient(a.flatten(0, 1), b.flatten(0, 1), a.new_empty(self.shape), 1)

    def apply(self, weight: Tensor, a: Tensor) -> Tensor:
        y = self.forward(a.flatten(0, 1), weight, None, self.groups)
        return split_axis(y, 0, a.shape[:2])

    def apply_each(self, weights: Tensor, a: Tensor) -> Tensor:
        units = a.shape[0]
        if self._is_pointwise:
            return split_axis(weights.flatten(2).unsqueeze(1) @ a.flatten(3), 3, a.shape[3:])
        merged = weights.flatten(0, 1)
        y = self.forward(_units_as_groups(a), merged, None, units * self.groups)
        return split_axis(y, 1, (units, -1)).transpose(0, 1)

    def transpose_each(self, weights: Tensor, b: Tensor, template: Tensor) -> Tensor:
        units = b.shape[0]
        if self._is_pointwise:
            transposed = weights.flatten(2).transpose(1, 2).unsqueeze(1)
            return split_axis(transposed @ b.flatten(3), 3, b.shape[3:])
        shape = _units_as_groups(template).shape
        back = self.back(_units_as_groups(b), weights.flatten(0, 1), shape, units)
        return split_axis(back, 1, (units, -1)).transpose(0, 1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """Return the convolution: [n, i, *space] -> [n, o, *space']."""
        none = [0] * len(self.stride)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, none, groups
        )

    def back(self, b: Tensor, weight: Tensor, shape: torch.Size, units: int = 1) -> Tensor:
        """Return the data gradient: [n, o, *space'] -> [n, i, *space]."""
        images = b.new_empty(1).expand(shape)
        return self._gradients(b, images, weight, units, [True, False, False])[0]

    def back_in_form(self, b: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """Return the data gradient: [n, q, o, *space'] -> [n, q, i, *space]."""
        images = torch.Size((shape[0] * shape[1], *shape[2:]))
        return self.back(b.flatten(0, 1), weight, images).view(shape)

    def _weight_gradient(self, a: Tensor, b: Tensor, weight: Tensor, units: int) -> Tensor:
        return self._gradients(b, a, weight, units, [False, True, False])[1]

    def _gradients(
        self, b: Tensor, x: Tensor, weight: Tensor, units: int, wanted: list[bool]
    ) -> tuple[Tensor, ...]:
        none = [0] * len(self.stride)
        gradients: tuple[Tensor, ...] = _BACKWARD(
            b, x, weight, None, self.stride, self.padding, self.dilation, False, none,
            self.groups * units, wanted,
        )  # fmt: skip
        return gradients


def _channels_last(t: Tensor) -> Tensor:
    """Return [U, q, c, *space] as [q, *space, U, c]."""
    return t.permute(1, *range(3, t.ndim), 0, 2)


def _units_as_groups(t: Tensor) -> Tensor:
    """Return [U, q, c, *space] as [q, U * c, *space]."""
    return t.transpose(0, 1).flatten(1, 2)


def _slice_both(t: Tensor, first: int, second: int, positions: slice) -> Tensor:
    """Return the view of these positions along two axes."""
    index: list[slice] = [slice(None)] * t.ndim
    index[first] = index[second] = positions
    return t[tuple(index)]


class Convolve(torch.autograd.Function):
    """y = f(W, x) + bias, in x alone: x [n, q, i, *space]. Its derivative is :class:`Spread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Conv) -> Tensor:
        ctx.options = weight, layer, x.shape
        y = layer.forward(x.flatten(0, 1), weight, bias, layer.groups)
        return with_rows(y, x.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, layer, shape = ctx.options
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if torch.is_grad_enabled():
            return apply(Spread, grad, weight, layer, shape), None, None, None
        return layer.back_in_form(grad, weight, shape), None, None, None


class Spread(torch.autograd.Function):
    """h = f(W, .)^T b, the data gradient, in b alone. Its derivative is :class:`Convolve`."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, weight: Tensor, layer: Conv, shape: torch.Size) -> Tensor:
        ctx.options = weight, layer
        return not_a_view(layer.back_in_form(b, weight, shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, layer = ctx.options
        return apply(Convolve, grad, weight, None, layer), None, None, None


_CONV = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_TRANSPOSED = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}


@rule(*_CONV)
def _conv(capture: Capture, call: Call) -> Any:
    arguments = call.bind("input weight bias stride padding dilation groups")
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    dims = _CONV[call.func]
    if x.ndim != dims + 2 or not ready(capture, x, weight, bias):
        return generic(capture, call)
    stride, dilation = _each(arguments["stride"], dims, 1), _each(arguments["dilation"], dims, 1)
    x, padding = _padded(x, arguments["padding"], weight.shape[2:], dilation)
    space, groups = tuple(x.shape[2:]), arguments["groups"] or 1
    layer = Conv(tuple(weight.shape), stride, padding, dilation, space, groups)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        cast = [None if t is None else t.to(x.dtype) for t in (weight, bias)]
        y: Tensor = apply(Convolve, x, *cast, layer)
        return y

    operands = (_autocast(x), weight, bias)
    what = capture.name_of(call, weight)
    return use_matrix(capture, what, convolve, layer, operands, channel_axes=dims)


@rule(*_TRANSPOSED)
def _transposed(capture: Capture, call: Call) -> Any:
    """Record y = conv^T(x): the weight gradient of conv with x and the gradient at y exchanged."""
    arguments = call.bind("input weight bias stride padding output_padding groups dilation")
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    dims = _TRANSPOSED[call.func]
    if x.ndim != dims + 2 or not ready(capture, x, weight, bias):
        return generic(capture, call)
    stride, dilation = _each(arguments["stride"], dims, 1), _each(arguments["dilation"], dims, 1)
    padding, more = (
        _each(arguments["padding"], dims, 0),
        _each(arguments["output_padding"], dims, 0),
    )
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, more, strict=True)
    space = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in sizes)
    groups = arguments["groups"] or 1
    layer = Conv(tuple(weight.shape), stride, padding, dilation, space, groups)

    def transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        images = x.flatten(0, 1)
        y: Tensor = call.func(images, weight, bias, stride, padding, more, groups, dilation)
        return split_axis(y, 0, x.shape[:2])

    what = capture.name_of(call, weight)
    operands = (x, weight, bias)
    return use_matrix(capture, what, transposed, layer, operands, channel_axes=dims, swap=True)


def _autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype, which torch does not apply to custom functions."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _each(value: Any, dims: int, default: int) -> tuple[int, ...]:
    if value is None:
        return (default,) * dims
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * dims if len(values) == 1 else values


def _padded(
    x: Tensor, padding: Any, kernel: torch.Size, dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return x and a padding in numbers; 'same' with an even kernel first pads x on one side."""
    dims = len(kernel)
    if not isinstance(padding, str):
        return x, _each(padding, dims, 0)
    if padding == "valid":
        return x, (0,) * dims
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):
        x = F.pad(x, [side for extra in reversed(odd) for side in (0, extra)])
    return x, tuple(t // 2 for t in total)
