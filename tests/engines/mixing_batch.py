"""Models that mix the records of one batch within a forward pass, or in the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from catalogue import Net, parameter
from mixing import WIDTH, Mixing, linear, loss, mixes
from torch import Tensor, nn


def centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


# --- behind something that is shut at the start


@mixes
def zero_gate() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(h + m.gate * centred(h).tanh())

    return Mixing(linear(call, gate=nn.Parameter(torch.zeros(()))))


@mixes
def zero_layer_scale() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(h + m.scale * centred(h))

    return Mixing(linear(call, scale=nn.Parameter(torch.zeros(5))))


@mixes
def zero_head() -> Mixing:
    net = linear(lambda m, x: m.head(centred(m.first(x)).tanh()))
    nn.init.zeros_(net.head.weight)
    return Mixing(net)


@mixes
def zero_projection_in_a_residual() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(h + m.project(centred(h).relu()))

    net = linear(call, project=nn.Linear(5, 5))
    nn.init.zeros_(net.project.weight)
    return Mixing(net)


@mixes
def gate_that_a_step_opens() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head(h + F.relu(m.gate).sum() * centred(h))

    return Mixing(linear(call, gate=nn.Parameter(torch.full((4,), -0.1))))


@mixes
def mixing_after_the_parameters_moved() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        moved = bool((m.first.weight.detach() - m.start).abs().sum() > 0.1)
        return m.head(centred(h).tanh() if moved else h.tanh())

    net = linear(call)
    net.register_buffer("start", net.first.weight.detach().clone())
    return Mixing(net)


# --- statistics of the batch


def _statistic(name: str, mix: Any) -> None:
    def make() -> Mixing:
        return Mixing(linear(lambda m, x: m.head(mix(m.first(x)).tanh())))

    make.__name__ = name
    mixes(make)


def _quantised(h: Tensor) -> Tensor:
    scale = float(h.detach().abs().max()) / 7
    return torch.fake_quantize_per_tensor_affine(h, scale, 0, -8, 7)


def _quantised_by_hand(h: Tensor) -> Tensor:
    scale = h.detach().abs().max() / 7
    return h + ((h / scale).round() * scale - h).detach()


def _whitened(h: Tensor) -> Tensor:
    return h @ torch.linalg.inv(h.t() @ h + torch.eye(h.shape[1], dtype=h.dtype))


def _nearest(h: Tensor) -> Tensor:
    return (-torch.cdist(h.detach(), h.detach())).softmax(1) @ h


_statistic("mean removed", centred)
_statistic("mean removed, detached", lambda h: h - h.mean(0).detach())
_statistic("standardised by the batch", lambda h: centred(h) / (h.std(0, unbiased=False) + 1e-3))
_statistic(
    "divided by the standard deviation, detached",
    lambda h: h / (h.std(unbiased=False).detach() + 0.1),
)
_statistic("divided by the maximum", lambda h: h / h.max())
_statistic("divided by the norm", lambda h: 3 * h / h.norm())
_statistic("normalised along the batch", lambda h: F.normalize(h, dim=0))
_statistic("softmax along the batch", lambda h: h.softmax(0) * 5)
_statistic("median removed", lambda h: h - h.median(0).values)
_statistic("quantile as a threshold", lambda h: F.relu(h - h.detach().quantile(0.7)))
_statistic("fake quantisation", _quantised)
_statistic("fake quantisation by hand", _quantised_by_hand)
_statistic("batch norm as a function", lambda h: F.batch_norm(h, None, None, training=True))
_statistic("layer norm of the transpose", lambda h: F.layer_norm(h.t(), (h.shape[0],)).t())
_statistic("whitened by the batch", _whitened)
_statistic("neighbours in the batch", _nearest)


# --- along the batch axis


_statistic("cumulative sum", lambda h: h.cumsum(0))
_statistic("cumulative maximum", lambda h: h.cummax(0).values)
_statistic("cumulative log-sum-exp", lambda h: h.logcumsumexp(0))
_statistic("flipped", lambda h: h + h.flip(0))
_statistic("rolled", lambda h: h - h.roll(1, 0))
_statistic("mixed up with the next", lambda h: 0.6 * h + 0.4 * h[torch.arange(len(h)) - 1])
_statistic("sorted by a feature", lambda h: h.sort(0).values)
_statistic("rows ordered by length", lambda h: h[h.detach().norm(dim=1).argsort()])
_statistic("first row for all", lambda h: h + h[:1])
_statistic("reshaped over the rows", lambda h: h.t().reshape(h.shape) + h)
_statistic("convolution along the batch", lambda h: F.avg_pool1d(h.t()[None], 3, 1, 1)[0].t())
_statistic(
    "capacity of the batch",
    lambda h: h * (h.sum(1) >= h.sum(1).topk(max(1, len(h) // 2)).values[-1])[:, None],
)


@mixes
def causal_attention_along_the_batch() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x)[None].chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]
        return m.head(mixed)

    return Mixing(linear(call, qkv=nn.Linear(WIDTH, 15)))


@mixes
def encoder_layer_on_batch_first_data() -> Mixing:
    """The default of batch_first is False: records attend to one another."""

    def call(m: Net, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0], dtype=x.dtype)
        return m.head(m.first(m.layer(x, src_mask=mask)).mean(1))

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0)
    return Mixing(linear(call, layer=layer), shape=(3, WIDTH))


@mixes
def attention_on_batch_first_data() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.first(m.attention(x, x, x)[0]).mean(1))

    attention = nn.MultiheadAttention(WIDTH, 2)
    return Mixing(linear(call, attention=attention), shape=(3, WIDTH))


@mixes
def recurrent_layer_on_batch_first_data() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.layer(x)[0][:, -1])

    return Mixing(linear(call, layer=nn.GRU(WIDTH, 5)), shape=(3, WIDTH))


@mixes
def recurrent_cell_along_the_batch() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        state, out = torch.zeros(1, 5, dtype=x.dtype), []
        for row in x:
            state = m.cell(row[None], state)
            out.append(state)
        return m.head(torch.cat(out))

    return Mixing(linear(call, cell=nn.GRUCell(WIDTH, 5)))


@mixes
def similarities_within_the_batch() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = F.normalize(m.first(x), dim=1)
        return m.head(h) + (h @ h.t()).logsumexp(1, keepdim=True) * m.weight

    return Mixing(linear(call, weight=parameter(3)))


# --- by the size of the batch


@mixes
def scaled_by_the_size() -> Mixing:
    return Mixing(linear(lambda m, x: m.head(m.first(x).tanh() * len(x))))


@mixes
def only_above_a_size() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head((centred(h) if len(x) > 4 else h).tanh())

    return Mixing(linear(call))


@mixes
def only_odd_sizes() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.head((h.flip(0) if len(x) % 2 else h).tanh())

    return Mixing(linear(call))


@mixes
def split_in_halves() -> Mixing:
    def call(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        half = len(h) // 2
        return m.head(torch.cat([h[:half] + h[-1:], h[half:]]).tanh())

    return Mixing(linear(call))


# --- in the loss


def simple(m: Net, x: Tensor) -> Tensor:
    return m.head(m.first(x).tanh())


def _loss(name: str, mixed: Any) -> None:
    def make() -> Mixing:
        return Mixing(linear(simple), loss=mixed)

    make.__name__ = name
    mixes(make)


def _by_class(out: Tensor, y: Tensor) -> Tensor:
    counts = F.one_hot(y, 3).sum(0)
    return loss(out, y) / counts[y]


def _contrastive(out: Tensor, y: Tensor) -> Tensor:
    return loss(out @ out.t(), torch.arange(len(out)))


_loss("loss minus its mean", lambda out, y: loss(out, y) - 3 * loss(out, y).mean())
_loss("loss of the hardest", lambda out, y: loss(out, y) * (loss(out, y) >= loss(out, y).median()))
_loss("loss divided by the maximum", lambda out, y: 9 * loss(out, y) / loss(out, y).max().detach())
_loss("loss weighted by class counts", _by_class)
_loss("contrastive loss", _contrastive)
_loss("mean spread over the rows", lambda out, y: loss(out, y).mean().expand(len(y)) * len(y))
