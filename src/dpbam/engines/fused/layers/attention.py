"""Scaled dot-product attention: computed for all rows at once, by torch's own kernel.

It has no parameters; without a rule vmap would use torch's slow fallback. Multi-head attention is
decomposed before (:mod:`dpbam.engines.decomposed`).

Torch's fast kernels have no second derivative, and its other kernel keeps matrices of all pairs of
positions for every layer. For exact BAM on long sequences, :class:`Attend` computes the attention
of some queries at a time, and computes it again in each backward pass: memory is linear in the
length. Autograd differentiates each term, so that no formula is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpbam.engines.batching import apply, requires_grad
from dpbam.engines.decomposed.attention import dot_product
from dpbam.engines.fused.fold import split_axis
from dpbam.engines.fused.rules import Call, rule
from dpbam.engines.fused.tape import Capture

_ENTRIES = 2**16  # of the scores of one head that are computed at a time, but for
_QUERIES = 64  # at least so many: each term also takes a pass over all keys and values


@rule(F.scaled_dot_product_attention, always=True)
def _attention(capture: Capture, call: Call) -> Any:
    args = call.bind("query key value attn_mask dropout_p is_causal scale enable_gqa")
    operands = [args["query"], args["key"], args["value"]]
    mask = args["attn_mask"]
    tensors = operands if mask is None else [*operands, mask]
    if any(capture.weight(t) for t in tensors) or (mask is not None and requires_grad(mask)):
        with capture:  # the fast kernels have no gradient for a mask
            return dot_product(*call.args, **call.kwargs)
    if any(t.ndim != 4 for t in operands) or (mask is not None and mask.ndim > 4):
        return call.run()
    options = {k: args[k] for k in ("is_causal", "scale", "enable_gqa") if args[k] is not None}

    def for_all_rows(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        images = [t.flatten(0, 1) for t in (q, k, v)]
        placed = [_four_axes(m, q.shape[1]) for m in masks]
        if capture.twice and _is_long(*images):
            heads = q.shape[2] // k.shape[2] if args["enable_gqa"] else 1
            images[1:] = [t.repeat_interleave(heads, 1) if heads > 1 else t for t in images[1:]]
            how = _How(placed[0] if masks else None, bool(args["is_causal"]), args["scale"])
            return split_axis(apply(Attend, *images, how), 0, q.shape[:2])
        attend: Any = F.scaled_dot_product_attention
        y: Tensor = attend(*images, *placed, **options)
        return split_axis(y, 0, q.shape[:2])

    return capture.all_rows(for_all_rows, *tensors)


def _four_axes(mask: Tensor, images: int) -> Tensor:
    """Return [N, *row] as [N * images, heads, length, sources], with 1 where axes broadcast."""
    row = (1,) * (5 - mask.ndim) + tuple(mask.shape[1:])
    mask = mask.reshape(mask.shape[0], *row)
    return mask.expand(-1, images, -1, -1, -1).flatten(0, 1)


def _is_long(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether scores of all queries at once would be large; in low precision torch's rules hold."""
    full = q.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(
        q.device.type
    )
    return full and q.shape[-2] * k.shape[-2] > _ENTRIES


class _How(NamedTuple):
    """The options of an attention; the mask broadcasts to [N, heads, length, sources]."""

    mask: Tensor | None
    causal: bool
    scale: float | None

    def attend(self, rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of the queries q, which are ``rows`` of all."""
        mask = self.mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        if self.causal:
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            mask = seen.tril(rows.start)
        return dot_product(q, k, v, mask, scale=self.scale)


def _query_slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    rows = max(_QUERIES, _ENTRIES // k.shape[-2])
    for first in range(0, q.shape[-2], rows):
        yield slice(first, min(first + rows, q.shape[-2]))


class Attend(torch.autograd.Function):
    """softmax(q k^T scale + mask) v, by some queries at a time. Its derivative is _Back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.how = how
        return torch.cat([how.attend(i, q[..., i, :], k, v) for i in _query_slices(q, k)], -2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return *apply(_Back, g, *ctx.saved_tensors, ctx.how), None


class _Back(torch.autograd.Function):
    """(g, q, k, v) -> the gradients in q, k and v."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, how: _How) -> Any:
        ctx.save_for_backward(g, q, k, v)
        ctx.how = how
        totals = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in _query_slices(q, k):
            with torch.enable_grad():
                leaves = _leaves(q[..., i, :], k, v)
                y = how.attend(i, *leaves)
            terms = torch.autograd.grad(y, leaves, g[..., i, :])
            _add(totals, terms, i)
        return totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *bars: Tensor) -> Any:
        g, q, k, v = ctx.saved_tensors
        totals = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        in_g = torch.empty_like(g)
        for i in _query_slices(q, k):
            with torch.enable_grad():
                leaves, seed = _leaves(q[..., i, :], k, v), _leaves(g[..., i, :])[0]
                y = ctx.how.attend(i, *leaves)
                first = torch.autograd.grad(y, leaves, seed, create_graph=True)
            weights = [bars[0][..., i, :], *bars[1:]]
            in_g[..., i, :], *terms = torch.autograd.grad(first, [seed, *leaves], weights)
            _add(totals, terms, i)
        return in_g, *totals, None


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def _add(totals: tuple[Tensor, Tensor, Tensor], terms: Any, rows: slice) -> None:
    """Put the gradient in these queries in its place, and add those in keys and values."""
    totals[0][..., rows, :] = terms[0]
    for total, term in zip(totals[1:], terms[1:], strict=True):
        total.add_(term)
