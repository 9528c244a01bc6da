"""Recurrent layers decomposed into ``F.linear``, so that every use of their weights is visible.

Torch runs a whole recurrent layer as one opaque function (``torch.lstm``, ``torch.gru``,
``torch.rnn_tanh``, ``torch.rnn_relu``) without a batching rule. The replacements in
:data:`DECOMPOSED` compute the same equations with the same arguments. With x_t the input, h_t the
state, [i f g o] = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh split in four:

* LSTM: c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),  h_t = W_hr (sigmoid(o) tanh(c_t)),
  where W_hr is absent without projections;
* GRU: r, z = sigmoid(...),  n = tanh(W_in x_t + b_in + r (W_hn h_{t-1} + b_hn)),
  h_t = n + z (h_{t-1} - n);
* RNN: h_t = tanh(...) or relu(...).

The input projection W_ih x is one ``F.linear`` over the whole sequence; only the hidden projection
is computed step by step. An LSTM layer in one direction is a torch function of its own,
:func:`lstm_layer`, so that an engine can run all its steps by a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dpbam.engines.decomposed.sequences import (
    Masked,
    Packed,
    PackedRow,
    Padded,
    State,
    pack,
    pad,
)


class Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    hr: Tensor | None = None


Step = Callable[[Weights, Tensor, State], State]  # of the projected input, [B, gates * hidden]


def _lstm_step(weights: Weights, x: Tensor, state: State) -> State:
    h, c = state
    h, c = lstm_gates(x, F.linear(h, weights.hh, weights.b_hh), c)
    return (h if weights.hr is None else F.linear(h, weights.hr)), c


def lstm_gates(x: Tensor, projected: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return (h_t, c_t) before a projection: what an LSTM computes entry by entry.

    A torch function of its own, so that an engine intercepts one call per step, not eleven.
    """
    if has_torch_function((x, projected, c)):
        state: tuple[Tensor, Tensor] = handle_torch_function(
            lstm_gates, (x, projected, c), x, projected, c
        )
        return state
    i, f, g, o = (x + projected).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def lstm_layer(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
    b_hh: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (h_t of all steps, the last c) of x [T, B, width]: [T, B, hidden], [B, hidden].

    A torch function of its own, so that an engine may run all steps at once.
    """
    arguments = x, h, c, w_ih, w_hh, b_ih, b_hh, reverse
    tensors = tuple(t for t in arguments if isinstance(t, Tensor))
    if has_torch_function(tensors):
        outputs: tuple[Tensor, Tensor] = handle_torch_function(lstm_layer, tensors, *arguments)
        return outputs
    return lstm_steps(*arguments)


def lstm_steps(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
    b_hh: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the same as :func:`lstm_layer`, step by step."""
    weights = Weights(w_ih, w_hh, b_ih, b_hh)
    output, (_, c) = _run_steps(_lstm_step, weights, x, (h, c), Padded(), reverse=reverse)
    return output, c


def _run_steps(
    step: Step, weights: Weights, x: Tensor, start: State, sequence: Padded, *, reverse: bool
) -> tuple[Tensor, State]:
    """Run one layer in one direction, step by step; return (output, final state)."""
    steps = sequence.split(F.linear(x, weights.ih, weights.b_ih))
    outputs, end = sequence.scan(partial(step, weights), steps, start, reverse=reverse)
    return sequence.join(outputs), end


def _gru_step(weights: Weights, x: Tensor, state: State) -> State:
    (h,) = state
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = F.linear(h, weights.hh, weights.b_hh).chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (n + (x_z + h_z).sigmoid() * (h - n),)


def _tanh_step(weights: Weights, x: Tensor, state: State) -> State:
    return ((x + F.linear(state[0], weights.hh, weights.b_hh)).tanh(),)


def _relu_step(weights: Weights, x: Tensor, state: State) -> State:
    return ((x + F.linear(state[0], weights.hh, weights.b_hh)).relu(),)


class Layers(NamedTuple):
    """The arguments of a call, without its input."""

    step: Step
    start: list[State]  # one per layer and direction
    weights: list[Weights]  # one per layer and direction
    dropout: float
    directions: int


def _parse(
    step: Step, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> Layers:  # fmt: skip
    directions = 2 if bidirectional else 1
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    per = len(params) // (num_layers * directions)
    groups = [params[at : at + per] for at in range(0, len(params), per)]
    weights = [_weights(group, has_biases) for group in groups]
    start = list(zip(*(s.unbind(0) for s in states), strict=True))
    return Layers(step, start, weights, dropout if train else 0.0, directions)


def _weights(group: Sequence[Tensor], has_biases: bool) -> Weights:
    if has_biases:  # torch's order: W_ih, W_hh, then b_ih, b_hh if any, then W_hr if any
        return Weights(*group)
    return Weights(group[0], group[1], hr=group[2] if len(group) > 2 else None)


def _run(layers: Layers, x: Tensor, sequence: Padded) -> tuple[Tensor, list[State]]:
    """Run all layers over x, split into steps by ``sequence``; return (output, final states)."""
    final: list[State] = []
    last = len(layers.weights) // layers.directions - 1
    for layer in range(last + 1):
        outputs = []
        for direction in range(layers.directions):
            at = layer * layers.directions + direction
            weights = layers.weights[at]
            start = tuple(s + x.new_zeros(s.shape) for s in layers.start[at])  # one state per row
            out, end = _run_layer(layers.step, weights, x, start, sequence, reverse=direction == 1)
            outputs.append(out)
            final.append(end)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if layer < last and layers.dropout > 0:
            x = F.dropout(x, layers.dropout, True)
    return x, final


def _run_layer(
    step: Step, weights: Weights, x: Tensor, start: State, sequence: Padded, *, reverse: bool
) -> tuple[Tensor, State]:
    """Run one layer in one direction; return (output, final state)."""
    if step is _lstm_step and weights.hr is None and sequence.one_length:
        h, c = start
        ih, hh, b_ih, b_hh, _ = weights
        out, c = lstm_layer(x, h, c, ih, hh, b_ih, b_hh, reverse)
        return out, (out[0 if reverse else -1], c)
    return _run_steps(step, weights, x, start, sequence, reverse=reverse)


def _recurrent(step: Step, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    # as in torch, packed input has batch_sizes as second argument
    if "batch_sizes" in kwargs or (len(args) > 4 and isinstance(args[4], bool)):
        output, final = _packed(step, *args, **kwargs)
    else:
        output, final = _padded(step, *args, **kwargs)
    return (output, *(torch.stack(states) for states in zip(*final, strict=True)))


def _padded(
    step: Step, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[State]]:  # fmt: skip
    layers = _parse(step, hx, params, has_biases, num_layers, dropout, train, bidirectional)
    x = input.transpose(0, 1) if batch_first else input
    output, final = _run(layers, x, Padded())
    return (output.transpose(0, 1) if batch_first else output), final


def _packed(
    step: Step, data: Any, batch_sizes: Tensor, hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool,
) -> tuple[Any, list[State]]:  # fmt: skip
    layers = _parse(step, hx, params, has_biases, num_layers, dropout, train, bidirectional)
    if isinstance(data, PackedRow):
        output, final = _run(layers, data.padded, Masked(data.lengths))
        return PackedRow(output, data.lengths), final
    return _run(layers, data, Packed(batch_sizes))


def _cell(
    step: Step, input: Tensor, hx: Tensor | Sequence[Tensor], w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None = None, b_hh: Tensor | None = None,
) -> Tensor | State:  # fmt: skip
    state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    start = tuple(s + input.new_zeros(s.shape) for s in state)
    end = step(Weights(w_ih, w_hh, b_ih, b_hh), F.linear(input, w_ih, b_ih), start)
    return end[0] if isinstance(hx, Tensor) else end


DECOMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: partial(_recurrent, _lstm_step),
    torch.gru: partial(_recurrent, _gru_step),
    torch.rnn_tanh: partial(_recurrent, _tanh_step),
    torch.rnn_relu: partial(_recurrent, _relu_step),
    torch.lstm_cell: partial(_cell, _lstm_step),
    torch.gru_cell: partial(_cell, _gru_step),
    torch.rnn_tanh_cell: partial(_cell, _tanh_step),
    torch.rnn_relu_cell: partial(_cell, _relu_step),
    torch._VF._pack_padded_sequence: pack,
    torch._VF._pad_packed_sequence: pad,
}
