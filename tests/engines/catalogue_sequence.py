"""Models for sequences: transformers, recurrent layers, embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from catalogue import ROWS, Example, Net, example, parameter, register
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LENGTH, WIDTH, WORDS = 5, 4, 9


def series(features: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, LENGTH, features)


def ids() -> Tensor:
    return torch.randint(1, WORDS, (ROWS, LENGTH))


def lengths() -> Tensor:
    return torch.tensor([5, 3, 4, 2])


def _encoder(name: str, call: Callable[..., Tensor], **options: Any) -> None:
    def made() -> Example:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, **options)
        return Example(Net(call, layer=layer, head=nn.Linear(WIDTH, 3)), series())

    made.__module__ = __name__
    register(name, made)


def _causal(x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)


def _batch_first(m: Net, x: Tensor) -> Tensor:
    return m.head(m.layer(x).mean(1))


def _time_first(m: Net, x: Tensor) -> Tensor:
    return m.head(m.layer(x.transpose(0, 1)).mean(0))


def _masked(m: Net, x: Tensor) -> Tensor:
    return m.head(m.layer(x, src_mask=_causal(x), is_causal=True)[:, -1])


_encoder("encoder layer, post-norm", _batch_first, batch_first=True)
_encoder("encoder layer, pre-norm", _batch_first, batch_first=True, norm_first=True)
_encoder("encoder layer, GELU, no bias", _batch_first, batch_first=True, activation="gelu",
         bias=False)  # fmt: skip
_encoder("encoder layer, time first", _time_first)
_encoder("encoder layer, causal mask", _masked, batch_first=True)


@example
def encoder_layer__padding_mask() -> Example:
    def call(m: Net, x: Tensor, padded: Tensor) -> Tensor:
        return m.head(m.layer(x, src_key_padding_mask=padded)[:, 0])

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
    padded = torch.arange(LENGTH) >= lengths()[:, None]
    return Example(Net(call, layer=layer, head=nn.Linear(WIDTH, 3)), (series(), padded))


@example
def encoder_of_two_layers() -> Example:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    return Example(Net(_batch_first, layer=encoder, head=nn.Linear(WIDTH, 3)), series())


@example
def encoder_layer__dropout() -> Example:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.2, batch_first=True)
    return Example(Net(_batch_first, layer=layer, head=nn.Linear(WIDTH, 3)), series())


@example
def decoder_layer() -> Example:
    def call(m: Net, x: Tensor, memory: Tensor) -> Tensor:
        return m.head(m.layer(x, memory, tgt_mask=_causal(x)))

    layer = nn.TransformerDecoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
    parts = {"layer": layer, "head": nn.Linear(WIDTH, 3)}
    return Example(Net(call, **parts), (series(), series()), torch.randint(0, 3, (ROWS, LENGTH)))


@example
def encoder_and_decoder() -> Example:
    def call(m: Net, source: Tensor, target: Tensor) -> Tensor:
        return m.head(m.body(m.words(source), m.words(target)))

    body = nn.Transformer(WIDTH, 2, 1, 1, 6, dropout=0.0, batch_first=True)
    parts = {"words": nn.Embedding(WORDS, WIDTH), "body": body, "head": nn.Linear(WIDTH, WORDS)}
    return Example(Net(call, **parts), (ids(), ids()), ids())


def _attention(name: str, call: Callable[..., Tensor], **options: Any) -> None:
    def made() -> Example:
        attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)
        return Example(Net(call, attention=attention, head=nn.Linear(WIDTH, 3)), series())

    made.__module__ = __name__
    register(name, made)


def _self_attention(m: Net, x: Tensor) -> Tensor:
    return m.head(m.attention(x, x, x)[0].mean(1))


def _with_weights(m: Net, x: Tensor) -> Tensor:
    mixed, weights = m.attention(x, x.flip(1), x, average_attn_weights=False)
    return m.head(mixed.mean(1) + weights.sum((1, 2))[:, :4])


_attention("multi-head attention", _self_attention)
_attention("multi-head attention, its weights used", _with_weights)
_attention("multi-head attention, key and value bias", _self_attention, add_bias_kv=True)
_attention("multi-head attention, zero key", _self_attention, add_zero_attn=True)


@example
def multi_head_attention__other_key_size() -> Example:
    def call(m: Net, x: Tensor, other: Tensor) -> Tensor:
        return m.head(m.attention(x, other, other)[0].mean(1))

    attention = nn.MultiheadAttention(WIDTH, 2, kdim=3, vdim=3, batch_first=True)
    return Example(Net(call, attention=attention, head=nn.Linear(WIDTH, 3)), (series(), series(3)))


@example
def rotary_attention() -> Example:
    def rotate(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * place.cos() - b * place.sin(), a * place.sin() + b * place.cos()], -1)

    def call(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return m.head(mixed.mean(1))

    return Example(Net(call, qkv=nn.Linear(WIDTH, 12), head=nn.Linear(WIDTH, 3)), series())


@example
def relative_position_attention() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        bias = m.bias(place[:, None] - place + LENGTH)[..., 0]
        return m.head(((q @ k.mT / math.sqrt(WIDTH) + bias).softmax(-1) @ v).mean(1))

    parts = {"qkv": nn.Linear(WIDTH, 12), "bias": nn.Embedding(2 * LENGTH, 1)}
    return Example(Net(call, **parts, head=nn.Linear(WIDTH, 3)), series())


@example
def grouped_query_attention() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = m.q(x).view(n, t, 4, 2).transpose(1, 2)
        k, v = (f(x).view(n, t, 2, 2).transpose(1, 2) for f in (m.k, m.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return m.head(mixed.transpose(1, 2).flatten(2).mean(1))

    sizes = {"q": 8, "k": 4, "v": 4}
    parts = {name: nn.Linear(WIDTH, out) for name, out in sizes.items()}
    return Example(Net(call, **parts, head=nn.Linear(8, 3)), series())


@example
def linear_attention() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("ntd,nte->nde", k, v)
        out = torch.einsum("ntd,nde->nte", q, memory) / (q @ k.sum(1)[..., None])
        return m.head(out.mean(1))

    return Example(Net(call, qkv=nn.Linear(WIDTH, 12), head=nn.Linear(WIDTH, 3)), series())


# --- recurrent


def _recurrent(name: str, cls: type[nn.RNNBase], **options: Any) -> None:
    def call(m: Net, x: Tensor) -> Tensor:
        return m.head(m.layer(x)[0][:, -1])

    def made() -> Example:
        layer = cls(3, 4, batch_first=True, **options)
        out = layer(torch.randn(1, 2, 3))[0].shape[-1]
        return Example(Net(call, layer=layer, head=nn.Linear(out, 3)), series(3))

    made.__module__ = __name__
    register(name, made)


_recurrent("LSTM", nn.LSTM)
_recurrent("LSTM, two layers, both ways", nn.LSTM, num_layers=2, bidirectional=True)
_recurrent("LSTM with projection", nn.LSTM, proj_size=2)
_recurrent("LSTM without bias", nn.LSTM, bias=False)
_recurrent("GRU", nn.GRU)
_recurrent("GRU, two layers, both ways", nn.GRU, num_layers=2, bidirectional=True)
_recurrent("RNN, tanh", nn.RNN)
_recurrent("RNN, ReLU, two layers", nn.RNN, nonlinearity="relu", num_layers=2)


@example
def LSTM__time_first__given_state() -> Example:
    def call(m: Net, x: Tensor, h: Tensor) -> Tensor:
        state = h.transpose(0, 1).contiguous()
        out, (last, _) = m.layer(x.transpose(0, 1), (state, state.tanh()))
        return m.head(out[-1] + last[-1])

    return Example(
        Net(call, layer=nn.LSTM(3, 4), head=nn.Linear(4, 3)), (series(3), torch.randn(ROWS, 1, 4))
    )


@example
def LSTM__packed() -> Example:
    def call(m: Net, x: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True)
        return m.head(out.sum(1))

    layer = nn.LSTM(3, 4, bidirectional=True, batch_first=True)
    return Example(Net(call, layer=layer, head=nn.Linear(8, 3)), (series(3), lengths()))


def _cell(name: str, cls: type[nn.RNNCellBase]) -> None:
    def call(m: Net, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    def made() -> Example:
        return Example(Net(call, cell=cls(3, 4), head=nn.Linear(4, 3)), series(3))

    made.__module__ = __name__
    register(name, made)


_cell("LSTM cell", nn.LSTMCell)
_cell("GRU cell", nn.GRUCell)
_cell("RNN cell", nn.RNNCell)


@example
def sequence_to_sequence() -> Example:
    def call(m: Net, source: Tensor, target: Tensor) -> Tensor:
        _, state = m.encoder(m.words(source))
        return m.head(m.decoder(m.words(target), state)[0])

    parts = {"words": nn.Embedding(WORDS, 3), "encoder": nn.GRU(3, 4, batch_first=True)}
    parts |= {"decoder": nn.GRU(3, 4, batch_first=True), "head": nn.Linear(4, WORDS)}
    return Example(Net(call, **parts), (ids(), ids()), ids())


@example
def state_space_scan() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        state, decay = torch.zeros_like(x[:, 0]), m.decay.sigmoid()
        for t in range(x.shape[1]):
            state = decay * state + m.input(x[:, t]) * x[:, t]
        return m.head(state)

    parts = {"decay": parameter(WIDTH), "input": nn.Linear(WIDTH, WIDTH)}
    return Example(Net(call, **parts, head=nn.Linear(WIDTH, 3)), series())


# --- embeddings


@example
def text_convolution() -> Example:
    def call(m: Net, words: Tensor) -> Tensor:
        x = m.words(words).transpose(1, 2)
        return m.head(torch.cat([f(x).amax(2) for f in (m.two, m.three)], 1))

    parts = {"words": nn.Embedding(WORDS, 4, padding_idx=0), "two": nn.Conv1d(4, 3, 2)}
    return Example(Net(call, **parts, three=nn.Conv1d(4, 3, 3), head=nn.Linear(6, 3)), ids())


@example
def embedding_with_padding() -> Example:
    def call(m: Net, words: Tensor) -> Tensor:
        return m.head(m.words(words).tanh().sum(1))

    words = ids().masked_fill(torch.arange(LENGTH) >= lengths()[:, None], 0)
    parts = {"words": nn.Embedding(WORDS, 4, padding_idx=0), "head": nn.Linear(4, 3)}
    return Example(Net(call, **parts), words)


@example
def embedding_bag() -> Example:
    parts = {"words": nn.EmbeddingBag(WORDS, 4), "head": nn.Linear(4, 3)}
    return Example(Net(lambda m, words: m.head(m.words(words).tanh()), **parts), ids())


@example
def learned_positions() -> Example:
    def call(m: Net, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device).expand_as(words)
        return m.head((m.words(words) * m.places(places)).tanh())

    parts = {"words": nn.Embedding(WORDS, 4), "places": nn.Embedding(LENGTH, 4)}
    return Example(Net(call, **parts, head=nn.Linear(4, WORDS)), ids(), ids())


@example
def flattened_tokens() -> Example:
    """[T * N, width] inside, time first."""

    def call(m: Net, x: Tensor) -> Tensor:
        n, t, width = x.shape
        flat = x.transpose(0, 1).reshape(t * n, width)
        return m.head(m.body(flat).tanh()).view(t, n, 3).mean(0)

    head = nn.Linear(5, 3)
    nn.init.zeros_(head.weight)
    return Example(Net(call, body=nn.Linear(WIDTH, 5), head=head), series())


@example
def length_changes_from_batch_to_batch() -> Example:
    def call(m: Net, words: Tensor) -> Tensor:
        x = m.words(words)
        return m.head(m.layer(x, src_mask=_causal(x)).mean(1))

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True)
    parts = {"words": nn.Embedding(WORDS, WIDTH), "layer": layer, "head": nn.Linear(WIDTH, 3)}
    batches = [torch.randint(1, WORDS, (ROWS, length)) for length in (5, 3, 7, 3)]
    return Example(Net(call, **parts), lambda step: batches[step])


@example
def temporal_convolution() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for k, layer in enumerate(m.layers):
            x = x + layer(F.pad(x, (2**k, 0))).tanh()
        return m.head(x[..., -1])

    layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 2, dilation=2**k) for k in range(3))
    return Example(Net(call, layers=layers, head=nn.Linear(WIDTH, 3)), series())


@example
def soft_mixture_of_experts() -> Example:
    def call(m: Net, x: Tensor) -> Tensor:
        gates = m.gate(x).softmax(-1)
        experts = torch.stack([f(x).tanh() for f in m.experts], -1)
        return m.head((experts * gates[..., None, :]).sum(-1).mean(1))

    experts = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))
    return Example(
        Net(call, gate=nn.Linear(WIDTH, 3), experts=experts, head=nn.Linear(5, 3)), series()
    )


@example
def top_1_mixture_of_experts() -> Example:
    """Each record's tokens go to an expert of their own, by a mask."""

    def call(m: Net, x: Tensor) -> Tensor:
        gates = m.gate(x).softmax(-1)
        best = F.one_hot(gates.argmax(-1), 3) * gates
        return m.head(
            sum(best[..., e, None] * f(x).tanh() for e, f in enumerate(m.experts)).mean(1)
        )

    experts = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(3))
    return Example(
        Net(call, gate=nn.Linear(WIDTH, 3), experts=experts, head=nn.Linear(5, 3)), series()
    )
