"""Average pooling over tiles, with its derivative written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpbam.engines.fused.fold import split_axis
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture


def _offsets(k: int) -> list[tuple[Any, slice, slice]]:
    """Return the indices of the pixels at each position of a tile: strided views."""
    return [(..., slice(i, None, k), slice(j, None, k)) for i in range(k) for j in range(k)]


class AveragePool(torch.autograd.Function):
    """Means over tiles of k x k pixels that cover the image. Its derivative is :class:`Tile`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.k = k
        total = None
        for offset in _offsets(k):
            total = x[offset].clone() if total is None else total.add_(x[offset])
        assert total is not None
        return total.mul_(1 / k**2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Tile.apply(grad, ctx.k), None  # type: ignore[no-untyped-call]


class Tile(torch.autograd.Function):
    """Spread each pixel over a tile of k x k, divided by k^2. Its derivative is the pool again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, k: int) -> Tensor:
        ctx.k = k
        share, (n, c, y, x) = g / k**2, g.shape
        out = g.new_empty(n, c, y * k, x * k)
        for offset in _offsets(k):
            out[offset] = share
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return AveragePool.apply(grad, ctx.k), None  # type: ignore[no-untyped-call]


@rule(torch._C._nn.avg_pool2d, always=True)
def _average_pool(capture: Capture, call: Call) -> Any:
    names = "input kernel_size stride padding ceil_mode count_include_pad divisor_override"
    arguments = call.bind(names)
    x, k = arguments["input"], arguments["kernel_size"]
    k = k[0] if isinstance(k, tuple) and k[0] == k[1] else k
    tiles = arguments["stride"] in (None, k, (k, k)) and not arguments["padding"]
    fits = isinstance(k, int) and x.ndim == 4 and not (x.shape[2] % k or x.shape[3] % k)
    if not (tiles and fits) or arguments["divisor_override"] is not None:
        return call.run()

    def pool(x: Tensor) -> Tensor:
        y: Tensor = AveragePool.apply(x.flatten(0, 1), k)  # type: ignore[no-untyped-call]
        return split_axis(y, 0, x.shape[:2])

    return capture.all_rows(pool, x)
